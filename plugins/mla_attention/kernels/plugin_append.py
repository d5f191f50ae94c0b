"""Append with the arguments TensorRT passes: the cache as an input, then as the output that
aliases it."""

import triton
import triton.language as tl

from trtree.plugins.mla_attention.kernels.append import latent_append_kernel


@triton.jit
def latent_append_plugin_kernel(
    q,
    x,
    cos_sin,
    positions,
    slots,
    requests,
    page_table,
    cache_in,  # the address of cache
    table_width,
    num_rows,
    q_out,
    cache,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_START: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    latent_append_kernel(
        q,
        x,
        cos_sin,
        positions,
        slots,
        requests,
        page_table,
        table_width,
        num_rows,
        q_out,
        cache,
        DIM,
        PAGE_SIZE,
        ROTARY_START,
        ROTARY_DIM,
        INTERLEAVED,
        ROWS,
    )
