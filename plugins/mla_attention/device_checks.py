"""Runs the kernels of latent attention and its indexer on a case and compares them with the
references. Under Triton's interpreter in the tests; made to run on a GPU too.
"""

import random

import torch

from trtree.plugins.latent_cache import LatentCache, visible
from trtree.plugins.latent_cache import commit as reference_commit
from trtree.plugins.mla_attention import launch, reference
from trtree.plugins.mla_attention.cases import LatentCase, LatentInputs
from trtree.plugins.mla_attention.plan import plan_latent_attention
from trtree.plugins.mla_attention.tiles import APPEND_ROWS, LatentTile
from trtree.plugins.sparse_indexer import launch as indexer
from trtree.plugins.sparse_indexer import reference as index_reference
from trtree.plugins.sparse_indexer.contract import score_scale
from trtree.plugins.sparse_indexer.plan import plan_scores, row_lengths
from trtree.plugins.sparse_indexer.tiles import IndexTile
from trtree.plugins.tree_attention.cases import assert_rounded, rope_table
from trtree.plugins.tree_attention.contract import AttentionSegment, Rope
from trtree.plugins.tree_attention.device_checks import random_path
from trtree.plugins.tree_attention.launch import KvStores
from trtree.plugins.tree_attention.launch import commit as launch_commit
from trtree.plugins.tree_attention.plan import row_tables
from trtree.plugins.tree_attention.reference import rotate

NUM_LAYERS = 2  # of the commit check


def check_append(
    case: LatentCase,
    inputs: LatentInputs,
    device: torch.device,
    *,
    rows_per_program: int = APPEND_ROWS,
) -> tuple[torch.Tensor, LatentCache]:
    """Queries and latents turned behind value_dim, as GLM-5 does; returns the turned q and the
    cache with the step's rows, both on the CPU."""
    table = rope_table(case.dim - case.value_dim, case.context + case.rows)
    rope = Rope(table.cos_sin, interleaved=True)
    cache = _to(inputs.cache, device)
    q = launch.append(
        inputs.q.to(device),
        inputs.latents.to(device),
        inputs.positions.to(device),
        row_tables(inputs.segments, len(inputs.q)).to(device),
        cache,
        Rope(rope.cos_sin.to(device), True),
        rotary_start=case.value_dim,
        rows_per_program=rows_per_program,
    ).cpu()
    got = _to(cache, torch.device("cpu"))
    for what, x, turned in (
        ("turned q", inputs.q, q),
        ("latent cache", inputs.latents[:, None], _own_rows(got, inputs)[:, None]),
    ):
        wide = x.double()
        swapped = torch.stack([wide[..., 1::2], wide[..., 0::2]], dim=-1).flatten(-2)
        exact = wide.clone()
        part = wide[..., case.value_dim :]
        exact[..., case.value_dim :] = rotate(part, inputs.positions, rope)
        slack = 2**-22 * (wide.abs() + swapped.abs())
        slack[..., : case.value_dim] = 0
        assert_rounded(what, turned, exact, slack)
    untouched = _to(got, torch.device("cpu"))
    before = _to(inputs.cache, torch.device("cpu"))
    for cleared in (untouched, before):
        for segment in inputs.segments:
            slots = segment.prefix_length + torch.arange(segment.num_rows)
            cleared.vectors[cleared.locate(segment.pages, slots)] = 0
    assert torch.equal(untouched.vectors, before.vectors), "latent cache: another slot was written"
    return q, got


def check_attention(
    case: LatentCase,
    inputs: LatentInputs,
    q: torch.Tensor,
    cache: LatentCache,
    selection: torch.Tensor | None,
    tile: LatentTile,
    device: torch.device,
    *,
    target_ctas: int,
    weight_error: float,
    lse_error: float = 1e-5,
) -> None:
    """weight_error: the relative error of a softmax weight (2^-9 if rounded to bfloat16)."""
    plan = plan_latent_attention(
        inputs.segments,
        len(q),
        heads=case.heads,
        tile=tile,
        target_ctas=target_ctas,
        top_k=None if selection is None else selection.shape[1],
    )
    out, lse = launch.latent_attention(
        q.to(device),
        inputs.packed_mask.to(device),
        plan.to(device),
        row_tables(inputs.segments, len(q)).page_table.to(device),
        _to(cache, device),
        None if selection is None else selection.to(device),
        tile,
        value_dim=case.value_dim,
        scale=case.scale,
    )
    exact, exact_lse = reference.latent_attention_with_lse(
        cache,
        q,
        inputs.packed_mask,
        inputs.segments,
        selection,
        value_dim=case.value_dim,
        scale=case.scale,
    )
    largest = max(float(cache.read(segment).abs().max()) for segment in inputs.segments)
    assert_rounded("latent attention", out.cpu(), exact, weight_error * largest)
    assert_rounded("log-sum-exp", lse.cpu(), exact_lse, lse_error)


