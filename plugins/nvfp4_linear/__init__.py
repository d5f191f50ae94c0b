"""Linears with NVFP4 weights: the format, the torch reference, the CPU kernels."""

from trtree.plugins.nvfp4_linear.cpu import linear, pack, packed_size, quantize_rows

__all__ = ["linear", "pack", "packed_size", "quantize_rows"]
