"""Linears with NVFP4 weights: the format, the torch reference, the CPU kernels."""

from trtree.plugins.nvfp4_linear.cpu import linear, output_scale, pack, packed_size, quantize_rows

__all__ = ["linear", "output_scale", "pack", "packed_size", "quantize_rows"]
