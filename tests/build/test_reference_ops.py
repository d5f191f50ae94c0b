"""Single ops of the reference lowering on hand-computed cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from implied_weights import ImpliedWeights
from trtree import _core
from trtree.build.lowering.reference import ReferenceNetwork, StepContext
from trtree.build.network.graph import Graph
from trtree.build.network.network import DType
from trtree.build.network.rope import RopeTable
from trtree.plugins.tree_attention import reference as attention
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv
from trtree.runtime.session import Session


def run_op(
    build: Callable[[Graph], Any],
    inputs: dict[str, torch.Tensor],
    dense: dict[str, torch.Tensor] | None = None,
    dtype: DType = "float32",
) -> dict[str, torch.Tensor]:
    g = Graph("target", ImpliedWeights(), dtype=dtype)
    build(g)
    return ReferenceNetwork(g.network, dense or {}, {}).run(inputs, StepContext({}, []))


def argmax(logits: list[list[float]]) -> list[int]:
    def build(g: Graph) -> None:
        x = g.input("x", ("outputs", len(logits[0])), "float32")
        g.output("y", g.argmax("argmax", x))

    return run_op(build, {"x": torch.tensor(logits)})["y"].tolist()


def test_argmax_takes_the_first_of_equal_logits() -> None:
    assert argmax([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]) == [1, 0]


def test_argmax_names_the_row_with_nan() -> None:
    with pytest.raises(FloatingPointError, match="output row 1"):
        argmax([[1.0, 2.0], [float("nan"), 2.0]])


def test_top_k_is_stable_and_normalised() -> None:
    def build(g: Graph) -> None:
        x = g.input("x", ("outputs", 5), "float32")
        for role, tensor in zip("pi", g.top_k_log_probs("top", x, 3), strict=True):
            g.output(role, tensor)

    result = run_op(build, {"x": torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]])})
    assert result["i"].tolist() == [[1, 3, 2]]
    total = np.log(1 + 2 * np.exp(2.0) + 2 * np.exp(1.0))
    np.testing.assert_allclose(result["p"], [[2 - total, 2 - total, 1 - total]], atol=1e-6)


def test_rms_norm() -> None:
    def build(g: Graph) -> None:
        g.output("y", g.rms_norm("norm", g.input("x", ("rows", 2), "float32"), 0.5))

    weight = {"target:norm": torch.tensor([1.0, 2.0])}
    result = run_op(build, {"x": torch.tensor([[3.0, 4.0]])}, weight)["y"]
    scale = 1 / np.sqrt(12.5 + 0.5)
    np.testing.assert_allclose(result, [[3 * scale, 8 * scale]], rtol=1e-7)


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [
        # A quarter turn for the first pair, half a turn for the second; 5 and 6 pass.
        (False, [-3.0, -2.0, 1.0, -4.0, 5.0, 6.0]),
        (True, [-2.0, 1.0, -3.0, -4.0, 5.0, 6.0]),
    ],
)
def test_partial_rotary_embedding(interleaved: bool, expected: list[float]) -> None:
    table = RopeTable("rope", (np.pi / 2, np.pi), interleaved=interleaved)

    def build(g: Graph) -> None:
        x = g.input("x", ("rows", 1, 6), "float32")
        g.output("y", g.rotary_embedding("r", x, g.input("p", ("rows",), "int32"), table))

    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    result = run_op(build, {"x": x, "p": torch.tensor([1], dtype=torch.int32)})["y"]
    np.testing.assert_allclose(result[0, 0], expected, atol=1e-6)


def test_results_are_rounded_once_to_the_networks_dtype() -> None:
    def build(g: Graph) -> None:
        x = g.input("x", ("rows", 1), "bfloat16")
        g.output("y", g.add("sum", x, x))

    result = run_op(build, {"x": torch.tensor([[1.0 / 3]]).bfloat16()}, dtype="bfloat16")["y"]
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_a_row_attends_prefix_ancestors_and_itself(page_size: int) -> None:
    """Against a plain softmax over each row's own keys, in pages that are out of order."""
    torch.manual_seed(0)
    pages = torch.tensor([7, 2, 5, 0, 9, 3, 8][: -(-7 // page_size)])
    cache = PagedKv(torch.randn(10, page_size, 2, 4), torch.randn(10, page_size, 2, 4))
    k, v, q = torch.randn(4, 2, 4), torch.randn(4, 2, 4), torch.randn(4, 6, 4)
    prefix = 3
    segment = AttentionSegment(0, 4, prefix, pages)
    before = torch.stack(
        [torch.stack([c[cache.locate(pages, torch.arange(prefix))] for c in (cache.k, cache.v)])]
    )[0]
    attention.kv_append(cache, k, v, prefix + torch.arange(4), [segment])
    # Rows 1 and 2 continue row 0; row 3 continues row 2.
    seen = [[0], [0, 1], [0, 2], [0, 2, 3]]
    mask = torch.tensor([[sum(1 << j for j in rows)] for rows in seen], dtype=torch.int32)
    positions = torch.tensor([3, 4, 4, 5], dtype=torch.int32)
    for window in (None, 2):
        out = attention.tree_attention(
            cache, q, mask, positions, [segment], scale=0.5, window=window
        )
        for row, own in enumerate(seen):
            keys = torch.cat([before[0], k[own]])
            values = torch.cat([before[1], v[own]])
            at = [*range(prefix), *positions[own].tolist()]
            kept = [i for i, p in enumerate(at) if window is None or p > positions[row] - window]
            for head in range(6):
                scores = (keys[kept, head // 3] @ q[row, head]) * 0.5
                expected = scores.softmax(0) @ values[kept, head // 3]
                torch.testing.assert_close(out[row, head], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_commit_reads_all_before_it_writes_any(page_size: int) -> None:
    pages = torch.arange(16 // page_size)
    cache = PagedKv(
        torch.arange(16.0).reshape(-1, page_size, 1, 1).clone(),
        -torch.arange(16.0).reshape(-1, page_size, 1, 1).clone(),
    )
    segment = AttentionSegment(0, 8, 4, pages)
    attention.commit(cache, segment, torch.tensor([0, 2, 3, 6]))
    assert cache.k.flatten().tolist()[:8] == [0, 1, 2, 3, 4, 6, 7, 10]
    assert (cache.v == -cache.k).all()


def test_step_metadata_is_built_once(
    demo_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 31: the mask and page tables of a step are made once, not per layer."""
    from trtree.runtime.engines import reference as engine_module

    engine = demo_session(backend="reference").engine
    calls = []
    original = engine_module._segment
    monkeypatch.setattr(
        engine_module, "_segment", lambda segment: calls.append(1) or original(segment)
    )
    at = _core.Sequence(1, 0, 0, [0])
    engine.step(_core.RowBatch([_core.SegmentRequest(at, [1, 2], [-1, 0], [1])]))
    assert len(calls) == 1
