"""Linears with bf16, fp16 or float32 weights: the torch reference, the CPU kernels."""

from trtree.plugins.dense_linear.cpu import linear, pack, packed_size, unpack_row

__all__ = ["linear", "pack", "packed_size", "unpack_row"]
