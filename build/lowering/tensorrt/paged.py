"""``--attention plugin``: ragged rows over paged KV, by this project's own kernels.

For ``tensorrt`` 11.x alone. NOT YET RUN: that library needs a GPU to build, and no machine
tried so far had both. The layers around the plugins are the same as in native engines, so a
ragged step is one batch entry: ``[rows, F]`` is ``[1, rows, F]``. Heads are ``[rows, heads, D]``,
as the kernels want them. What a step brings beside its rows (page table, packed masks, work
items) is declared once and read by every layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trtree.build.lowering.division import Shard
from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.tensorrt.context import (
    BATCH,
    OUTPUTS,
    ROWS,
    Binding,
    Lowering,
    Profile,
)
from trtree.build.network.network import Network, NetworkError, Op
from trtree.plugins.tree_attention.tiles import attention_tile

# Inputs of a step that its attention layers share; see plugins/tree_attention/plan.py.
REQUESTS, PAGE_TABLE, WORK, ROW_SPLITS = "requests", "page_table", "work", "row_splits"
# CTAs that no GPU of today exceeds at once: more work items would only be merged again.
MAX_CTAS = 1024


@dataclass(frozen=True)
class StepPlan:
    """Work items that a step brings, for all attention layers of one shape and window.

    The fields up to ``window`` are plan_attention's; suffix ends the names of its two inputs,
    and of the symbolic size ``items``. max_items: what an engine takes.
    """

    suffix: str
    kv_heads: int
    group: int
    block_m: int
    window: int | None
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
        plans: dict[tuple[int, int, int, int | None], StepPlan] = {}
        by_op = {}
        for op in network.ops:
            if op.kind != "tree_attention":
                continue
            state, heads = network.states[str(op.state)], network.tensors[op.inputs[0]].shape[1]
            kv_heads = len(shard.kv_heads(state.heads, f"{state.name}: KV heads"))
            own = len(shard.part(int(heads), f"{op.name}: heads"))
            group, window = own // kv_heads, op.attrs["window"]
            tile = attention_tile(self.sm, state.head_dim, self.tile_rows(network.name), group)
            key = (kv_heads, group, tile.block_m, window)
            if key not in plans:
                limit = self._tiles(network.name, tile.block_m // group)
                items = max(limit, MAX_CTAS // kv_heads)
                plans[key] = StepPlan(f".{len(plans)}", *key, items)
            by_op[op.name] = plans[key]
        return by_op

    def tile_rows(self, network: str) -> int:
        """Rows of one request that an attention tile is chosen for."""
        return self.block_size if network == "drafter_block" else self.verify_width

    def _tiles(self, network: str, rows_per_tile: int) -> int:
        """Most tiles of a step: each request may leave one half empty."""
        return self.max_requests + self.rows(network) // rows_per_tile


@dataclass(frozen=True)
class Unturned:
    """A tensor of heads whose RoPE is left to append."""

    tensor: Any
    table: str
    cos_sin: torch.Tensor  # float32 [positions, rotary_dim]
    interleaved: bool

    def turns_like(self, other: "Unturned") -> bool:
        return (self.table, self.interleaved) == (other.table, other.interleaved)


@dataclass
class PagedLowering:
    """What one network's lowering holds beside a native one's.

    plugins: the module ``tensorrt.plugin``, in which this project's are registered.
    """

    sizes: PagedSizes
    plugins: Any
    plans: Mapping[str, StepPlan]
    step: dict[str, Any] = field(default_factory=dict)  # tensors that all layers share
    pending: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # k, v yet to be appended


def paged_lowering(
    sizes: PagedSizes, plugins: Any, network: Network, shard: Shard
) -> PagedLowering:
    """For one network's ``lower``."""
    return PagedLowering(sizes, plugins, sizes.plans(network, shard))


def step_inputs(paged: PagedLowering) -> list[Binding]:
    """Beside the graph's own inputs: whose row is whose, where pages are, who does what."""
    sizes = paged.sizes
    inputs = [
        Binding(REQUESTS, "int32", (ROWS,)),
        Binding(PAGE_TABLE, "int32", (sizes.max_requests, sizes.table_width)),
    ]
    for plan in dict.fromkeys(paged.plans.values()):
        inputs.append(Binding(WORK + plan.suffix, "int32", (plan.items, 7)))
        inputs.append(Binding(ROW_SPLITS + plan.suffix, "int32", (ROWS, 3)))
    return inputs


def reshaped_inputs(low: Lowering) -> dict[str, Binding]:
    """Inputs of the graph that only attention reads, as its kernels want them."""
    mask = (ROWS, _paged(low).sizes.mask_words(low.network.name))
    return {
        "slots": Binding("slots", "int32", (ROWS,)),
        "packed_mask": Binding("packed_mask", "int32", mask),
        "causal_mask": Binding("causal_mask", "int32", mask),
    }


# Ops


