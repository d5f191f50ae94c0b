"""The kernels as they are compiled ahead of time: types, constants and tiles per SM."""

import math
from dataclasses import dataclass

import torch
import triton.language as tl

from trtree.plugins.ddtree import device as ddtree
from trtree.plugins.ddtree.device_top_k import top_k_chunks_kernel, top_k_merge_kernel
from trtree.plugins.ddtree.device_tree import build_tree_kernel
from trtree.plugins.ddtree.device_walk import walk_tree_kernel
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.kernels.append import tree_kv_append_kernel
from trtree.plugins.tree_attention.kernels.attention import tree_attention_kernel
from trtree.plugins.tree_attention.kernels.combine import tree_attention_combine_kernel
from trtree.plugins.tree_attention.kernels.commit import tree_kv_commit_kernel
from trtree.plugins.tree_attention.tiles import (
    APPEND_ROWS,
    COMMIT_ROWS,
    attention_tile,
    combine_splits,
    commit_columns,
    require_fp8,
)

TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float32: "fp32",
}
DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class LayerConfig:
    """What a layer's kernels are specialized to. ``rows``: of one request, the verify width."""

    head_dim: int
    kv_heads: int
    group: int
    page_size: int
    rows: int
    scale: float
    rotary_dim: int
    interleaved: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def suffix(self) -> str:
        return "_fp8" if self.kv_dtype == torch.float8_e4m3fn else ""


def append_spec(layer: LayerConfig, sm: int) -> KernelSpec:
    x, cache = _pointers(layer, sm)
    return KernelSpec(
        f"tree_kv_append{layer.suffix}",
        tree_kv_append_kernel,
        {
            "q": x,
            "k": x,
            "v": x,
            "cos_sin": "*fp32",
            "positions": "*i32",
            "slots": "*i32",
            "requests": "*i32",
            "page_table": "*i32",
            "k_scale": "*fp32",
            "v_scale": "*fp32",
            "table_width": "i32",
            "num_rows": "i32",
            "q_out": x,
            "k_cache": cache,
            "v_cache": cache,
        },
        {
            "HEAD_DIM": layer.head_dim,
            "GROUP": layer.group,
            "PAGE_SIZE": layer.page_size,
            "ROTARY_DIM": layer.rotary_dim,
            "INTERLEAVED": layer.interleaved,
            "ROWS": APPEND_ROWS,
        },
        head_dim=layer.head_dim,
    )


