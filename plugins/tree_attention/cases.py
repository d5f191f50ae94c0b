"""The shared test table: what every implementation of tree attention is held to.

A case is a handful of numbers; ``make_inputs`` turns it into tensors, the same ones on
every machine. ``pairwise_cases`` is the sample for slow implementations (each pair of
factor values occurs together at least once), ``all_cases`` the whole table.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trtree.plugins.tree_attention.contract import E4M3_MAX, AttentionSegment, PagedKv, Rope

FACTORS: dict[str, tuple[Any, ...]] = {
    "rows": (1, 2, 17, 33, 65, 129),
    "context": (0, 1, 127, 128, 1000),
    "page_size": (1, 16, 64, 128),
    "group": (1, 4, 8),
    "requests": (1, 2, 3, 5),
    "head_dim": (64, 128, 192, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "fp8_kv": (False, True),
    "window": (None, 5, 100),
    "kv_heads": (1, 2),
}


@dataclass(frozen=True)
class AttentionCase:
    """Request i of a batch has rows // (i + 1) rows (at least 1) behind context // (i + 1)
    committed tokens, so that every batch is ragged."""

    rows: int
    context: int
    page_size: int
    group: int
    requests: int
    head_dim: int
    dtype: torch.dtype
    fp8_kv: bool
    window: int | None
    kv_heads: int

    @property
    def name(self) -> str:
        return (
            f"rows{self.rows}-ctx{self.context}-page{self.page_size}-gqa{self.group}"
            f"-b{self.requests}-d{self.head_dim}-{str(self.dtype).removeprefix('torch.')}"
            f"{'-fp8' if self.fp8_kv else ''}{f'-w{self.window}' if self.window else ''}"
            f"-h{self.kv_heads}"
        )

    @property
    def seed(self) -> int:
        values = (self.rows, self.context, self.page_size, self.group, self.requests)
        return sum(value * 31**power for power, value in enumerate((*values, self.head_dim)))

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def segment_sizes(self) -> list[tuple[int, int]]:
        return segment_sizes(self.rows, self.context, self.requests)


@dataclass(frozen=True)
class AttentionInputs:
    """A case as tensors, all on the CPU. ``cache`` holds the prefix; the step's k and v
    [rows, kv_heads, head_dim] are still to be appended. Pages that belong to nobody hold
    the largest numbers, so that a read through a wrong page shows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: PagedKv
    segments: list[AttentionSegment]
    parents: list[list[int]]  # per request, -1: the committed prefix
    packed_mask: torch.Tensor
    positions: torch.Tensor
    rope: Rope


def pairwise_cases() -> list[AttentionCase]:
    """The sample of this table."""
    return [AttentionCase(**choice) for choice in pairwise(FACTORS, _cost)]


def pairwise(
    factors: dict[str, tuple[Any, ...]], cost: Callable[[dict[str, Any]], float]
) -> list[dict[str, Any]]:
    """A small covering sample, the same every time: greedy over random candidates, the
    cheaper of two that cover as much. ``cost`` is in units of pairs covered."""
    rng = random.Random(0)
    open_pairs = set(_pairs(factors))
    cases = []
    while open_pairs:
        best = max(
            (_candidate(rng, open_pairs, factors) for _ in range(40)),
            key=lambda choice: len(open_pairs.intersection(_pairs_of(choice))) - cost(choice),
        )
        open_pairs.difference_update(_pairs_of(best))
        cases.append({name: best[name] for name in factors})
    return cases


def all_cases() -> list[AttentionCase]:
    """Rows x contexts x pages x group sizes, the other factors taking turns."""
    main = ("rows", "context", "page_size", "group")
    others = [name for name in FACTORS if name not in main]
    cases = []
    for index, values in enumerate(itertools.product(*(FACTORS[name] for name in main))):
        rng = random.Random(index)
        rest = {name: rng.choice(FACTORS[name]) for name in others}
        cases.append(AttentionCase(**dict(zip(main, values, strict=True)), **rest))
    return cases


def make_inputs(case: AttentionCase) -> AttentionInputs:
    """Random trees, shuffled pages, random values; deterministic in the case."""
    generator = torch.Generator().manual_seed(case.seed)
    rng = random.Random(case.seed)
    sizes = case.segment_sizes
    num_rows = sum(rows for rows, _ in sizes)
    segments = make_segments(sizes, case.page_size, rng)
    parents = [random_tree(rows, rng) for rows, _ in sizes]
    words = (max(rows for rows, _ in sizes) + 31) // 32
    randn = normal_values(generator, case.dtype)
    heads = case.kv_heads * case.group
    q = randn(num_rows, heads, case.head_dim)
    k = randn(num_rows, case.kv_heads, case.head_dim)
    v = randn(num_rows, case.kv_heads, case.head_dim)
    # Two pages of nobody's behind the shuffled ones of the requests.
    num_pages = sum(len(segment.pages) for segment in segments) + 2
    cache = _filled_cache(case, segments, num_pages, generator)
    return AttentionInputs(
        q,
        k,
        v,
        cache,
        segments,
        parents,
        torch.cat([pack_mask(tree, words) for tree in parents]),
        torch.cat(
            [
                segment.prefix_length + torch.tensor(depths(tree), dtype=torch.int32)
                for segment, tree in zip(segments, parents, strict=True)
            ]
        ).int(),
        rope_table(case.head_dim, case.context + case.rows),
    )


