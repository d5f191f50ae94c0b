"""The CPU engine against the reference: op by op on identical inputs, then whole networks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import DEMO_VOCAB, demo_text
from op_by_op import PAGES, OpByOp
from steps import prefill
from trtree import _core
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.runtime.engines import open_engine
from trtree.runtime.tokenizer import Tokenizer

# Of an op's largest output. Ops compute in float32 here, in float64 in the reference.
TOLERANCE = 1e-6


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_op_by_op(demo_engine: Callable[..., Path], activations: str) -> None:
    _, engine = open_engine(demo_engine(backend="cpu", activations=activations))
    _, reference = open_engine(demo_engine(backend="reference", activations=activations))
    check = OpByOp(engine, reference)
    check.prompt_and_tree(DEMO_VOCAB)
    block, mask = 8, 1
    at = _core.Sequence(1, 0, 37, PAGES)
    slots = torch.arange(37, 37 + block, dtype=torch.int32)
    check.rows["drafter_block"] = {
        "token_ids": torch.tensor([11] + [mask] * (block - 1)),
        "positions": slots,
        "slots": slots,
        "packed_mask": torch.full((block, 1), 2**block - 1, dtype=torch.int32),
        "output_rows": torch.arange(1, block, dtype=torch.int32),
    }
    check.segments["drafter_block"] = [AttentionSegment(0, block, 37, torch.tensor(PAGES))]
    engine.draft([_core.DraftRequest(at, 11)], 16)
    engine.observe(None)

    assert set(check.worst) >= {
        "add", "concat", "embedding", "gather_rows", "linear", "rms_norm", "rotary_embedding",
        "silu_mul", "tree_attention",
    }  # fmt: skip
    assert max(check.worst.values()) < TOLERANCE, check.worst


def teacher_forced(engine: _core.Engine, token_ids: list[int]) -> np.ndarray:
    """Logits [n, vocab] of a text in one prefill."""
    return prefill(engine, _core.Sequence(1, 0, 0, list(range(64))), token_ids)


@pytest.fixture(scope="module")
def text_ids(demo_engine: Callable[..., Path]) -> list[int]:
    tokenizer = Tokenizer(demo_engine(backend="cpu") / "tokenizer")
    return tokenizer.encode(demo_text(8))[:500]


def test_whole_network_in_w4a16(demo_engine: Callable[..., Path], text_ids: list[int]) -> None:
    logits = {}
    for backend in ("cpu", "reference"):
        _, engine = open_engine(demo_engine(backend=backend, activations="bf16"))
        logits[backend] = teacher_forced(engine, text_ids[:200])
    difference = np.linalg.norm(logits["cpu"] - logits["reference"], axis=1)
    relative = difference / np.linalg.norm(logits["reference"], axis=1)
    assert np.median(relative) < 2e-2
    assert relative.max() < 2e-2


def test_negative_log_likelihood_in_w4a4(
    demo_engine: Callable[..., Path], text_ids: list[int]
) -> None:
    """W4A4 is chaotic from end to end, so whole networks are compared by what they predict."""
    means = {}
    for backend in ("cpu", "reference"):
        _, engine = open_engine(demo_engine(backend=backend, activations="nvfp4"))
        logits = torch.tensor(teacher_forced(engine, text_ids)).double()
        chosen = torch.tensor(text_ids[1:])[:, None]
        means[backend] = float(-logits[:-1].log_softmax(-1).gather(-1, chosen).mean())
    assert means["cpu"] == pytest.approx(means["reference"], rel=0.01)


def test_drafts_agree(demo_engine: Callable[..., Path]) -> None:
    """The drafter after the same context: log-probs within 1e-2, in W4A16."""
    results = []
    for backend in ("cpu", "reference"):
        _, engine = open_engine(demo_engine(backend=backend, activations="bf16"))
        pages = list(range(8))
        prefill(engine, _core.Sequence(1, 0, 0, pages), list(range(100, 150)))
        draft = engine.draft([_core.DraftRequest(_core.Sequence(1, 0, 50, pages), 7)], 4)
        results.append((draft.log_probs.copy(), draft.token_ids.copy()))
    (ours, our_ids), (theirs, their_ids) = results
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-2)
    assert (our_ids[..., 0] == their_ids[..., 0]).all()
