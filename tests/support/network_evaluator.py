"""Computes a finished INetworkDefinition in torch: what TensorRT is documented to do.

It walks the very object that was compiled. Every layer computes in float64 (integers in
int64) and rounds its result once to its output's type. A layer, type or attribute that
it does not know is an error. What each layer means is in ``evaluated_layers``.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evaluated_layers import LAYERS
from evaluated_layers.layer import (
    TORCH_TYPES,
    Layer,
    Tensors,
    UnknownLayerError,
    exact,
    rounded,
    unpack_fp4,
)


@dataclass
class Collective:
    """A rank waiting for the others: ``operation`` as the layer's metadata gives it."""

    name: str
    operation: str
    value: torch.Tensor


class NetworkEvaluator:
    """One network, ready to be computed many times.

    Args:
        trt: the library's module.
        definition: the INetworkDefinition.
        constants: memory of its constants, by layer name; FP4 as packed uint8.

    ``fixed`` holds what depends on constants alone, computed once.
    """

    def __init__(self, trt: Any, definition: Any, constants: Mapping[str, torch.Tensor]) -> None:
        self.definition = definition  # owns what the layers point at
        self.inputs = {
            definition.get_input(i).name: str(definition.get_input(i).dtype).split(".")[1]
            for i in range(definition.num_inputs)
        }
        self.outputs = [definition.get_output(i).name for i in range(definition.num_outputs)]
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
                results = [rounded(value, layer.dtypes[0])]
            else:
                results = self._compute(layer, operands)
            for name, result in zip(layer.outputs, results, strict=True):
                computed[name] = result
                values[name] = forced.get(name, result)
        return values | computed

    def _compute(self, layer: Layer, operands: Sequence[torch.Tensor | None]) -> Tensors:
        results = LAYERS[layer.kind](layer, operands)
        return [rounded(x, dtype) for x, dtype in zip(results, layer.dtypes, strict=True)]

    def _add(self, layer: Layer, constants: Mapping[str, torch.Tensor]) -> None:
        if layer.kind == "CONSTANT":
            value = unpack_fp4(constants[layer.name], layer.dtypes[0])
            if list(value.shape) != list(layer.layer.shape):
                raise UnknownLayerError(f"{layer.name}: memory {value.shape}, {layer.layer.shape}")
            self.fixed[layer.outputs[0]] = value
        elif layer.kind not in LAYERS and layer.kind != "DIST_COLLECTIVE":
            raise UnknownLayerError(f"{layer.name}: no semantics for layer type {layer.kind}")
        elif all(name in self.fixed for name in layer.inputs):
            operands = [self.fixed[str(name)] for name in layer.inputs]
            results = self._compute(layer, operands)
            self.fixed.update(zip(layer.outputs, results, strict=True))
        else:
            layer.constant = {i for i, name in enumerate(layer.inputs) if name in self.fixed}
            self._layers.append(layer)

    def _checked(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if set(inputs) != set(self.inputs):
            raise ValueError(f"inputs {sorted(set(inputs) ^ set(self.inputs))} missing or unknown")
        for name, value in inputs.items():
            if value.dtype != TORCH_TYPES[self.inputs[name]]:
                raise ValueError(f"{name} is {value.dtype}, the network wants {self.inputs[name]}")
        return inputs


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
    stacked = torch.stack([exact(value) for value in values])
    if operation == "ALL_REDUCE SUM":
        return stacked.sum(0)
    if operation == "ALL_REDUCE MAX":
        return stacked.amax(0)
    if operation == "ALL_REDUCE MIN":
        return stacked.amin(0)
    raise UnknownLayerError(f"no semantics for collective {operation!r}")


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
