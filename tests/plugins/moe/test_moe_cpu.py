"""Routing on hand-computed cases; the CPU kernels against the reference, and bitwise."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import plant
from routes import ROUTES, check_route
from trtree import _core
from trtree.plugins.dense_linear.reference import PreparedDense
from trtree.plugins.moe import cpu, reference
from trtree.plugins.moe.contract import Routing
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.reference import PreparedLinear

FloatArray = npt.NDArray[np.float32]
INPUT_SCALE = 0.003
ISAS = ("portable", "avx2", "avx512")


# Routing


def route_cpu(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    weights = cpu.route(logits.numpy(), routing, None if bias is None else bias.numpy())
    return torch.from_numpy(weights)


@pytest.mark.parametrize("route", [reference.route, route_cpu])
@pytest.mark.parametrize("case", ROUTES)
def test_routes_by_hand(route: Any, case: str) -> None:
    check_route(route, case)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("descending=True, stable=True).indices[..., :count]",
         "descending=False, stable=True).indices.flip(-1)[..., :count]",
         "ties-go-to-the-lower-expert"),
        ("choice = scores + correction_bias.double()",
         "choice = scores = scores + correction_bias.double()",
         "bias-chooses-but-does-not-weigh"),
        ("if routing.normalize:", "if False:", "softmax"),
        ("return (weights * routing.scale)", "return (weights)", "sigmoid-scaled"),
        ("grouped.topk(2, dim=-1)", "grouped.topk(1, dim=-1)", "groups"),
        ("masked_fill(~best.unsqueeze(-1), -torch.inf)",
         "masked_fill(~best.unsqueeze(-1), 0.0)", "negative-choices"),
    ],
)  # fmt: skip
def test_planted_faults_show(old: str, new: str, case: str, tmp_path: Path) -> None:
    faulty: ModuleType = plant(reference, old, new, tmp_path)
    check_route(reference.route, case)
    with pytest.raises(AssertionError):
        check_route(faulty.route, case)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(8, 1, 1), (8, 4, 2), (128, 1, 1), (160, 8, 3), (6, 3, 3)]),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
    coarse=st.booleans(),
    bias=st.booleans(),
)
def test_any_route_equals_the_reference(
    seed: int, shape: tuple[int, int, int], scores: Any, normalize: bool, coarse: bool, bias: bool
) -> None:
    experts, groups, top_groups = shape
    generator = torch.Generator().manual_seed(seed)
    top_k = min(8, experts // groups * top_groups, 1 + seed % 8)
    routing = Routing(experts, top_k, scores, normalize, 1.5, groups, top_groups)
    logits = 2 * torch.randn(7, experts, generator=generator)
    biases = torch.randn(experts, generator=generator) if bias else None
    if coarse:  # many ties
        logits = logits.round()
        biases = None if biases is None else biases.round()
    want = reference.route(logits, routing, biases)
    got = route_cpu(logits, routing, biases)
    assert torch.equal(got != 0, want != 0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k 9 of 8"),
        ({"top_k": 0}, "top_k 0 of 8"),
        ({"groups": 3}, "8 experts .* 3 groups"),
        ({"groups": 2, "top_groups": 3}, "top_groups 3 of 2"),
    ],
)
def test_a_routing_that_cannot_be(changes: dict[str, int], message: str) -> None:
    numbers = {"experts": 8, "top_k": 2, **changes}
    with pytest.raises(ValueError, match=message):
        Routing(**numbers)  # type: ignore[arg-type]
    groups, top_groups = numbers.get("groups", 1), numbers.get("top_groups", 1)
    logits = np.zeros((1, 8), dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        _core.moe.route(
            logits, None, numbers["top_k"], False, True, 1.0, groups, top_groups, _core.Serial()
        )


def test_nan_is_not_hidden() -> None:
    logits = torch.full((1, 8), float("nan"))
    for routing in (Routing(8, 2), Routing(8, 2, "sigmoid", groups=4, top_groups=2)):
        assert route_cpu(logits, routing, None).isnan().any()


# Experts


class Stack:
    """Eight experts' up and down linears, of one kind, both ways."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden, self.width = 96, 144  # 9 blocks: uneven segments
        self.up = [torch.randn(2 * self.width, self.hidden, generator=generator) for _ in range(8)]
        self.down = [torch.randn(self.hidden, self.width, generator=generator) for _ in range(8)]
        self.kind = kind

    def packed(self, weights: list[torch.Tensor], **bounds: Any) -> Any:
        if self.kind in ("bfloat16", "float32"):
            return cpu.pack_dense([w.to(getattr(torch, self.kind)) for w in weights], **bounds)
        scale = INPUT_SCALE if self.kind == "nvfp4" else None
        return cpu.pack_nvfp4([nvfp4.quantize_weight(w) for w in weights], scale, **bounds)

    def reference(self, weights: list[torch.Tensor]) -> list[Callable[..., torch.Tensor]]:
        if self.kind in ("bfloat16", "float32"):
            return [PreparedDense(w.to(getattr(torch, self.kind))) for w in weights]
        scale = torch.tensor(INPUT_SCALE)
        quantized = [nvfp4.quantize_weight(w) for w in weights]
        return [PreparedLinear(q, scale, self.kind) for q in quantized]  # type: ignore[arg-type]


