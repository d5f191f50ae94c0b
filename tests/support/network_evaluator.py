"""Computes a finished INetworkDefinition in torch: what TensorRT is documented to do.

It walks the very object that was compiled. Every layer computes in float64 (integers in
int64) and rounds its result once to its output's type. A layer, type or attribute that
it does not know is an error. FP4 tensors are held as float32 values of E2M1.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plugin_layers import plugin_layer

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

Tensors = list[torch.Tensor]


class UnknownLayerError(NotImplementedError):
    """The evaluator has no semantics for a layer or one of its attributes."""


@dataclass
class Collective:
    """A rank waiting for the others: ``operation`` as the layer's metadata gives it."""

    name: str
    operation: str
    value: torch.Tensor


@dataclass
class Layer:
    """layer: with its own class, so that its attributes can be read."""

    name: str
    kind: str
    layer: Any
    inputs: list[str | None]
    outputs: list[str]
    dtypes: list[str]


class NetworkEvaluator:
    """One network, ready to be computed many times.

    Args:
        trt: the library's module.
        definition: the INetworkDefinition.
        constants: memory of its constants, by layer name; FP4 as packed uint8.

    ``fixed`` holds what depends on constants alone, computed once.
    """

    def __init__(self, trt: Any, definition: Any, constants: Mapping[str, torch.Tensor]) -> None:
        self.trt = trt
        self.definition = definition  # owns what the layers point at
        self.inputs = {
            definition.get_input(i).name: str(definition.get_input(i).dtype).split(".")[1]
            for i in range(definition.num_inputs)
        }
        self.outputs = [definition.get_output(i).name for i in range(definition.num_outputs)]
        self._wide: dict[str, torch.Tensor] = {}
        self.fixed: dict[str, torch.Tensor] = {}
        self._layers: list[Layer] = []
        layers = [_read_layer(trt, definition.get_layer(i)) for i in range(definition.num_layers)]
        for layer in _in_order(layers, set(self.inputs)):
            self._add(layer, constants)

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        forced: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """All tensors by name; KV caches among the inputs are written in place.

        ``forced`` tensors are computed and returned like any, but what comes behind them
        reads the values given: every op can be judged on another's inputs.
        """
        _, (values,) = _advance([self.steps(inputs, forced)], [None])
        return values

    def steps(
        self,
        inputs: Mapping[str, torch.Tensor],
        forced: Mapping[str, torch.Tensor] | None = None,
    ) -> Generator[Collective, torch.Tensor, dict[str, torch.Tensor]]:
        """Like ``run``, but pauses at collectives and is sent their results."""
        values = {**self.fixed, **self._checked(inputs)}
        computed: dict[str, torch.Tensor] = {}
        forced = forced or {}
        for layer in self._layers:
            operands = [values[name] if name else None for name in layer.inputs]
            if layer.kind == "DIST_COLLECTIVE":
                value = yield Collective(layer.name, layer.layer.metadata, operands[0])
                results = [_round(value, layer.dtypes[0])]
            else:
                results = self._compute(layer, operands)
            for name, result in zip(layer.outputs, results, strict=True):
                computed[name] = result
                values[name] = forced.get(name, result)
        return values | computed

    def _compute(self, layer: Layer, operands: Sequence[torch.Tensor | None]) -> Tensors:
        results = _LAYERS[layer.kind](self, layer, operands)
        return [_round(x, dtype) for x, dtype in zip(results, layer.dtypes, strict=True)]

    def _add(self, layer: Layer, constants: Mapping[str, torch.Tensor]) -> None:
        if layer.kind == "CONSTANT":
            value = _unpack_fp4(constants[layer.name], layer.dtypes[0])
            if list(value.shape) != list(layer.layer.shape):
                raise UnknownLayerError(f"{layer.name}: memory {value.shape}, {layer.layer.shape}")
            self.fixed[layer.outputs[0]] = value
        elif layer.kind not in _LAYERS and layer.kind != "DIST_COLLECTIVE":
            raise UnknownLayerError(f"{layer.name}: no semantics for layer type {layer.kind}")
        elif all(name in self.fixed for name in layer.inputs):
            operands = [self.fixed[str(name)] for name in layer.inputs]
            results = self._compute(layer, operands)
            self.fixed.update(zip(layer.outputs, results, strict=True))
        else:
            self._layers.append(layer)

    def _checked(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if set(inputs) != set(self.inputs):
            raise ValueError(f"inputs {sorted(set(inputs) ^ set(self.inputs))} missing or unknown")
        for name, value in inputs.items():
            if value.dtype != _TORCH[self.inputs[name]]:
                raise ValueError(f"{name} is {value.dtype}, the network wants {self.inputs[name]}")
        return inputs

    def double(self, name: str | None, value: torch.Tensor) -> torch.Tensor:
        """value in float64; kept for constants, which would be widened at every call."""
        if name not in self.fixed:
            return value.double()
        if name not in self._wide:
            self._wide[str(name)] = value.double()
        return self._wide[str(name)]


def evaluate_together(
    ranks: Sequence[NetworkEvaluator], inputs: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """All ranks of a tensor-parallel network, meeting at their collectives.

    Raises:
        ValueError: the ranks do not meet at the same collective.
    """
    running = [rank.steps(given) for rank, given in zip(ranks, inputs, strict=True)]
    waiting, finished = _advance(running, [None] * len(running))
    while waiting:
        if len({(c.name, c.operation) for c in waiting}) != 1 or len(waiting) != len(ranks):
            raise ValueError(f"ranks wait at different collectives: {[c.name for c in waiting]}")
        result = collective_result(waiting[0].operation, [c.value for c in waiting])
        waiting, finished = _advance(running, [result] * len(running))
    return finished


def _advance(
    running: Sequence[Generator[Collective, Any, dict[str, torch.Tensor]]],
    answers: Sequence[torch.Tensor | None],
) -> tuple[list[Collective], list[dict[str, torch.Tensor]]]:
    waiting, finished = [], []
    for rank, answer in zip(running, answers, strict=True):
        try:
            waiting.append(rank.send(answer))
        except StopIteration as stop:
            finished.append(stop.value)
    return waiting, finished


def collective_result(operation: str, values: Tensors) -> torch.Tensor:
    """What every rank gets of all ranks' values, yet to be rounded."""
    if operation == "ALL_GATHER":
        return torch.cat(values)
    stacked = torch.stack([_exact(value) for value in values])
    if operation == "ALL_REDUCE SUM":
        return stacked.sum(0)
    if operation == "ALL_REDUCE MAX":
        return stacked.amax(0)
    if operation == "ALL_REDUCE MIN":
        return stacked.amin(0)
    raise UnknownLayerError(f"no semantics for collective {operation!r}")


# Types

_TORCH = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
    "FP4": torch.float32,
}


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x.long()


def _round(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Once, to nearest even; FP8 and FP4 saturate."""
    if dtype == "FP8":
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    if dtype == "FP4":
        return _round_fp4(x).float()
    return x.to(_TORCH[dtype])


def _round_fp4(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.double().abs().clamp(max=6.0)
    upper = torch.bucketize(magnitude, E2M1).clamp(max=7)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = E2M1[upper] - magnitude, magnitude - E2M1[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    return torch.where(take_upper, E2M1[upper], E2M1[lower]) * torch.sign(x)


def _unpack_fp4(memory: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype != "FP4":
        return memory
    nibbles = torch.stack([memory & 15, memory >> 4], dim=-1).flatten(-2).long()
    sign = torch.where(nibbles >= 8, -1.0, 1.0)
    return (E2M1[nibbles % 8] * sign).float()


def _read_layer(trt: Any, layer: Any) -> Layer:
    kind = layer.type.name
    layer_class = getattr(trt, _CLASSES.get(kind, ""), None)
    if layer_class is not None:
        layer.__class__ = layer_class
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    return Layer(
        layer.name,
        kind,
        layer,
        [tensor.name if tensor else None for tensor in inputs],
        [tensor.name for tensor in outputs],
        [str(tensor.dtype).split(".")[1] for tensor in outputs],
    )


def _in_order(layers: Sequence[Layer], known: set[str]) -> list[Layer]:
    """Every layer behind those it reads; a network may hold them in any order."""
    ordered: list[Layer] = []
    waiting = list(layers)
    while waiting:
        ready = []
        for layer in waiting:
            if all(name is None or name in known for name in layer.inputs):
                ready.append(layer)
                known.update(layer.outputs)
        if not ready:
            raise UnknownLayerError(f"{waiting[0].name}: reads {waiting[0].inputs}, never written")
        taken = set(map(id, ready))
        waiting = [layer for layer in waiting if id(layer) not in taken]
        ordered += ready
    return ordered


# Layers. Each takes its operands as they are stored and returns results yet to be rounded.

Operands = Sequence[Any]
LayerFunction = Callable[[NetworkEvaluator, Layer, Operands], Tensors]


def _cast(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return [x[0]]


def _shape(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return [torch.tensor(x[0].shape)]


def _elementwise(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    a, b = x
    if a.dtype != b.dtype or a.ndim != b.ndim:
        raise UnknownLayerError(f"{layer.name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}")
    kind = layer.layer.op.name
    if kind in ("AND", "OR"):
        return [a & b if kind == "AND" else a | b]
    a, b = _exact(a), _exact(b)
    table = {
        "SUM": torch.add,
        "SUB": torch.sub,
        "PROD": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "EQUAL": torch.eq,
        "LESS": torch.lt,
        "GREATER": torch.gt,
    }
    if kind == "DIV" and a.is_floating_point():
        return [a / b]
    if kind == "FLOOR_DIV" and not a.is_floating_point():
        return [torch.div(a, b, rounding_mode="floor")]
    if kind not in table:
        raise UnknownLayerError(f"{layer.name}: no semantics for {kind} of {a.dtype}")
    return [table[kind](a, b)]


def _unary(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    table = {
        "SQRT": torch.sqrt,
        "EXP": torch.exp,
        "LOG": torch.log,
        "NEG": torch.neg,
        "ABS": torch.abs,
    }
    if layer.layer.op.name not in table:
        raise UnknownLayerError(f"{layer.name}: no semantics for {layer.layer.op.name}")
    return [table[layer.layer.op.name](x[0].double())]


def _activation(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    if layer.layer.type.name != "SIGMOID":
        raise UnknownLayerError(f"{layer.name}: no semantics for {layer.layer.type.name}")
    return [torch.sigmoid(x[0].double())]


def _reduce(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    axes = [axis for axis in range(x[0].ndim) if layer.layer.axes >> axis & 1]
    value, keep = _exact(x[0]), layer.layer.keep_dims
    table = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
    if layer.layer.op.name not in table:
        raise UnknownLayerError(f"{layer.name}: no semantics for {layer.layer.op.name}")
    return [table[layer.layer.op.name](value, dim=axes, keepdim=keep)]


def _shuffle(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    value = x[0].permute(*list(layer.layer.first_transpose)[: x[0].ndim])
    dims = x[1].tolist() if len(x) > 1 else layer.layer.reshape_dims
    if dims is not None:
        sizes = [value.shape[i] if size == 0 else size for i, size in enumerate(dims)]
        value = value.reshape(sizes)
    return [value.permute(*list(layer.layer.second_transpose)[: value.ndim])]


def _unsqueeze(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """The axes are those of the result."""
    value = x[0]
    for axis in sorted(x[1].tolist()):
        value = value.unsqueeze(axis)
    return [value]


def _concatenation(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return [torch.cat(list(x), dim=layer.layer.axis)]


def _slice(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    start = x[1].tolist() if len(x) > 1 and x[1] is not None else list(layer.layer.start)
    size = x[2].tolist() if len(x) > 2 and x[2] is not None else list(layer.layer.shape)
    if any(step != 1 for step in layer.layer.stride) or len(x) > 3:
        raise UnknownLayerError(f"{layer.name}: strides {list(layer.layer.stride)}")
    value = x[0]
    for axis, (begin, length) in enumerate(zip(start, size, strict=True)):
        value = value.narrow(axis, begin, length)
    return [value]


def _select(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return [torch.where(x[0], x[1], x[2])]


def _gather(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    value, indices = x[0], x[1].long()
    axis, batch = layer.layer.axis, layer.layer.num_elementwise_dims
    if layer.layer.mode.name == "ELEMENT":
        return [torch.gather(value, axis, indices)]
    if layer.layer.mode.name != "DEFAULT" or batch > 1:
        raise UnknownLayerError(f"{layer.name}: {layer.layer.mode}, {batch} batch dimensions")
    if int(indices.min()) < 0 or int(indices.max()) >= value.shape[axis]:
        raise IndexError(f"{layer.name}: index outside {value.shape[axis]}")
    if batch:
        rows = [_take(v, i, axis - 1) for v, i in zip(value, indices, strict=True)]
        return [torch.stack(rows)]
    return [_take(value, indices, axis)]


def _take(value: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    taken = value.index_select(axis, indices.flatten())
    return taken.unflatten(axis, indices.shape) if indices.ndim != 1 else taken


def _matrix_multiply(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    if x[0].dtype != x[1].dtype or x[0].ndim != x[1].ndim:
        raise UnknownLayerError(f"{layer.name}: {x[0].dtype} {x[0].shape}, {x[1].dtype}")
    operands = []
    for value, name, op in zip(
        x, layer.inputs, (layer.layer.op0.name, layer.layer.op1.name), strict=True
    ):
        if op not in ("NONE", "TRANSPOSE"):
            raise UnknownLayerError(f"{layer.name}: no semantics for {op}")
        wide = net.double(name, value)
        operands.append(wide.transpose(-1, -2) if op == "TRANSPOSE" else wide)
    return [torch.matmul(*operands)]


def _dequantize(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """values * scale; a scale is one number, or one for each block along the last axis."""
    values, scale = x[0].double(), x[1].double()
    if len(x) > 2:
        raise UnknownLayerError(f"{layer.name}: a zero point")
    if scale.ndim == 0:
        return [values * scale]
    if scale.ndim != values.ndim or scale.shape[:-1] != values.shape[:-1]:
        raise UnknownLayerError(f"{layer.name}: scale {list(scale.shape)} of {list(values.shape)}")
    block = values.shape[-1] // scale.shape[-1]
    if block != 16 or block * scale.shape[-1] != values.shape[-1]:
        raise UnknownLayerError(f"{layer.name}: blocks of {block}")
    return [values * scale.repeat_interleave(block, dim=-1)]


def _dynamic_quantize(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """NVFP4: block scale = e4m3(amax / 6 / double scale), values = x / (block scale * double
    scale) in E2M1; a zero scale gives zeros."""
    of = layer.layer
    last = x[0].ndim - 1
    if (of.axis, of.block_size, of.to_type.name, of.scale_type.name) != (last, 16, "FP4", "FP8"):
        raise UnknownLayerError(f"{layer.name}: {of.to_type} in blocks of {of.block_size}")
    double_scale = x[1].double()
    blocks = x[0].double().unflatten(-1, (-1, 16))
    scale = _round(blocks.abs().amax(-1) / 6 / double_scale, "FP8")
    step = (scale.double() * double_scale).unsqueeze(-1)
    values = torch.where(step > 0, blocks / step, 0.0)
    return [values.flatten(-2), scale]


def _rotary(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """x [B, heads, W, D], tables [positions, D / 2], position ids [B, W]."""
    value, cos, sin, ids = x
    turning = layer.layer.rotary_embedding_dim or value.shape[-1]
    cos, sin = (table.double()[ids.long()].unsqueeze(1) for table in (cos, sin))
    wide = value.double()
    turned, rest = wide[..., :turning], wide[..., turning:]
    if layer.layer.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = turned[..., : turning // 2], turned[..., turning // 2 :]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return [torch.cat([turned, rest], dim=-1)]


def _kv_cache_update(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """Writes update [B, heads, W, D] into cache [B, heads, S, D] from each write index on, in
    place. Outside the cache TensorRT drops rows silently; here that is an error."""
    cache, update, indices = x
    if layer.layer.cache_mode.name != "LINEAR":
        raise UnknownLayerError(f"{layer.name}: cache mode {layer.layer.cache_mode}")
    for entry, rows, start in zip(cache, update, indices.tolist(), strict=True):
        if start < 0 or start + rows.shape[1] > entry.shape[1]:
            raise IndexError(
                f"{layer.name}: rows {start} to {start + rows.shape[1]} of {entry.shape[1]}"
            )
        entry[:, start : start + rows.shape[1]] = rows
    return [cache]


def _attention_input(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """softmax(q k^T + mask) v over groups of query heads; no scaling."""
    layer.layer.__class__ = net.trt.IAttentionBoundaryLayer
    of = layer.layer.attention
    q, k, v, mask = x
    if of.causal or of.norm_op.name != "SOFTMAX" or mask.dtype != torch.bool:
        raise UnknownLayerError(f"{layer.name}: causal {of.causal}, {of.norm_op}, {mask.dtype}")
    # Only keys that some row sees; the others have weight zero (and must be finite).
    for name, cache in (("key", k), ("value", v)):
        if not torch.isfinite(cache).all():
            raise FloatingPointError(f"{layer.name}: a {name} in the cache is not finite")
    used = int(mask.any(dim=(0, 1, 2)).nonzero().max()) + 1
    groups = q.shape[1] // k.shape[1]
    wide = q.double().unflatten(1, (k.shape[1], groups))
    scores = torch.einsum("bhgwd,bhsd->bhgws", wide, k[:, :, :used].double())
    scores = scores.masked_fill(~mask[:, :, None, :, :used], -torch.inf)
    attended = torch.einsum("bhgws,bhsd->bhgwd", scores.softmax(-1), v[:, :, :used].double())
    return [attended.flatten(1, 2)]


def _top_k(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    """Equal values by index; TensorRT promises no order."""
    of = layer.layer
    if of.op.name != "MAX" or of.axes != 1 << (x[0].ndim - 1):
        raise UnknownLayerError(f"{layer.name}: {of.op} over axes {of.axes}")
    order = torch.sort(x[0].double(), dim=-1, descending=True, stable=True)
    return [order.values[..., : of.k], order.indices[..., : of.k]]


def _plugin(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return plugin_layer(layer.layer.plugin, layer.layer.attribute, x)


def _pass(net: NetworkEvaluator, layer: Layer, x: Operands) -> Tensors:
    return [x[0]]


_CLASSES = {
    "ACTIVATION": "IActivationLayer",
    "ATTENTION_INPUT": "IAttentionBoundaryLayer",
    "ATTENTION_OUTPUT": "IAttentionBoundaryLayer",
    "CAST": "ICastLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "DIST_COLLECTIVE": "IDistCollectiveLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "GATHER": "IGatherLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "REDUCE": "IReduceLayer",
    "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "TOPK": "ITopKLayer",
    "UNARY": "IUnaryLayer",
    "UNSQUEEZE": "IUnsqueezeLayer",
}

_LAYERS: dict[str, LayerFunction] = {
    "ACTIVATION": _activation,
    "ATTENTION_INPUT": _attention_input,
    "ATTENTION_OUTPUT": _pass,
    "CAST": _cast,
    "CONCATENATION": _concatenation,
    "DEQUANTIZE": _dequantize,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "PLUGIN_V3": _plugin,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotary,
    "SELECT": _select,
    "SHAPE": _shape,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "TOPK": _top_k,
    "UNARY": _unary,
    "UNSQUEEZE": _unsqueeze,
}
