"""Products, and the quantization around them."""

import torch

from evaluated_layers.layer import (
    Layer,
    LayerFunction,
    Operands,
    Tensors,
    UnknownLayerError,
    rounded,
)


def _matrix_multiply(layer: Layer, x: Operands) -> Tensors:
    if x[0].dtype != x[1].dtype or x[0].ndim != x[1].ndim:
        raise UnknownLayerError(f"{layer.name}: {x[0].dtype} {x[0].shape}, {x[1].dtype}")
    operands = []
    for index, op in enumerate((layer.layer.op0.name, layer.layer.op1.name)):
        if op not in ("NONE", "TRANSPOSE"):
            raise UnknownLayerError(f"{layer.name}: no semantics for {op}")
        wide = layer.double(index, x[index])
        operands.append(wide.transpose(-1, -2) if op == "TRANSPOSE" else wide)
    return [torch.matmul(*operands)]


def _dequantize(layer: Layer, x: Operands) -> Tensors:
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


def _dynamic_quantize(layer: Layer, x: Operands) -> Tensors:
    """NVFP4: block scale = e4m3(amax / 6 / double scale), values = x / (block scale * double
    scale) in E2M1; a zero scale gives zeros."""
    of = layer.layer
    last = x[0].ndim - 1
    if (of.axis, of.block_size, of.to_type.name, of.scale_type.name) != (last, 16, "FP4", "FP8"):
        raise UnknownLayerError(f"{layer.name}: {of.to_type} in blocks of {of.block_size}")
    double_scale = x[1].double()
    blocks = x[0].double().unflatten(-1, (-1, 16))
    scale = rounded(blocks.abs().amax(-1) / 6 / double_scale, "FP8")
    step = (scale.double() * double_scale).unsqueeze(-1)
    values = torch.where(step > 0, blocks / step, 0.0)
    return [values.flatten(-2), scale]


LAYERS: dict[str, LayerFunction] = {
    "DEQUANTIZE": _dequantize,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "MATRIX_MULTIPLY": _matrix_multiply,
}
