"""Append with the arguments TensorRT passes: the caches as inputs, then as the outputs that
alias them."""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.append import tree_kv_append_kernel


@triton.jit
def tree_kv_append_plugin_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    slots,
    requests,
    page_table,
    k_scale,
    v_scale,
    k_cache_in,  # the addresses of k_cache and v_cache
    v_cache_in,
    table_width,
    num_rows,
    q_out,
    k_cache,
    v_cache,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    tree_kv_append_kernel(
        q,
        k,
        v,
        cos_sin,
        positions,
        slots,
        requests,
        page_table,
        k_scale,
        v_scale,
        table_width,
        num_rows,
        q_out,
        k_cache,
        v_cache,
        HEAD_DIM,
        GROUP,
        PAGE_SIZE,
        ROTARY_DIM,
        INTERLEAVED,
        ROWS,
    )