def check_select(
    case: LatentCase,
    inputs: LatentInputs,
    tile: IndexTile,
    device: torch.device,
    *,
    target_ctas: int,
    block: int,
    score_error: float,
) -> torch.Tensor:
    """Scores within an error relative to the sum of their parts' sizes; the choice to the
    last slot of what the same scores give when sorted. Returns the selection, on the CPU."""
    cache = _to(inputs.index_cache, torch.device("cpu"))
    for segment in inputs.segments:
        slots = segment.prefix_length + torch.arange(segment.num_rows)
        cache.vectors[cache.locate(segment.pages, slots)] = inputs.index_keys[segment.rows]
    width = max(segment.prefix_length + segment.num_rows for segment in inputs.segments)
    num_rows = len(inputs.index_q)
    plan = plan_scores(inputs.segments, num_rows, tile, target_ctas=target_ctas)
    scores = indexer.index_scores(
        inputs.index_q.to(device),
        inputs.index_weights.to(device),
        inputs.packed_mask.to(device),
        plan.to(device),
        row_tables(inputs.segments, num_rows).page_table.to(device),
        _to(cache, device),
        tile,
        width=width,
    )
    lengths = row_lengths(inputs.segments, num_rows)
    selection, nan_counts = indexer.index_top_k(scores, lengths.to(device), case.top_k, block=block)
    assert not nan_counts.any(), f"{int(nan_counts.sum())} scores are NaN"
    for segment in inputs.segments:
        _check_scores(inputs, cache, segment, scores.cpu(), score_error)
    assert_stable_choice(scores.cpu(), lengths, selection.cpu())
    return selection.cpu()


def assert_stable_choice(
    scores: torch.Tensor, lengths: torch.Tensor, selection: torch.Tensor
) -> None:
    """The top_k largest of a row's scores [:length], the lower slot of equal ones."""
    for row, length in enumerate(lengths.tolist()):
        of_row = scores[row, :length]
        order = torch.sort(of_row, descending=True, stable=True).indices
        seen = order[of_row[order] > -torch.inf][: selection.shape[1]].sort().values
        expected = torch.full((selection.shape[1],), -1, dtype=torch.int32)
        expected[: len(seen)] = seen.int()
        assert torch.equal(selection[row], expected), (
            f"selection: row {row} has {selection[row].tolist()} instead of {expected.tolist()}"
        )


def check_commit(case: LatentCase, inputs: LatentInputs, device: torch.device) -> None:
    """Random accepted paths, all layers in one launch: every byte of every cache."""
    rng = random.Random(case.seed)
    paths = [random_path(tree, rng) for tree in inputs.parents]
    generator = torch.Generator().manual_seed(case.seed)
    shape = inputs.cache.vectors.shape
    layers = [
        LatentCache(torch.randn(shape, generator=generator).to(case.dtype))
        for _ in range(NUM_LAYERS)
    ]
    moved = [_to(layer, device) for layer in layers]
    accepted = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.int32)
    for index, path in enumerate(paths):
        accepted[index, : len(path)] = torch.tensor(path)
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    tables = row_tables(inputs.segments, len(inputs.q)).to(device)
    stores = KvStores.of_tensors([layer.vectors for layer in moved])
    launch_commit(stores, tables, accepted.to(device), counts.to(device))
    for index, (layer, got) in enumerate(zip(layers, moved, strict=True)):
        for segment, path in zip(inputs.segments, paths, strict=True):
            reference_commit(layer, segment, torch.tensor(path))
        wrong = layer.vectors != got.vectors.cpu()
        assert not wrong.any(), f"layer {index}: {int(wrong.sum())} elements differ"


def _check_scores(
    inputs: LatentInputs,
    cache: LatentCache,
    segment: AttentionSegment,
    scores: torch.Tensor,
    error: float,
) -> None:
    q, weights = inputs.index_q, inputs.index_weights
    exact = index_reference.index_scores(cache, q, weights, segment)
    sizes = index_reference.index_scores(
        LatentCache(cache.vectors.abs()), q.abs(), weights.abs(), segment
    )
    scale = score_scale(q.shape[1], q.shape[2])
    seen = visible(inputs.packed_mask, segment)
    got = scores[segment.rows, : exact.shape[1]].double()
    exact = torch.where(seen, exact / scale, -torch.inf)
    off = ~(((got - exact).abs() <= error * sizes / scale) | (got == exact))
    assert not off.any(), f"index scores: {int(off.sum())} of {off.numel()} are off"


def _own_rows(cache: LatentCache, inputs: LatentInputs) -> torch.Tensor:
    """[rows, dim]: what the step's rows left in the cache."""
    return torch.cat(
        [
            cache.vectors[
                cache.locate(segment.pages, segment.prefix_length + torch.arange(segment.num_rows))
            ]
            for segment in inputs.segments
        ]
    )


def _to(cache: LatentCache, device: torch.device) -> LatentCache:
    return LatentCache(cache.vectors.to(device, copy=True))
