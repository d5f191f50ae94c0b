"""``--attention plugin`` of latent attention: append, the indexer's choice, and attention of the
chosen keys alone, over pages. NOT YET RUN, like paged.py.

A selection is a list of slots here, int32 [rows, top_k], as the kernels of ``sparse_indexer``
leave it. Where an engine's requests never have more than top_k tokens every visible key is
chosen: nothing is scored, and attention goes by the mask.
"""

from typing import Any

from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.tensorrt import latent as native
from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.lowering.tensorrt.paged import (
    LENGTHS,
    PAGE_TABLE,
    REQUESTS,
    ROW_SPLITS,
    WORK,
    Untensored,
    Unturned,
    paged_of,
    positions,
)
from trtree.build.network.network import NetworkError, Op


class AllVisible(Untensored):
    """The selection of rows that see no more keys than they may choose."""


def latent_append(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [1, rows, D]: appended by what reads the cache, which has queries to be turned alike."""
    paged_of(low).pending[str(op.state)] = (x[0],)
    return []


def index_select(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [rows, heads, D], weights float32 [1, rows, heads] -> int32 [rows, top_k].

    NaN among the scores is counted, and an output of the engine.
    """
    from trtree.plugins.sparse_indexer.specs import IndexLayer
    from trtree.plugins.sparse_indexer.tensorrt_plugin import add_selection
    from trtree.plugins.tensorrt_plugin import PluginLayer

    paged, emit = paged_of(low), low.emit
    q = _append(low, op, x[0])
    if not paged.sizes.chooses(op):
        return [AllVisible()]
    plan = paged.plans[op.name]
    layer = IndexLayer(
        heads=low.extent(op.inputs[0]),
        dim=low.network.states[str(op.state)].head_dim,
        page_size=paged.sizes.page_size,
        rows=paged.sizes.tile_rows(low.network.name),
        dtype=TORCH_DTYPES[low.network.dtype],
    )
    tensors = {
        "q": q,
        "weights": emit.shuffle("weights", x[1], (-1, layer.heads)),
        "cache": low.caches[str(op.state)][0],
        PAGE_TABLE: paged.step[PAGE_TABLE],
        "packed_mask": low.values[op.inputs[2]],
        "work": paged.step[WORK + plan.suffix],
        "lengths": paged.step[LENGTHS],
    }
    added = add_selection(
        emit.network,
        paged.plugins,
        PluginLayer(layer, paged.sizes.sm),
        op.attrs["top_k"],
        tensors,
        emit.layer,
    )
    paged.nan_counts.append(added["nan_counts"])
    return [added["selection"]]


def latent_attention(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [rows, heads, D] -> [rows, heads, value_dim]: over a selection, or what rows see."""
    from trtree.plugins.mla_attention.specs import LatentLayer
    from trtree.plugins.mla_attention.tensorrt_plugin import add_attention
    from trtree.plugins.tensorrt_plugin import PluginLayer

    paged = paged_of(low)
    low.inherit(op)
    q = _append(low, op, x[0])
    plan, value_dim = paged.plans[op.name], op.attrs["value_dim"]
    layer = LatentLayer(
        heads=low.extent(op.inputs[0]),
        value_dim=value_dim,
        rope_dim=low.network.states[str(op.state)].head_dim - value_dim,
        page_size=paged.sizes.page_size,
        rows=paged.sizes.tile_rows(low.network.name),
        scale=op.attrs["scale"],
        selected=plan.top_k is not None,
        dtype=TORCH_DTYPES[low.network.dtype],
    )
    work = paged.step[WORK + plan.suffix]
    tensors = {
        "q": q,
        "cache": low.caches[str(op.state)][0],
        PAGE_TABLE: paged.step[PAGE_TABLE],
        "packed_mask": low.values[op.inputs[1]],
        "selection": x[2] if layer.selected else work,
        "work": work,
        "row_splits": paged.step[ROW_SPLITS + plan.suffix],
    }
    sm = paged.sizes.sm
    added = add_attention(
        low.emit.network, paged.plugins, PluginLayer(layer, sm), tensors, low.emit.layer
    )
    return [added]


def _append(low: Lowering, op: Op, q: Any) -> Any:
    """Write the step's vectors, turned like these queries [rows, heads, D]; returns those."""
    from trtree.plugins.mla_attention.specs import AppendLayer
    from trtree.plugins.mla_attention.tensorrt_plugin import add_append
    from trtree.plugins.tensorrt_plugin import PluginLayer

    paged, emit, state = paged_of(low), low.emit, low.network.states[str(op.state)]
    if state.name not in paged.pending:
        raise NetworkError(f"{op.name}: plugin attention appends this step's vectors first")
    (x,) = paged.pending.pop(state.name)
    if not (isinstance(q, Unturned) and isinstance(x, Unturned) and q.turns_like(x)):
        raise NetworkError(f"{op.name}: plugin attention turns queries and latents alike")
    layer = AppendLayer(
        dim=state.head_dim,
        heads=low.extent(op.inputs[0]),
        page_size=paged.sizes.page_size,
        rotary_start=x.start,
        rotary_dim=x.cos_sin.shape[1],
        interleaved=x.interleaved,
        dtype=TORCH_DTYPES[low.network.dtype],
    )
    tensors = {
        "q": q.tensor,
        "x": emit.shuffle("vectors", x.tensor, (-1, state.head_dim)),
        "cos_sin": emit.constant(x.table, x.cos_sin),
        "positions": positions(low),
        "slots": low.values["slots"],
        REQUESTS: paged.step[REQUESTS],
        PAGE_TABLE: paged.step[PAGE_TABLE],
        "cache_in": low.caches[state.name][0],
    }
    sm = paged.sizes.sm
    added = add_append(emit.network, paged.plugins, PluginLayer(layer, sm), tensors, emit.layer)
    low.caches[state.name] = (added["cache"],)
    low.values[op.inputs[0]] = added["q_out"]
    return added["q_out"]


def head_linear(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [rows, heads, in] -> [rows, heads, out] by one part of every head's matrix."""
    emit = low.emit
    heads, size = low.extent(op.inputs[0]), int(low.network.tensors[op.inputs[0]].shape[2])
    by_head = emit.shuffle("by_head", x[0], (1, -1, heads, size), after=(0, 2, 1, 3))
    (product,) = native.head_linear(low, op, [by_head])
    size = int(low.network.tensors[op.outputs[0]].shape[2])
    return [emit.shuffle("by_row", product, (-1, heads, size), before=(0, 2, 1, 3))]


OPS = {
    "head_linear": head_linear,
    "index_select": index_select,
    "latent_append": latent_append,
    "latent_attention": latent_attention,
}
