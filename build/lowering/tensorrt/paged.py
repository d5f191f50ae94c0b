"""``--attention plugin``: ragged rows over paged KV, by this project's own kernels.

For ``tensorrt`` 11.x alone. NOT YET RUN: that library needs a GPU to build, and no machine
tried so far had both. The layers around the plugins are the same as in native engines, so a
ragged step is one batch entry: ``[rows, F]`` is ``[1, rows, F]``. Heads are ``[rows, heads, D]``,
as the kernels want them. What a step brings beside its rows (page table, packed masks, work
items) is declared once and read by every layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trtree.build.lowering.division import Shard
from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.tensorrt import branch
from trtree.build.lowering.tensorrt import ops as native
from trtree.build.lowering.tensorrt.context import OUTPUT_PREFIX, ROWS, Binding, Lowering
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes, StepPlan
from trtree.build.network.network import Network, NetworkError, Op
from trtree.plugins.branch_tables import REQUEST_FIELDS

# Inputs of a step that its attention layers share; see plugins/tree_attention/plan.py.
REQUESTS, PAGE_TABLE, WORK, ROW_SPLITS = "requests", "page_table", "work", "row_splits"
# And where an indexer chooses: the slots of each row's request.
LENGTHS = "lengths"
# And where state branches: plugins/branch_tables.py's requests, of which idle ones have no rows.
BRANCH_REQUESTS = "branch_requests"


class Untensored:
    """A graph tensor that no network tensor holds; the ops that may read it know what it is."""


@dataclass(frozen=True)
class Unturned(Untensored):
    """A tensor of heads whose RoPE, from element ``start`` of each on, is left to append."""

    tensor: Any
    table: str
    cos_sin: torch.Tensor  # float32 [positions, rotary_dim]
    interleaved: bool
    start: int = 0

    def turns_like(self, other: "Unturned") -> bool:
        mine, others = ((x.table, x.interleaved, x.start) for x in (self, other))
        return mine == others


@dataclass
class PagedLowering:
    """What one network's lowering holds beside a native one's.

    plugins: the module ``tensorrt.plugin``, in which this project's are registered.
    """

    sizes: PagedSizes
    plugins: Any
    plans: Mapping[str, StepPlan]
    step: dict[str, Any] = field(default_factory=dict)  # tensors that all layers share
    pending: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # yet to be appended
    nan_counts: list[Any] = field(default_factory=list)  # of indexers' scores, int32 [rows]


def paged_lowering(
    sizes: PagedSizes, plugins: Any, network: Network, shard: Shard
) -> PagedLowering:
    """For one network's ``lower``."""
    return PagedLowering(sizes, plugins, sizes.plans(network, shard))


def step_inputs(low: Lowering) -> list[Binding]:
    """Beside the graph's own inputs: whose row is whose, where pages are, who does what."""
    paged = paged_of(low)
    sizes, branches = paged.sizes, not all(s.paged for s in low.network.states.values())
    inputs = [
        Binding(REQUESTS, "int32", (ROWS,)),
        Binding(PAGE_TABLE, "int32", (sizes.max_requests, sizes.table_width)),
    ]
    for plan in dict.fromkeys(paged.plans.values()):
        inputs.append(Binding(WORK + plan.suffix, "int32", (plan.items, 7)))
        if plan.merged:
            inputs.append(Binding(ROW_SPLITS + plan.suffix, "int32", (ROWS, 3)))
    if any(not plan.merged for plan in paged.plans.values()):
        inputs.append(Binding(LENGTHS, "int32", (ROWS,)))
    if branches:
        inputs.append(Binding(BRANCH_REQUESTS, "int32", (sizes.max_requests, REQUEST_FIELDS)))
    return inputs


def step_outputs(low: Lowering) -> list[Binding]:
    """Beside the graph's own: how many NaN each row's scores had, which the runner refuses.

    Raises:
        NetworkError: what was to be appended by its reader has none.
    """
    if unread := [*paged_of(low).pending]:
        raise NetworkError(f"{unread[0]}: plugin attention appends what an op reads, and none does")
    counts = paged_of(low).nan_counts
    if not counts:
        return []
    with low.emit.op("nan_counts"):
        total = counts[0]
        for count in counts[1:]:
            total = low.emit.binary("sum", "SUM", total, count)
    total.name = OUTPUT_PREFIX + "nan_counts"
    low.emit.network.mark_output(total)
    return [Binding(total.name, "int32", (ROWS,))]


