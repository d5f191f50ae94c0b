"""What engines with ``attention: plugin`` are built for, and the work items of their steps."""

from dataclasses import dataclass

from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt.context import BATCH, OUTPUTS, ROWS, Profile
from trtree.build.network.network import Network, Op
from trtree.plugins.mla_attention.tiles import latent_tile
from trtree.plugins.sparse_indexer.tiles import index_tile
from trtree.plugins.tree_attention.tiles import attention_tile

# CTAs that no GPU of today exceeds at once: more work items would only be merged again.
MAX_CTAS = 1024


@dataclass(frozen=True)
class StepPlan:
    """Work items that a step brings, for all attention layers of one shape and window.

    The fields up to ``top_k`` are plan_attention's; suffix ends the names of its two inputs,
    and of the symbolic size ``items``. max_items: what an engine takes. merged: whether items
    leave partial results, so that the second input says which are a row's.
    """

    suffix: str
    kv_heads: int
    group: int
    block_m: int
    window: int | None
    top_k: int | None
    merged: bool
    max_items: int

    @property
    def items(self) -> str:
        return f"items{self.suffix}"


@dataclass(frozen=True)
class PagedSizes:
    """What paged engines are built for.

    max_rows: of a step, all requests together. verify_width: rows that tiles are chosen for;
    max_verify_width: most rows of one tree. sm: the GPU that kernels are compiled for.
    """

    sm: int
    page_size: int
    num_pages: int
    max_requests: int
    max_rows: int
    max_seq_len: int
    verify_width: int
    max_verify_width: int
    block_size: int

    @property
    def cache_length(self) -> int:
        """Positions of a request: its tokens, and a step's rows behind them."""
        return self.max_seq_len + max(self.max_verify_width, self.block_size)

    @property
    def kv_slots(self) -> int:
        """Of all requests together."""
        return self.num_pages * self.page_size

    @property
    def kv_layout(self) -> str:
        return f"{self.kv_slots} tokens in pages of {self.page_size}"

    @property
    def table_width(self) -> int:
        """Pages of one request."""
        return min(-(-self.cache_length // self.page_size), self.num_pages)

    def rows(self, network: str) -> int:
        """Most rows of a step of this network."""
        return self.max_requests * self.block_size if network == "drafter_block" else self.max_rows

    def mask_words(self, network: str) -> int:
        """Words of a row's packed mask: a prefill chunk may be all of a step."""
        widest = self.block_size if network == "drafter_block" else self.max_rows
        return -(-widest // 32)

    def profiles(self, network: Network, shard: Shard) -> list[Profile]:
        """One: a step has any mix of prefill chunks and trees."""
        most = outputs = self.rows(network.name)  # of a prompt with log-probs, every row
        if network.name == "drafter_block":
            outputs = self.max_requests * max(1, self.block_size - 1)
        sizes = {
            BATCH: (1, 1, 1),
            ROWS: (1, min(self.verify_width, most), most),
            OUTPUTS: (1, min(self.verify_width, outputs), outputs),
        }
        for plan in self.plans(network, shard).values():
            sizes[plan.items] = (1, plan.max_items, plan.max_items)
        return [Profile("step", sizes)]

    def plans(self, network: Network, shard: Shard) -> dict[str, StepPlan]:
        """By attention op; equal ones are one object's worth of inputs."""
        plans: dict[_Cut, StepPlan] = {}
        by_op = {}
        for op in network.ops:
            cut = self._cut(network, op, shard)
            if cut is None:
                continue
            if cut not in plans:
                rows = 1 if cut.top_k is not None else cut.block_m // cut.group
                items = max(self._tiles(network.name, rows), MAX_CTAS // cut.kv_heads)
                fields = (cut.kv_heads, cut.group, cut.block_m, cut.window, cut.top_k, cut.merged)
                plans[cut] = StepPlan(f".{len(plans)}", *fields, items)
            by_op[op.name] = plans[cut]
        return by_op

    def chooses(self, op: Op) -> bool:
        """Whether an index_select has more keys to choose from than it may: else all are chosen."""
        return self.cache_length > int(op.attrs["top_k"])

    def tile_rows(self, network: str) -> int:
        """Rows of one request that an attention tile is chosen for."""
        return self.block_size if network == "drafter_block" else self.verify_width

    def _cut(self, network: Network, op: Op, shard: Shard) -> "_Cut | None":
        """How an op's rows and keys are shared out; None: it has no work items."""
        rows = self.tile_rows(network.name)
        if op.kind == "index_select" and self.chooses(op):
            heads = int(network.tensors[op.inputs[0]].shape[1])
            return _Cut(1, 1, index_tile(self.sm, rows, heads).rows, None, None, merged=False)
        if op.kind not in ("tree_attention", "latent_attention"):
            return None
        state = network.states[str(op.state)]
        own = len(shard.part(int(network.tensors[op.inputs[0]].shape[1]), f"{op.name}: heads"))
        if op.kind == "latent_attention":
            top_k = self.list_width(network, op)
            tile = latent_tile(self.sm, rows, own, selected=top_k is not None)
            return _Cut(own // tile.group, tile.group, tile.block_m, None, top_k, merged=True)
        kv_heads = len(shard.kv_heads(state.heads, f"{state.name}: KV heads"))
        group = own // kv_heads
        block_m = attention_tile(self.sm, state.head_dim, rows, group).block_m
        return _Cut(kv_heads, group, block_m, op.attrs["window"], None, merged=True)

    def list_width(self, network: Network, op: Op) -> int | None:
        """Of the lists of keys that a latent_attention attends; None: it attends all it sees."""
        if len(op.inputs) < 3:
            return None
        (choice,) = (other for other in network.ops if op.inputs[2] in other.outputs)
        return int(choice.attrs["top_k"]) if self.chooses(choice) else None

    def _tiles(self, network: str, rows_per_tile: int) -> int:
        """Most tiles of a step: each request may leave one half empty."""
        return self.max_requests + self.rows(network) // rows_per_tile


@dataclass(frozen=True)
class _Cut:
    """What makes two ops' work items alike; see StepPlan."""

    kv_heads: int
    group: int
    block_m: int
    window: int | None
    top_k: int | None
    merged: bool