def attention_spec(layer: LayerConfig, sm: int) -> KernelSpec:
    x, cache = _pointers(layer, sm)
    tile = attention_tile(sm, layer.head_dim, layer.rows, layer.group)
    return KernelSpec(
        f"tree_attention{layer.suffix}{'_window' if layer.window else ''}",
        tree_attention_kernel,
        {
            "q": x,
            "k_cache": cache,
            "v_cache": cache,
            "page_table": "*i32",
            "packed_mask": "*i32",
            "positions": "*i32",
            "work": "*i32",
            "k_scale": "*fp32",
            "v_scale": "*fp32",
            "table_width": "i32",
            "mask_words": "i32",
            "partial_out": "*fp32",
            "partial_lse": "*fp32",
        },
        {
            "HEAD_DIM": layer.head_dim,
            "GROUP": layer.group,
            "PAGE_SIZE": layer.page_size,
            "SCALE_LOG2": layer.scale * math.log2(math.e),
            "WINDOW": layer.window or 0,
            "DOT_DTYPE": DOT_TYPES[layer.dtype],
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "TAIL_STAGES": tile.tail_stages,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        head_dim=layer.head_dim,
    )


def combine_spec(layer: LayerConfig, sm: int) -> KernelSpec:
    x, _ = _pointers(layer, sm)
    return KernelSpec(
        "tree_attention_combine",
        tree_attention_combine_kernel,
        {
            "partial_out": "*fp32",
            "partial_lse": "*fp32",
            "row_splits": "*i32",
            "out": x,
            "lse": "*fp32",
        },
        {
            "HEAD_DIM": layer.head_dim,
            "GROUP": layer.group,
            "BLOCK_M": attention_tile(sm, layer.head_dim, layer.rows, layer.group).block_m,
            "BLOCK_S": combine_splits(layer.group, layer.head_dim),
        },
        head_dim=layer.head_dim,
    )


def commit_spec(layer: LayerConfig) -> KernelSpec:
    row_words = layer.kv_heads * layer.head_dim * layer.kv_dtype.itemsize // 4
    name = f"tree_kv_commit{layer.suffix}"
    return commit_spec_of_words(name, row_words, layer.page_size, layer.head_dim)


def commit_spec_of_words(name: str, row_words: int, page_size: int, head_dim: int) -> KernelSpec:
    """``row_words``: 32-bit words of a slot; ``head_dim`` is for the report."""
    return KernelSpec(
        name,
        tree_kv_commit_kernel,
        {
            "caches": "*i64",
            "page_table": "*i32",
            "prefix_lengths": "*i32",
            "accepted": "*i32",
            "num_accepted": "*i32",
            "table_width": "i32",
            "max_accepted": "i32",
        },
        {
            "PAGE_SIZE": page_size,
            "ROW_WORDS": row_words,
            "BLOCK_R": COMMIT_ROWS,
            "BLOCK_C": commit_columns(row_words),
        },
        head_dim=head_dim,
    )


def top_k_chunks_spec(top_k: int) -> KernelSpec:
    return KernelSpec(
        "ddtree_top_k_chunks",
        top_k_chunks_kernel,
        {
            "logits": "*fp32",
            "vocab": "i32",
            "keys": "*i64",
            "maxima": "*fp32",
            "sums": "*fp64",
        },
        {"CHUNK": ddtree.VOCAB_CHUNK, "TOP_K": _power_of_two(top_k)},
    )


def top_k_merge_spec(top_k: int, vocab: int) -> KernelSpec:
    return KernelSpec(
        "ddtree_top_k_merge",
        top_k_merge_kernel,
        {
            "keys": "*i64",
            "maxima": "*fp32",
            "sums": "*fp64",
            "chunks": "i32",
            "top_k": "i32",
            "log_probs": "*fp32",
            "token_ids": "*i32",
        },
        {
            "TOP_K": _power_of_two(top_k),
            "CHUNKS": _power_of_two(-(-vocab // ddtree.VOCAB_CHUNK)),
        },
    )


def build_tree_spec(width: int) -> KernelSpec:
    pointers = (
        "token_ids bonus_tokens prefix_lengths budgets num_rows row_tokens positions parents "
        "packed_mask"
    )
    return KernelSpec(
        f"ddtree_build_tree_{width}",
        build_tree_kernel,
        {
            "log_probs": "*fp32",
            **dict.fromkeys(pointers.split(), "*i32"),
            **dict.fromkeys(("depth", "top_k", "width", "mask_words"), "i32"),
        },
        {
            "FRONTIER": _power_of_two(width),
            "BLOCK_R": ddtree.MASK_ROWS,
            "WORDS": _power_of_two((width + 31) // 32),
        },
        num_warps=ddtree.frontier_warps(width),
    )


def walk_tree_spec(width: int) -> KernelSpec:
    inputs, outputs = "num_rows row_tokens parents choices", "accepted num_accepted bonus_tokens"
    return KernelSpec(
        f"ddtree_walk_tree_{width}",
        walk_tree_kernel,
        {
            **dict.fromkeys(inputs.split(), "*i32"),
            **dict.fromkeys(("width", "max_accepted"), "i32"),
            **dict.fromkeys(outputs.split(), "*i32"),
        },
        {"ROWS": _power_of_two(width)},
        num_warps=ddtree.frontier_warps(width),
    )


def _pointers(layer: LayerConfig, sm: int) -> tuple[str, str]:
    if layer.kv_dtype == torch.float8_e4m3fn:
        require_fp8(sm)
    return f"*{TRITON_TYPES[layer.dtype]}", f"*{TRITON_TYPES[layer.kv_dtype]}"


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