def reshape(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """[1, rows, F] to [rows, heads, D], or back."""
    before = low.network.tensors[op.inputs[0]].shape
    after = low.network.tensors[op.outputs[0]].shape
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    extent = low.extent(op.outputs[0])
    if (len(before), len(after)) == (2, 3):
        return [low.emit.shuffle("heads", x[0], (-1, extent, int(after[2])))]
    if (len(before), len(after)) == (3, 2):
        return [low.emit.shuffle("merged", x[0], (1, -1, extent))]
    raise NetworkError(
        f"{op.name}: plugin attention has no reshape from {list(before)} to {list(after)}"
    )


def rotary_embedding(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """Left to append, which turns q and k on their way."""
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    inv_freq = torch.tensor(low.network.constants[op.attrs["inv_freq"]], dtype=torch.float64)
    angles = torch.arange(low.cache_length).double()[:, None] * inv_freq
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1) * op.attrs["scaling"]
    name = f"{op.attrs['inv_freq']}.cos_sin"
    return [Unturned(x[0], name, cos_sin.float(), op.attrs["interleaved"])]


def kv_append(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """k, v [rows, kv_heads, D]: with the attention that reads them, where there is one."""
    paged, state = _paged(low), str(op.state)
    if any(o.kind == "tree_attention" and o.state == op.state for o in low.network.ops):
        paged.pending[state] = (x[0], x[1])
        return []
    from trtree.plugins.tree_attention.tensorrt_plugin import add_append

    # No queries: k stands for q, and is not written.
    layer, tensors = _layer(low, op, x[0], x[1], x[0], group=0)
    added = add_append(low.emit.network, paged.plugins, layer, tensors, low.emit.layer)
    low.caches[state] = (added["k_cache"], added["v_cache"])
    return []


def tree_attention(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [rows, heads, D]: append, attention and combine, for this layer's keys and values too."""
    from trtree.plugins.tree_attention.tensorrt_plugin import add_attention

    paged, state = _paged(low), str(op.state)
    if state not in paged.pending:
        raise NetworkError(f"{op.name}: plugin attention appends this step's keys and values first")
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    k, v = paged.pending.pop(state)
    plan = paged.plans[op.name]
    layer, tensors = _layer(low, op, k, v, x[0], group=plan.group)
    tensors |= {
        "packed_mask": low.values[op.inputs[1]],
        "work": paged.step[WORK + plan.suffix],
        "row_splits": paged.step[ROW_SPLITS + plan.suffix],
    }
    added = add_attention(low.emit.network, paged.plugins, layer, tensors, low.emit.layer)
    low.values[op.inputs[0]] = added["q"]
    low.caches[state] = (added["k_cache"], added["v_cache"])
    return [added["out"]]


def _layer(low: Lowering, op: Op, k: Any, v: Any, q: Any, group: int) -> tuple[Any, dict[str, Any]]:
    """A layer's kernels, and the tensors of append."""
    from trtree.plugins.tree_attention.specs import LayerConfig
    from trtree.plugins.tree_attention.tensorrt_plugin import PluginLayer

    paged, emit = _paged(low), low.emit
    state = low.network.states[str(op.state)]
    turning = [isinstance(x, Unturned) for x in (q, k)]
    if turning[0] != turning[1] or (turning[0] and not q.turns_like(k)):
        raise NetworkError(f"{op.name}: plugin attention turns queries and keys alike, or neither")
    kv_heads = len(low.encoding.shard.kv_heads(state.heads, f"{state.name}: KV heads"))
    config = LayerConfig(
        head_dim=state.head_dim,
        kv_heads=kv_heads,
        group=group,
        page_size=paged.sizes.page_size,
        rows=paged.sizes.tile_rows(low.network.name),
        scale=op.attrs.get("scale", 1.0),
        rotary_dim=k.cos_sin.shape[1] if turning[1] else 0,
        interleaved=k.interleaved if turning[1] else False,
        window=op.attrs.get("window"),
        dtype=TORCH_DTYPES[low.network.dtype],
        kv_dtype=TORCH_DTYPES[state.dtype],
    )
    # Read for FP8 caches; others have none, but a kernel's arguments are fixed.
    k_scale, v_scale = (
        emit.constant(f"constant/kv_scale/{kv_heads}/{s!r}", torch.full((kv_heads,), s))
        for s in (state.k_scale, state.v_scale)
    )
    caches = low.caches[state.name]
    tensors = {
        "q": q.tensor if turning[0] else q,
        "k": k.tensor if turning[1] else k,
        "v": v,
        "cos_sin": emit.constant(k.table, k.cos_sin) if turning[1] else k_scale,
        "positions": _positions(low, paged),
        "slots": low.values["slots"],
        REQUESTS: paged.step[REQUESTS],
        PAGE_TABLE: paged.step[PAGE_TABLE],
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_cache_in": caches[0],
        "v_cache_in": caches[1],
    }
    return PluginLayer(config, paged.sizes.sm), tensors


def _positions(low: Lowering, paged: PagedLowering) -> Any:
    if "positions" not in paged.step:
        with low.emit.op("positions.ragged"):
            ragged = low.emit.shuffle("rows", low.values["positions"], (-1,))
        paged.step["positions"] = ragged
    return paged.step["positions"]


def _paged(low: Lowering) -> PagedLowering:
    assert low.paged is not None
    return low.paged


# Ops whose kernels turn queries and keys; no others may read them.
TURNING = frozenset({"kv_append", "tree_attention"})

OPS = {
    "kv_append": kv_append,
    "reshape": reshape,
    "rotary_embedding": rotary_embedding,
    "tree_attention": tree_attention,
}