def segment_sizes(rows: int, context: int, requests: int) -> list[tuple[int, int]]:
    """(rows, committed tokens) of each request: a half, a third, ... of the first one's."""
    return [(max(rows // (i + 1), 1), context // (i + 1)) for i in range(requests)]


def normal_values(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Draws tensors of given shapes, rounded to ``dtype``."""
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def random_tree(rows: int, rng: random.Random) -> list[int]:
    """parents [rows]: row 0 continues the prefix; recent rows are likelier parents."""
    return [-1, *(rng.randint(max(0, row - 9), row - 1) for row in range(1, rows))]


def depths(parents: list[int]) -> list[int]:
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def pack_mask(parents: list[int], words: int) -> torch.Tensor:
    """Ancestors and self, int32 [rows, words], LSB first."""
    visible: list[int] = []
    for row, parent in enumerate(parents):
        visible.append((visible[parent] if parent >= 0 else 0) | 1 << row)
    table = [[bits >> (32 * word) & 0xFFFFFFFF for word in range(words)] for bits in visible]
    return torch.tensor(table, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def rope_table(rotary_dim: int, num_positions: int, theta: float = 10000.0) -> Rope:
    inv_freq = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * inv_freq
    return Rope(torch.cat([angle.cos(), angle.sin()], dim=-1).float())


def make_segments(
    sizes: list[tuple[int, int]], page_size: int, rng: random.Random
) -> list[AttentionSegment]:
    """Requests of (rows, committed tokens), their pages in random order."""
    counts = [-(-(rows + context) // page_size) for rows, context in sizes]
    shuffled = list(range(sum(counts)))
    rng.shuffle(shuffled)
    segments = []
    first_row = 0
    for (rows, context), count in zip(sizes, counts, strict=True):
        pages = torch.tensor([shuffled.pop() for _ in range(count)])
        segments.append(AttentionSegment(first_row, rows, context, pages))
        first_row += rows
    return segments


def _filled_cache(
    case: AttentionCase,
    segments: list[AttentionSegment],
    num_pages: int,
    generator: torch.Generator,
) -> PagedKv:
    shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    largest = E4M3_MAX if case.fp8_kv else 6e4
    store = torch.float8_e4m3fn if case.fp8_kv else case.dtype
    k, v = (torch.full(shape, largest).to(store) for _ in range(2))
    if case.fp8_kv:
        k_scale, v_scale = (
            torch.rand(case.kv_heads, generator=generator) * 0.01 + 0.005 for _ in range(2)
        )
        cache = PagedKv(k, v, k_scale, v_scale)
    else:
        cache = PagedKv(k, v)
    for segment in segments:
        where = cache.locate(segment.pages, torch.arange(segment.prefix_length))
        for values, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
            new = torch.randn(
                segment.prefix_length, case.kv_heads, case.head_dim, generator=generator
            )
            values[where] = (new if scale is None else new / scale[:, None]).to(store)
    return cache


def _candidate(
    rng: random.Random, open_pairs: set[tuple[object, ...]], factors: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """A random case that holds one pair still open, so that the sample always ends."""
    choice = {name: rng.choice(values) for name, values in factors.items()}
    first, value, second, other = rng.choice(sorted(open_pairs, key=str))
    return choice | {str(first): value, str(second): other}


def _cost(choice: dict[str, Any]) -> float:
    """Roughly the products to compute, in units of a dozen pairs at the table's largest."""
    return float(choice["rows"] * choice["group"] * choice["requests"]) / 400


def _pairs(factors: dict[str, tuple[object, ...]]) -> Iterator[tuple[object, ...]]:
    for first, second in itertools.combinations(factors, 2):
        for value, other in itertools.product(factors[first], factors[second]):
            yield first, value, second, other


def _pairs_of(choice: dict[str, Any]) -> list[tuple[object, ...]]:
    return list(_pairs({name: (value,) for name, value in choice.items()}))


def assert_rounded(
    what: str, got: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float
) -> None:
    """``got`` must be some value within ``slack`` of float64 ``exact``, rounded to its dtype.

    Raises:
        AssertionError: naming the worst element.
    """
    low = (exact - slack).to(got.dtype).double()
    high = (exact + slack).to(got.dtype).double()
    wide = got.double()
    bad = ~((wide >= low) & (wide <= high))  # NaN is bad
    if bad.any():
        off = torch.where(bad, (wide - exact).abs().nan_to_num(torch.inf), -1.0)
        worst = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements are off; the worst is {worst}: "
            f"{float(wide[worst])} instead of {float(exact[worst])}"
        )
