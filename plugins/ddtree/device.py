"""DDTree on the device: launches of the kernels beside this file, on torch tensors.

Everything a verify step needs (tokens, positions, parents, packed masks) is written in
place, so that a captured CUDA graph of the step reads the new tree at the old addresses.
"""

from dataclasses import dataclass

import torch
import triton

from trtree.plugins.ddtree.device_top_k import top_k_chunks_kernel, top_k_merge_kernel
from trtree.plugins.ddtree.device_tree import build_tree_kernel
from trtree.plugins.ddtree.device_walk import walk_tree_kernel

VOCAB_CHUNK = 2048
MASK_ROWS = 32
# Registers hold the frontier; beyond this it would spill.
MAX_WIDTH = 2048


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of a batch, int32, at most ``width`` rows each (root included).

    num_rows [requests]; tokens, positions (by depth) and parents [requests, width];
    packed_mask [requests, width, ceil(width / 32)], laid out as DDTree's C++ does. Rows
    past num_rows repeat the root and see themselves alone.
    """

    num_rows: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor
    packed_mask: torch.Tensor

    @classmethod
    def empty(cls, requests: int, width: int, device: torch.device) -> "DeviceTrees":
        """Raises ValueError where the frontier would not fit the registers."""
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"device trees have 1 to {MAX_WIDTH} rows, not {width}")

        def tensor(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        row = requests, width
        mask = tensor(*row, (width + 31) // 32)
        return cls(tensor(requests), tensor(*row), tensor(*row), tensor(*row), mask)


@dataclass(frozen=True)
class DeviceWalks:
    """Where the target's choices lead, int32, as the commit kernel takes it.

    accepted [requests, width]: rows from the root down, of which num_accepted [requests] count;
    what lies behind is left as it was. bonus_tokens [requests]: the choice at the last of them,
    the next tree's root. A stop token or a request's end is the caller's to cut.
    """

    accepted: torch.Tensor
    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor

    @classmethod
    def empty(cls, trees: DeviceTrees) -> "DeviceWalks":
        return cls(*map(torch.zeros_like, (trees.tokens, trees.num_rows, trees.num_rows)))


def top_k_log_probs(
    logits: torch.Tensor, top_k: int, *, chunk: int = VOCAB_CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] -> log-probs float32 and ids int32, both [rows, top_k].

    Equal logits rank by lower id. The log-sum-exp runs over the whole vocabulary in float64
    (of float32 exponentials) and is rounded to float32 before the subtraction. NaN or +inf
    among the logits, or -inf alone, makes all of a row's log-probs NaN.

    Raises:
        ValueError: top_k is not between 1 and the vocabulary's size, or above the chunk's.
    """
    rows, vocab = logits.shape
    if not 1 <= top_k <= min(vocab, chunk):
        raise ValueError(f"top_k {top_k} is not between 1 and {min(vocab, chunk)}")
    padded = triton.next_power_of_2(top_k)
    chunks = triton.cdiv(vocab, chunk)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    keys = empty(rows, chunks, padded, dtype=torch.int64)
    maxima = empty(rows, chunks, dtype=torch.float32)
    sums = empty(rows, chunks, dtype=torch.float64)
    top_k_chunks_kernel[(rows, chunks)](
        logits.contiguous(), vocab, keys, maxima, sums, CHUNK=chunk, TOP_K=padded
    )
    log_probs = empty(rows, top_k, dtype=torch.float32)
    token_ids = empty(rows, top_k, dtype=torch.int32)
    top_k_merge_kernel[(rows,)](
        keys,
        maxima,
        sums,
        chunks,
        top_k,
        log_probs,
        token_ids,
        TOP_K=padded,
        CHUNKS=triton.next_power_of_2(chunks),
    )
    return log_probs, token_ids


def build_trees(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    bonus_tokens: torch.Tensor,
    prefix_lengths: torch.Tensor,
    budgets: torch.Tensor,
    trees: DeviceTrees,
) -> None:
    """Grow every request's tree into ``trees``.

    log_probs float32 and token_ids int32 [requests, depth, top_k], decreasing in rank;
    bonus_tokens, prefix_lengths and budgets int32 [requests]. A budget counts nodes besides
    the root and must be below the trees' width (not checked here: it would have to wait for
    the device); one of 0 or less leaves the root.
    """
    requests, depth, top_k = log_probs.shape
    width = trees.tokens.shape[1]
    words = trees.packed_mask.shape[2]
    build_tree_kernel[(requests,)](
        log_probs,
        token_ids,
        bonus_tokens,
        prefix_lengths,
        budgets,
        depth,
        top_k,
        width,
        words,
        trees.num_rows,
        trees.tokens,
        trees.positions,
        trees.parents,
        trees.packed_mask,
        FRONTIER=triton.next_power_of_2(width),
        BLOCK_R=MASK_ROWS,
        WORDS=triton.next_power_of_2(words),
        num_warps=frontier_warps(width),
    )


def walk_trees(trees: DeviceTrees, choices: torch.Tensor, walks: DeviceWalks) -> None:
    """Walk every request's tree into ``walks``, as ``Tree.walk`` does.

    choices int32 [requests, width]: the target's argmax, or one sample of its distribution, at
    each row; those past a tree's rows are not read.

    Raises:
        ValueError: choices are not int32 or not of the trees' shape.
    """
    if choices.dtype != torch.int32 or choices.shape != trees.tokens.shape:
        raise ValueError(
            f"choices {choices.dtype} {list(choices.shape)}, "
            f"the trees want int32 {list(trees.tokens.shape)}"
        )
    requests, width = choices.shape
    walk_tree_kernel[(requests,)](
        trees.num_rows,
        trees.tokens,
        trees.parents,
        choices.contiguous(),
        width,
        width,
        walks.accepted,
        walks.num_accepted,
        walks.bonus_tokens,
        ROWS=triton.next_power_of_2(width),
        num_warps=frontier_warps(width),
    )


def frontier_warps(width: int) -> int:
    """One warp needs no barrier per pop; wide frontiers need the registers of several."""
    warps = (width + 127) // 128
    return min(1 << (warps - 1).bit_length(), 8)
