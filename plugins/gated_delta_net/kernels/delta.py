"""The rule itself: one program per (request, value head, tile of value columns).

Rows are taken in blocks, in their order, in which ancestors come first. A block's keys meet
the committed state, then the updates of earlier blocks, masked by who sees whom and weighed by
the decay between them; what is left couples the block's own rows:

    u_i = beta_i (v_i - exp(G_i) S0^T k_i - sum over ancestors j of exp(G_i - G_j) (k_i . k_j) u_j)

Within a block (I + A)^-1 doubles: T_2s = T_s - T_s A_2s T_s, where A_2s couples rows of one
block of 2s, not of s. Powers of A, which would do on paper, lose float32's digits where keys
repeat. Columns of v are independent, so a program's updates are read by itself alone.
"""

import triton
import triton.language as tl

from trtree.plugins.branch_device import FIELDS, FIRST_ROW, NUM_ROWS, SLOT
from trtree.plugins.gated_delta_net.kernels.rows import NOTHING, known, sees
from trtree.plugins.tree_attention.kernels.numerics import round_to


@triton.jit
def gated_delta_net_kernel(
    q,  # [rows, key_heads, KEY_DIM]
    k,
    v,  # [rows, heads, VALUE_DIM]
    b,  # [rows, heads]
    decay,  # float32 [rows, heads], summed along paths
    packed_mask,  # int32 [rows, mask_words]: ancestors and oneself
    requests,  # int32 [requests, FIELDS]
    state,  # float32 [slots, heads, KEY_DIM, VALUE_DIM], read only
    q_stride,  # elements from row to row
    k_stride,
    v_stride,
    b_stride,
    mask_words,
    update,  # float32 [rows, heads, VALUE_DIM]: u
    out,  # [rows, heads, VALUE_DIM]
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads per key head
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # bf16 and fp16 are exact in TF32, and so are their products in float32.
    RAW: tl.constexpr = "tf32x3" if k.dtype.element_ty == tl.float32 else "tf32"
    request = requests + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(request + FIRST_ROW)
    num_rows = tl.load(request + NUM_ROWS)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = column < VALUE_DIM
    lane = tl.arange(0, BLOCK)
    keys = k + head // GROUP * KEY_DIM
    queries = q + head // GROUP * KEY_DIM

    dim = tl.arange(0, BLOCK_K)
    slot = tl.load(request + SLOT).to(tl.int64)
    committed = state + ((slot * heads + head) * KEY_DIM + dim)[:, None] * VALUE_DIM + column
    is_known = known(request, inside)[None, :]
    for start in range(0, num_rows, BLOCK):
        row = (first + start + lane).to(tl.int64)
        live = start + lane < num_rows
        kept = live[:, None] & inside[None, :]
        path = tl.load(decay + row * heads + head, mask=live, other=0.0)
        beta = tl.sigmoid(tl.load(b + row * b_stride + head, mask=live, other=0.0).to(tl.float32))
        key_at = keys + (row * k_stride)[:, None] + dim[None, :]
        query_at = queries + (row * q_stride)[:, None] + dim[None, :]

        # Keys and queries come to unit length behind their products, which are taken in parts
        # of their dimensions: registers are scarce, and the raw products exact.
        key_square = tl.zeros([BLOCK], tl.float32)
        query_square = tl.zeros([BLOCK], tl.float32)
        of_key = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        of_query = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        alike = tl.zeros([BLOCK, BLOCK], tl.float32)
        asked = tl.zeros([BLOCK, BLOCK], tl.float32)
        for part in range(0, KEY_DIM, BLOCK_K):
            key = tl.load(key_at + part, mask=live[:, None], other=0.0).to(tl.float32)
            query = tl.load(query_at + part, mask=live[:, None], other=0.0).to(tl.float32)
            before = tl.load(committed + part * VALUE_DIM, mask=is_known, other=0.0)
            key_square += tl.sum(key * key, 1)
            query_square += tl.sum(query * query, 1)
            of_key = tl.dot(key, before, of_key, input_precision="tf32x3")
            of_query = tl.dot(query, before, of_query, input_precision="tf32x3")
            alike = tl.dot(key, tl.trans(key), alike, input_precision=RAW)
            asked = tl.dot(query, tl.trans(key), asked, input_precision=RAW)
        key_unit = tl.rsqrt(key_square + EPS)
        query_unit = tl.rsqrt(query_square + EPS) * SCALE
        shrink = tl.exp(path)
        value_at = v + row[:, None] * v_stride + head * VALUE_DIM + column[None, :]
        value = tl.load(value_at, mask=kept, other=0.0).to(tl.float32)
        missing = value - (shrink * key_unit)[:, None] * of_key
        result = (shrink * query_unit)[:, None] * of_query
        seen = sees(packed_mask, row, live, mask_words, start + lane)
        between = _between(path, path, seen) * key_unit[None, :]
        asked *= between * query_unit[:, None]
        alike *= between * (key_unit * beta)[:, None]

        for earlier in range(0, start, BLOCK):
            other = (first + earlier + lane).to(tl.int64)  # all live: only the last is short
            other_at = keys + (other * k_stride)[:, None] + dim[None, :]
            other_square = tl.zeros([BLOCK], tl.float32)
            alike_other = tl.zeros([BLOCK, BLOCK], tl.float32)
            asked_other = tl.zeros([BLOCK, BLOCK], tl.float32)
            for part in range(0, KEY_DIM, BLOCK_K):
                key = tl.load(key_at + part, mask=live[:, None], other=0.0).to(tl.float32)
                query = tl.load(query_at + part, mask=live[:, None], other=0.0).to(tl.float32)
                other_key = tl.load(other_at + part).to(tl.float32)
                other_square += tl.sum(other_key * other_key, 1)
                turned = tl.trans(other_key)
                alike_other = tl.dot(key, turned, alike_other, input_precision=RAW)
                asked_other = tl.dot(query, turned, asked_other, input_precision=RAW)
            seen = sees(packed_mask, row, live, mask_words, earlier + lane)
            between = _between(path, tl.load(decay + other * heads + head), seen)
            between *= tl.rsqrt(other_square + EPS)[None, :]
            updates = tl.load(
                update + (other[:, None] * heads + head) * VALUE_DIM + column[None, :],
                mask=inside[None, :],
                other=0.0,
            )
            weighed = alike_other * between * key_unit[:, None]
            missing -= tl.dot(weighed, updates, input_precision="tf32x3")
            weighed = asked_other * between * query_unit[:, None]
            result += tl.dot(weighed, updates, input_precision="tf32x3")

        inverse = _inverse(alike, BLOCK)
        own = tl.dot(inverse, beta[:, None] * missing, input_precision="tf32x3")
        result += tl.dot(asked, own, input_precision="tf32x3")
        target = (row[:, None] * heads + head) * VALUE_DIM + column[None, :]
        tl.store(update + target, own, mask=kept)
        tl.store(out + target, round_to(result, out.dtype.element_ty), mask=kept)
        # Later blocks read these updates, other threads' among them.
        tl.debug_barrier()


@triton.jit
def _between(path, other_path, seen):
    """exp(G_i - G_j) where i sees j, else 0."""
    return tl.exp(tl.where(seen, path[:, None] - other_path[None, :], NOTHING))


@triton.jit
def _inverse(coupling, BLOCK: tl.constexpr):
    """(I + A)^-1 of the strictly lower part A of ``coupling`` [BLOCK, BLOCK]."""
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    lower = tl.where(i > j, coupling, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0)
    inverse -= tl.where(i // 2 == j // 2, lower, 0.0)
    inverse = _doubled(inverse, lower, i, j, 2)
    inverse = _doubled(inverse, lower, i, j, 4)
    inverse = _doubled(inverse, lower, i, j, 8)
    if BLOCK > 16:
        inverse = _doubled(inverse, lower, i, j, 16)
    return inverse


@triton.jit
def _doubled(inverse, lower, i, j, SIZE: tl.constexpr):
    """From blocks of SIZE to blocks of twice that."""
    between = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE)
    part = tl.dot(tl.where(between, lower, 0.0), inverse, input_precision="tf32x3")
    return inverse - tl.dot(inverse, part, input_precision="tf32x3")
