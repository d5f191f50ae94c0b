"""Layers that move elements and compute none, and the one that tells a shape."""

import torch

from evaluated_layers.layer import Layer, LayerFunction, Operands, Tensors, UnknownLayerError


def _shape(layer: Layer, x: Operands) -> Tensors:
    return [torch.tensor(x[0].shape)]


def _shuffle(layer: Layer, x: Operands) -> Tensors:
    value = x[0].permute(*list(layer.layer.first_transpose)[: x[0].ndim])
    dims = x[1].tolist() if len(x) > 1 else layer.layer.reshape_dims
    if dims is not None:
        sizes = [value.shape[i] if size == 0 else size for i, size in enumerate(dims)]
        value = value.reshape(sizes)
    return [value.permute(*list(layer.layer.second_transpose)[: value.ndim])]


def _unsqueeze(layer: Layer, x: Operands) -> Tensors:
    """The axes are those of the result."""
    value = x[0]
    for axis in sorted(x[1].tolist()):
        value = value.unsqueeze(axis)
    return [value]


def _concatenation(layer: Layer, x: Operands) -> Tensors:
    return [torch.cat(list(x), dim=layer.layer.axis)]


def _slice(layer: Layer, x: Operands) -> Tensors:
    start = x[1].tolist() if len(x) > 1 and x[1] is not None else list(layer.layer.start)
    size = x[2].tolist() if len(x) > 2 and x[2] is not None else list(layer.layer.shape)
    if any(step != 1 for step in layer.layer.stride) or len(x) > 3:
        raise UnknownLayerError(f"{layer.name}: strides {list(layer.layer.stride)}")
    value = x[0]
    for axis, (begin, length) in enumerate(zip(start, size, strict=True)):
        value = value.narrow(axis, begin, length)
    return [value]


def _gather(layer: Layer, x: Operands) -> Tensors:
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


LAYERS: dict[str, LayerFunction] = {
    "CONCATENATION": _concatenation,
    "GATHER": _gather,
    "SHAPE": _shape,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "UNSQUEEZE": _unsqueeze,
}
