"""Commit: the state of an accepted path's last row, from its rows' keys and updates.

    S = exp(G_a) S0 + sum over the path's rows j of exp(G_a - G_j) k_j u_j^T

One program per (request, value head, tile of value columns); nobody else reads or writes its
part of the state.
"""

import triton
import triton.language as tl

from trtree.plugins.branch_device import FIELDS, FIRST_ROW, SLOT
from trtree.plugins.gated_delta_net.kernels.rows import NOTHING, known, unit_rows


@triton.jit
def gated_delta_commit_kernel(
    k,  # [rows, key_heads, KEY_DIM]
    update,  # float32 [rows, heads, VALUE_DIM]
    decay,  # float32 [rows, heads]
    requests,  # int32 [requests, FIELDS]
    accepted,  # int32 [requests, max_accepted]: rows of the request, a path
    num_accepted,  # int32 [requests]
    k_stride,
    max_accepted,
    state,  # float32 [slots, heads, KEY_DIM, VALUE_DIM]
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request = requests + tl.program_id(0) * FIELDS
    count = tl.load(num_accepted + tl.program_id(0))
    if count == 0:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(request + FIRST_ROW)
    path = accepted + tl.program_id(0) * max_accepted
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = column < VALUE_DIM
    lane = tl.arange(0, BLOCK)
    dim = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    slot = tl.load(request + SLOT).to(tl.int64)
    place = state + ((slot * heads + head) * KEY_DIM + dim)[:, None] * VALUE_DIM + column[None, :]
    whole = (dim < KEY_DIM)[:, None] & inside[None, :]
    last_row = (first + tl.load(path + count - 1)).to(tl.int64)
    last = tl.load(decay + last_row * heads + head)
    before = known(request, dim < KEY_DIM)[:, None] & inside[None, :]
    total = tl.load(place, mask=before, other=0.0) * tl.exp(last)
    for start in range(0, count, BLOCK):
        live = start + lane < count
        row = (first + tl.load(path + start + lane, mask=live, other=0)).to(tl.int64)
        between = last - tl.load(decay + row * heads + head, mask=live, other=0.0)
        weight = tl.exp(tl.where(live, between, NOTHING))
        key = unit_rows(k + head // GROUP * KEY_DIM, row * k_stride, live, KEY_DIM, EPS)
        updates = tl.load(
            update + (row[:, None] * heads + head) * VALUE_DIM + column[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        weighed = tl.trans(key * weight[:, None])
        total = tl.dot(weighed, updates, total, input_precision="tf32x3")
    tl.store(place, total, mask=whole)