def reshaped_inputs(low: Lowering) -> dict[str, Binding]:
    """Inputs of the graph that only kernels read, as they want them."""
    mask = (ROWS, paged_of(low).sizes.mask_words(low.network.name))
    parents = branch.parents_binding(low.network)
    return {
        "slots": Binding("slots", "int32", (ROWS,)),
        "packed_mask": Binding("packed_mask", "int32", mask),
        "causal_mask": Binding("causal_mask", "int32", mask),
        branch.PARENTS: replace(parents, dims=(ROWS, parents.dims[-1])),
    }


# Ops


def reshape(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """[1, rows, F] to [rows, heads, D], or back, or the same numbers to other heads."""
    if isinstance(x[0], Unturned):
        return [_one_head(low, op, x[0])]
    before = low.network.tensors[op.inputs[0]].shape
    after = low.network.tensors[op.outputs[0]].shape
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    extent = low.extent(op.outputs[0])
    if (len(before), len(after)) == (2, 3):
        return [low.emit.shuffle("heads", x[0], (-1, extent, int(after[2])))]
    if (len(before), len(after)) == (3, 2):
        return [low.emit.shuffle("merged", x[0], (1, -1, extent))]
    if (len(before), len(after)) == (3, 3):
        return [low.emit.shuffle("regrouped", x[0], (-1, extent, int(after[2])))]
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


def split(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """Of features, or of every head of [rows, heads, D]."""
    if len(x[0].shape) == 3 and len(low.network.tensors[op.inputs[0]].shape) == 2:
        return native.split(low, op, x)
    low.inherit(op)
    parts, start = [], 0
    for index, size in enumerate(op.attrs["sizes"]):
        parts.append(low.head_slice(f"part{index}", x[0], start, size))
        start += size
    return parts


def concat(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """Of features, or of every head; what one operand has left to turn, the whole has."""
    start, turning = 0, []
    for operand, name in zip(x, op.inputs, strict=True):
        if isinstance(operand, Unturned):
            turning.append(replace(operand, start=start + operand.start))
        start += int(low.network.tensors[name].shape[-1])
    if len(turning) > 1:
        raise NetworkError(f"{op.name}: plugin attention turns one part of a head alone")
    tensors = [operand.tensor if isinstance(operand, Unturned) else operand for operand in x]
    (joined,) = native.concat(low, op, tensors)
    return [replace(part, tensor=joined) for part in turning] or [joined]


def _one_head(low: Lowering, op: Op, x: Unturned) -> Unturned:
    """[rows, 1, D] to [1, rows, D], yet to be turned."""
    before = low.network.tensors[op.inputs[0]].shape
    if len(before) != 3 or before[1] != 1:
        raise NetworkError(f"{op.name}: plugin attention turns {op.inputs[0]} for itself alone")
    return replace(x, tensor=low.emit.shuffle("merged", x.tensor, (1, -1, int(before[2]))))


def kv_append(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """k, v [rows, kv_heads, D]: with the attention that reads them, where there is one."""
    paged, state = paged_of(low), str(op.state)
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

    paged, state = paged_of(low), str(op.state)
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
    from trtree.plugins.tensorrt_plugin import PluginLayer
    from trtree.plugins.tree_attention.specs import LayerConfig

    paged, emit = paged_of(low), low.emit
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
        "positions": positions(low),
        "slots": low.values["slots"],
        REQUESTS: paged.step[REQUESTS],
        PAGE_TABLE: paged.step[PAGE_TABLE],
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_cache_in": caches[0],
        "v_cache_in": caches[1],
    }
    return PluginLayer(config, paged.sizes.sm), tensors


def positions(low: Lowering) -> Any:
    """int32 [rows]."""
    paged = paged_of(low)
    if "positions" not in paged.step:
        with low.emit.op("positions.ragged"):
            ragged = low.emit.shuffle("rows", low.values["positions"], (-1,))
        paged.step["positions"] = ragged
    return paged.step["positions"]


def paged_of(low: Lowering) -> PagedLowering:
    assert low.paged is not None
    return low.paged


# Ops that turn queries and keys, or pass them on to those; no others may read them.
TURNING = frozenset(
    {
        "concat",
        "index_select",
        "kv_append",
        "latent_append",
        "latent_attention",
        "reshape",
        "tree_attention",
    }
)

OPS = {
    "concat": concat,
    "kv_append": kv_append,
    "reshape": reshape,
    "rotary_embedding": rotary_embedding,
    "split": split,
    "tree_attention": tree_attention,
}
