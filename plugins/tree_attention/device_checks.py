"""Runs the GPU kernels on a case of the shared table and compares them with the reference.

The same checks run under Triton's interpreter (tests) and on a GPU (runtime/bench/gpu.py).
"""

import random

import torch

from trtree.plugins.tree_attention import launch, reference
from trtree.plugins.tree_attention.cases import AttentionCase, AttentionInputs, assert_rounded
from trtree.plugins.tree_attention.contract import PagedKv, Rope
from trtree.plugins.tree_attention.plan import plan_attention, row_tables
from trtree.plugins.tree_attention.tiles import APPEND_ROWS, Tile

NUM_LAYERS = 2  # of the commit check


def check_append(
    inputs: AttentionInputs, device: torch.device, *, rows_per_program: int = APPEND_ROWS
) -> tuple[torch.Tensor, PagedKv]:
    """Returns the turned q and the cache with the step's rows, both on the CPU.

    v must arrive to the bit; RoPE runs in float32, so that q and k may differ from the
    float64 reference by what float32 leaves open before the rounding.
    """
    tables = row_tables(inputs.segments, len(inputs.q))
    cache = cache_to(inputs.cache, device, copy=True)
    q = launch.append(
        inputs.q.to(device),
        inputs.k.to(device),
        inputs.v.to(device),
        inputs.positions.to(device),
        tables.to(device),
        cache,
        Rope(inputs.rope.cos_sin.to(device), inputs.rope.interleaved),
        rows_per_program=rows_per_program,
    )
    got = cache_to(cache, torch.device("cpu"))
    exact, slack = _rotated(inputs.q, inputs)
    assert_rounded("turned q", q.cpu(), exact, slack)

    exact, slack = _rotated(inputs.k, inputs)
    low, high = (cache_to(inputs.cache, torch.device("cpu"), copy=True) for _ in range(2))
    for bound, k in ((low, exact - slack), (high, exact + slack)):
        turned = k.to(inputs.k.dtype)
        reference.kv_append(bound, turned, inputs.v, tables.slots, inputs.segments)
    outside = ~((got.k.double() >= low.k.double()) & (got.k.double() <= high.k.double()))
    assert not outside.any(), f"k cache: {int(outside.sum())} elements differ"
    wrong = got.v.view(torch.uint8) != low.v.view(torch.uint8)
    assert not wrong.any(), f"v cache: {int(wrong.sum())} bytes differ"
    return q.cpu(), got


def check_attention(
    case: AttentionCase,
    inputs: AttentionInputs,
    q: torch.Tensor,
    cache: PagedKv,
    tile: Tile,
    device: torch.device,
    *,
    target_ctas: int,
    weight_error: float,
    lse_error: float = 1e-5,
) -> None:
    """weight_error: the relative error of a softmax weight (2^-9 if rounded to bfloat16)."""
    plan = plan_attention(
        inputs.segments,
        len(q),
        kv_heads=case.kv_heads,
        group=case.group,
        block_m=tile.block_m,
        target_ctas=target_ctas,
        window=case.window,
    )
    tables = row_tables(inputs.segments, len(q)).to(device)
    out, lse = launch.tree_attention(
        q.to(device),
        inputs.packed_mask.to(device),
        inputs.positions.to(device),
        plan.to(device),
        tables.page_table,
        cache_to(cache, device),
        tile,
        scale=case.scale,
        window=case.window,
    )
    exact, exact_lse = reference.tree_attention_with_lse(
        cache,
        q,
        inputs.packed_mask,
        inputs.positions,
        inputs.segments,
        scale=case.scale,
        window=case.window,
    )
    assert_rounded("attention", out.cpu(), exact, weight_error * float(inputs.v.abs().max()))
    assert_rounded("log-sum-exp", lse.cpu(), exact_lse, lse_error)


def check_commit(case: AttentionCase, inputs: AttentionInputs, device: torch.device) -> None:
    """Random accepted paths, all layers in one launch: every byte of every cache."""
    rng = random.Random(case.seed)
    paths = [random_path(tree, rng) for tree in inputs.parents]
    generator = torch.Generator().manual_seed(case.seed)
    layers = []
    for _ in range(NUM_LAYERS):
        layer = cache_to(inputs.cache, torch.device("cpu"), copy=True)
        for store in (layer.k, layer.v):
            shape = store.view(torch.uint8).shape
            codes = torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator)
            store.view(torch.uint8).copy_(codes)
        layers.append(layer)
    moved = [cache_to(layer, device, copy=True) for layer in layers]
    accepted = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.int32)
    for index, path in enumerate(paths):
        accepted[index, : len(path)] = torch.tensor(path)
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    tables = row_tables(inputs.segments, len(inputs.q)).to(device)
    launch.commit(launch.KvStores.of(moved), tables, accepted.to(device), counts.to(device))
    for index, (layer, got) in enumerate(zip(layers, moved, strict=True)):
        for segment, path in zip(inputs.segments, paths, strict=True):
            reference.commit(layer, segment, torch.tensor(path))
        for name, store, new in (("k", layer.k, got.k), ("v", layer.v, got.v)):
            wrong = store.view(torch.uint8) != new.cpu().view(torch.uint8)
            assert not wrong.any(), f"layer {index} {name}: {int(wrong.sum())} bytes differ"


def random_path(parents: list[int], rng: random.Random) -> list[int]:
    """From the root to one of the last rows, as a walk would accept it."""
    path = []
    row = len(parents) - 1 - rng.randrange(min(len(parents), 3))
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def cache_to(cache: PagedKv, device: torch.device, *, copy: bool = False) -> PagedKv:
    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, copy=copy)

    k, v = cache.k.to(device, copy=copy), cache.v.to(device, copy=copy)
    return PagedKv(k, v, move(cache.k_scale), move(cache.v_scale))


def _rotated(x: torch.Tensor, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """x turned in float64, and how far float32 arithmetic may be from that."""
    wide = x.double()
    half = wide.roll(inputs.rope.rotary_dim // 2, dims=-1)
    if inputs.rope.interleaved:
        half = torch.stack([wide[..., 1::2], wide[..., 0::2]], dim=-1).flatten(-2)
    return reference.rotate(wide, inputs.positions, inputs.rope), 2**-22 * (wide.abs() + half.abs())
