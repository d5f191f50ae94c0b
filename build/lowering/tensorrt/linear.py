"""Linears: dense, NVFP4 with NVFP4 or bf16 activations, INT8 block-16 weights."""

from typing import Any

from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.network.network import NetworkError, Op
from trtree.plugins.nvfp4_linear.format import BLOCK


def linear(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [B, W, K] -> [B, W, O]; partial sums of a row-parallel linear are summed over ranks."""
    weight = low.network.weights[op.weights[0]]
    parallel = op.attrs.get("parallel")
    if parallel != "row" and op.inputs[0] in low.sharded:
        raise NetworkError(f"{op.name}: its input is divided among ranks, but it is not by rows")
    if parallel == "row" and low.ranks > 1 and op.inputs[0] not in low.sharded:
        raise NetworkError(f"{op.name}: row-parallel, but its input is whole on every rank")
    if weight.kind == "dense":
        operand = low.emit.wide(x[0]) if low.is_wide(op) else x[0]
        y = low.emit.matmul("product", operand, low.constant(op, "weight"))
    elif weight.activations == "nvfp4":
        y = _w4a4(low, op, x[0])
    else:
        y = _w4a16(low, op, x[0])
    if parallel == "row" and low.ranks > 1:
        y = low.emit.collective("all_reduce", y, "ALL_REDUCE", "SUM", low.ranks)
    elif parallel == "column" and low.ranks > 1:
        low.sharded.update(op.outputs)
    if low.has_bias(op):
        y = low.emit.binary("biased", "SUM", low.emit.wide(y), low.constant(op, "bias"))
    return [low.emit.wide(y) if low.is_wide(op) else low.rounded(y)]


def _w4a4(low: Lowering, op: Op, x: Any) -> Any:
    """Both operands in FP4. TensorRT fuses the dequantizations into the product; in
    float32 they lose nothing, and the product comes out in float32."""
    weight = fp4_weight(low, op, low.constant(op, "global_scale"))
    return low.emit.matmul("product", quantized(low, op, x), weight)


def quantized(low: Lowering, op: Op, x: Any) -> Any:
    """x [..., K] rounded to NVFP4 by the weight's input_scale, in float32."""
    emit, trt = low.emit, low.emit.trt
    if not low.encoding.fp4:
        raise NetworkError(f"{op.name}: NVFP4 activations need an SM with FP4")
    scale = low.constant(op, "input_scale")
    layer = emit.network.add_dynamic_quantize(x, len(x.shape) - 1, BLOCK, trt.fp4, trt.fp8)
    layer.set_input(1, scale)
    codes = emit.layer("quantized", layer)
    return _dequantize(low, "input", codes.get_output(0), codes.get_output(1), scale)


def _w4a16(low: Lowering, op: Op, x: Any) -> Any:
    """The weight is widened to the network's dtype before the product."""
    emit = low.emit
    if low.encoding.fp4:
        wide = fp4_weight(low, op, low.constant(op, "global_scale"))
    else:
        values, scale = low.constant(op, "values"), low.constant(op, "scale")
        added = emit.network.add_dequantize(values, scale, emit.trt.float32)
        wide = emit.layer("weight", added).get_output(0)
    if low.network.weights[op.weights[0]].activations == "bf16":
        x = emit.cast(x, emit.trt.bfloat16)
    return emit.matmul("product", x, emit.cast(wide, x.dtype))


def fp4_weight(low: Lowering, op: Op, global_scale: Any) -> Any:
    """The op's FP4 weight in float32; global_scale: a scalar."""
    return _dequantize(
        low,
        "weight",
        low.constant(op, "codes"),
        low.constant(op, "block_scale"),
        global_scale,
    )


def _dequantize(low: Lowering, name: str, values: Any, block_scale: Any, scale: Any) -> Any:
    """values FP4 [..., K], block_scale FP8 [..., K / 16], scale float32 scalar -> float32."""
    emit = low.emit
    wide = emit.trt.float32
    added = emit.network.add_dequantize(block_scale, scale, wide)
    scales = emit.layer(f"{name}_scale", added).get_output(0)
    return emit.layer(name, emit.network.add_dequantize(values, scales, wide)).get_output(0)