def random_weights(rows: int, top_k: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return reference.route(logits, Routing(8, top_k))


KINDS = ["nvfp4", "bf16", "bfloat16", "float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_the_reference(kind: str) -> None:
    stack = Stack(kind)
    x = torch.randn(23, stack.hidden, generator=torch.Generator().manual_seed(1))
    weights = random_weights(23, 3, seed=2)
    weights[5] = 0  # a row without experts
    weights[6, weights[6].nonzero()[0]] = 0  # and one that is short of one
    h = reference.experts_up(x, weights, stack.reference(stack.up), 3)
    got = cpu.experts_up(stack.packed(stack.up), x.numpy(), weights.numpy(), 3)
    np.testing.assert_allclose(got, h, rtol=0, atol=1e-6 * float(h.abs().max()))
    assert not h[5].any()
    assert not h[6, 2].any()
    assert h[6, 1].any()
    y = reference.experts_down(h, weights, stack.reference(stack.down))
    ours = cpu.experts_down(stack.packed(stack.down), h.numpy(), weights.numpy())
    np.testing.assert_allclose(ours, y, rtol=0, atol=1e-6 * float(y.abs().max()))
    assert not ours[5].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    """Byte for byte: alone, in any company, on two threads, on any instruction set."""
    stack = Stack(kind)
    up, down = stack.packed(stack.up), stack.packed(stack.down)
    x = torch.randn(40, stack.hidden, generator=torch.Generator().manual_seed(3)).numpy()
    weights = random_weights(40, 3, seed=4).numpy()

    def both(rows: Any, **options: Any) -> FloatArray:
        h = cpu.experts_up(up, x[rows], weights[rows], 3, **options)
        return cpu.experts_down(down, h, weights[rows], **options)

    together = both(slice(None))
    for row in range(40):
        assert both(slice(row, row + 1))[0].tobytes() == together[row].tobytes()
    order = np.random.default_rng(0).permutation(40)
    pool = _core.ThreadPool(2)
    assert both(order, parallel=pool).tobytes() == together[order].tobytes()
    tried = 0
    for isa in ISAS:
        try:
            other = both(slice(None), isa=isa)
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
            continue
        tried += 1
        assert other.tobytes() == together.tobytes()
    assert tried


@pytest.mark.parametrize("kind", ["nvfp4", "bf16", "bfloat16"])
def test_segments_of_ranks_add_up_to_the_same_bits(kind: str) -> None:
    stack = Stack(kind)
    weights = random_weights(6, 3, seed=5).numpy()
    h = torch.randn(6, 3, stack.width, generator=torch.Generator().manual_seed(6)).numpy()
    whole = stack.packed(stack.down)
    y = cpu.experts_down(whole, h, weights)
    parts = cpu.experts_down(whole, h, weights, partial_sums=True)
    assert parts.shape == (6, 8, stack.hidden)
    # Two ranks: blocks 0 to 4 are the first four segments, 4 to 9 the others.
    halves = []
    for first, last, bounds in ((0, 4, [0, 1, 2, 3, 4]), (4, 9, [0, 1, 2, 3, 5])):
        quantized = stack.down
        if kind in ("nvfp4", "bf16"):
            scale = INPUT_SCALE if kind == "nvfp4" else None
            cut = [
                nvfp4.QuantizedTensor(
                    q.codes[:, 8 * first : 8 * last].contiguous(),
                    q.block_scale[:, first:last].contiguous(),
                    q.global_scale,
                )
                for q in map(nvfp4.quantize_weight, quantized)
            ]
            packed = cpu.pack_nvfp4(cut, scale, segment_bounds=bounds)
        else:
            columns = [w[:, 16 * first : 16 * last].bfloat16().contiguous() for w in quantized]
            packed = cpu.pack_dense(columns, segment_bounds=bounds)
        part = np.ascontiguousarray(h[:, :, 16 * first : 16 * last])
        halves.append(cpu.experts_down(packed, part, weights, partial_sums=True))
    assert np.concatenate(halves, axis=1).tobytes() == parts.tobytes()
    total = np.zeros_like(y)
    for segment in range(8):
        total += parts[:, segment]
    assert total.tobytes() == y.tobytes()


def test_each_slot_is_scaled_by_its_experts_vector() -> None:
    """Of rows, and of what they are in slots already; to the bit, as each is one product."""
    generator = torch.Generator().manual_seed(7)
    weights = random_weights(23, 3, seed=2)
    weights[5] = 0  # a row without experts
    weights[6, weights[6].nonzero()[0]] = 0  # and one that is short of one
    vectors = 0.5 + torch.rand(8, 96, generator=generator)
    x = torch.randn(23, 96, generator=generator)
    once = reference.experts_scale(x, weights, vectors, 3)
    twice = reference.experts_scale(once, weights, vectors, 3)
    experts = weights[0].nonzero().flatten()
    assert torch.equal(once[0], x[0] * vectors[experts])
    assert torch.equal(twice[0], once[0] * vectors[experts])
    assert not once[5].any() and not once[6, 2].any() and once[6, 1].any()
    for operand, wanted in ((x, once), (once, twice)):
        for parallel in (_core.Serial(), _core.ThreadPool(2)):
            got = cpu.experts_scale(
                operand.numpy(), weights.numpy(), vectors.numpy(), 3, parallel=parallel
            )
            assert got.tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize("in_slots", [False, True])
def test_factors_beside_experts(in_slots: bool) -> None:
    """Two dense products of each slot's own expert, and their sum with what is gated."""
    stack, first, second = Stack("nvfp4"), Stack("bfloat16", 1), Stack("bfloat16", 2)
    a = [w[:8] for w in first.up]
    b = [w[:, :8].contiguous() for w in second.up]
    weights = random_weights(23, 3, seed=2)
    weights[5] = 0
    x = torch.randn(23, *([3] if in_slots else []), 96, generator=torch.Generator().manual_seed(1))
    if in_slots:
        x = x * (reference.slots(weights)[:, -1:, None] >= torch.arange(3)[:, None])
    middle = reference.experts_linear(x, weights, first.reference(a), 3)
    added = reference.experts_linear(middle, weights, second.reference(b), 3)
    h = reference.experts_up(x, weights, stack.reference(stack.up), 3, added)
    without = reference.experts_up(x, weights, stack.reference(stack.up), 3)
    assert (h - without).abs().max() > 0.1

    def run(rows: slice, **options: Any) -> list[FloatArray]:
        these = x.numpy()[rows], weights.numpy()[rows]
        count = len(these[0])
        t = cpu.experts_linear(first.packed(a), *these, 3, **options).reshape(count, 3, 8)
        u = cpu.experts_linear(second.packed(b), t, these[1], 3, **options).reshape(count, 3, -1)
        return [t, u, cpu.experts_up(stack.packed(stack.up), *these, 3, u, **options)]

    got = run(slice(None))
    for ours, wanted in zip(got, (middle, added, h), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
        assert not ours[5].any()
    for threads in (run(slice(None), parallel=_core.ThreadPool(2)), run(slice(7, 8))):
        for ours, part in zip(threads, got, strict=True):
            assert ours.tobytes() in (part.tobytes(), part[7:8].tobytes())
    parts = cpu.experts_linear(first.packed(a), x.numpy(), weights.numpy(), 3, partial_sums=True)
    total = np.zeros_like(got[0]).reshape(69, 8)
    for segment in range(8):
        total += parts[:, segment]
    assert total.tobytes() == got[0].tobytes()


def test_more_experts_than_slots_are_refused() -> None:
    stack = Stack("float32")
    x = np.zeros((2, stack.hidden), dtype=np.float32)
    weights = np.zeros((2, 8), dtype=np.float32)
    weights[1, :4] = 1
    with pytest.raises(ValueError, match="row 1 has 4 experts, there are 3 slots"):
        cpu.experts_up(stack.packed(stack.up), x, weights, 3)
    with pytest.raises(ValueError, match="experts is 7, expected 8"):
        cpu.experts_up(stack.packed(stack.up), x, weights[:, :7].copy(), 3)
    vectors = np.ones((8, stack.hidden), dtype=np.float32)
    with pytest.raises(ValueError, match="row 1 has 4 experts, there are 3 slots"):
        cpu.experts_scale(x, weights, vectors, 3)
    with pytest.raises(ValueError, match="vectors is 7, expected 8"):
        cpu.experts_scale(x, weights, vectors[:7].copy(), 4)
    with pytest.raises(ValueError, match="slots is 2, expected 4"):
        cpu.experts_scale(np.zeros((2, 2, stack.hidden), np.float32), weights, vectors, 4)
    with pytest.raises(ValueError, match="features is 96, expected 288"):
        cpu.experts_up(stack.packed(stack.up), x, weights, 4, np.zeros((2, 4, 96), np.float32))
