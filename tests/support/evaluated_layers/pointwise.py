"""Layers that compute elements or reduce axes."""

import torch

from evaluated_layers.layer import Layer, LayerFunction, Operands, Tensors, UnknownLayerError, exact


def _cast(layer: Layer, x: Operands) -> Tensors:
    return [x[0]]


def _elementwise(layer: Layer, x: Operands) -> Tensors:
    a, b = x
    if a.dtype != b.dtype or a.ndim != b.ndim:
        raise UnknownLayerError(f"{layer.name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}")
    kind = layer.layer.op.name
    if kind in ("AND", "OR"):
        return [a & b if kind == "AND" else a | b]
    a, b = exact(a), exact(b)
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


def _unary(layer: Layer, x: Operands) -> Tensors:
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


def _activation(layer: Layer, x: Operands) -> Tensors:
    if layer.layer.type.name != "SIGMOID":
        raise UnknownLayerError(f"{layer.name}: no semantics for {layer.layer.type.name}")
    return [torch.sigmoid(x[0].double())]


def _reduce(layer: Layer, x: Operands) -> Tensors:
    axes = [axis for axis in range(x[0].ndim) if layer.layer.axes >> axis & 1]
    value, keep = exact(x[0]), layer.layer.keep_dims
    table = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
    if layer.layer.op.name not in table:
        raise UnknownLayerError(f"{layer.name}: no semantics for {layer.layer.op.name}")
    return [table[layer.layer.op.name](value, dim=axes, keepdim=keep)]


def _select(layer: Layer, x: Operands) -> Tensors:
    return [torch.where(x[0], x[1], x[2])]


LAYERS: dict[str, LayerFunction] = {
    "ACTIVATION": _activation,
    "CAST": _cast,
    "ELEMENTWISE": _elementwise,
    "REDUCE": _reduce,
    "SELECT": _select,
    "UNARY": _unary,
}
