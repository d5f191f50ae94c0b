"""Log-probs of the best tokens on the GPU, ties by lower id: the drafter's last step.

Two launches over float logits [rows, vocab]. The first takes each (row, chunk of the
vocabulary) to its sorted top-k and its part of the log-sum-exp; the second merges a row's
chunks. A logit and its token id are one 64-bit key, ordered by the logit and then by the
lower id: keys never tie, so any sorting network is a stable one.
"""

import triton
import triton.language as tl


@triton.jit
def top_k_chunks_kernel(
    logits,  # float32, bfloat16 or float16 [rows, vocab]
    vocab,
    keys,  # int64 [rows, chunks, TOP_K], decreasing
    maxima,  # float32 [rows, chunks]
    sums,  # float64 [rows, chunks]: of exp(logit - maximum)
    CHUNK: tl.constexpr,
    TOP_K: tl.constexpr,  # a power of two
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    logit = logit.to(tl.float32)
    # A maximum passes over NaN, and +inf leaves no probabilities: both poison the sum.
    invalid = (logit != logit) | (logit == float("inf"))
    valid = tl.where(invalid, float("-inf"), logit)
    largest = tl.max(valid, 0)
    weight = tl.exp(valid - tl.where(largest == float("-inf"), 0.0, largest))
    weight = tl.where(invalid, float("nan"), weight)
    tl.store(maxima + part, largest)
    tl.store(sums + part, tl.sum(weight.to(tl.float64), 0))
    tl.store(keys + part * TOP_K + tl.arange(0, TOP_K), tl.topk(_key(logit, token), TOP_K))


@triton.jit
def top_k_merge_kernel(
    keys,  # int64 [rows, chunks, TOP_K]
    maxima,  # float32 [rows, chunks]
    sums,  # float64 [rows, chunks]
    chunks,
    top_k,
    log_probs,  # float32 [rows, top_k]: logit - log-sum-exp, one float32 subtraction
    token_ids,  # int32 [rows, top_k]
    TOP_K: tl.constexpr,  # a power of two, at least top_k
    CHUNKS: tl.constexpr,  # a power of two, at least chunks
):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, TOP_K)
    best = tl.load(keys + row * chunks * TOP_K + rank)
    for chunk in range(1, chunks):
        other = tl.load(keys + (row * chunks + chunk) * TOP_K + rank)
        # Both decrease, so this is a bitonic sequence that holds the TOP_K largest of both.
        best = tl.bitonic_merge(tl.maximum(best, tl.flip(other)), descending=True)

    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    part_max = tl.load(maxima + row * chunks + index, mask=inside, other=float("-inf"))
    part_sum = tl.load(sums + row * chunks + index, mask=inside, other=0.0)
    largest = tl.max(part_max, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(part_sum * tl.exp((part_max - shift).to(tl.float64)), 0)
    # A row of forbidden tokens alone has no distribution either.
    total = tl.where(total > 0, total, float("nan"))
    lse = (largest.to(tl.float64) + tl.log(total)).to(tl.float32)

    live = rank < top_k
    tl.store(log_probs + row * top_k + rank, _logit(best) - lse, mask=live)
    token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    tl.store(token_ids + row * top_k + rank, token.to(tl.int32), mask=live)


@triton.jit
def _key(logit, token):
    # Equal zeros must tie: -0.0 has other bits. Negative floats order backwards as integers.
    logit = tl.where(logit == 0.0, 0.0, logit)
    bits = logit.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _logit(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
