"""Chain and tree decode the tokens of plain decoding on the reference engine.

The real demo pair, in every activation mode, with any budget, batch and page size.
"""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import DEMO_VOCAB
from request_mixes import PLAIN
from trtree.runtime.executor import DecodingMode, Executor, Request, SpeculativeConfig
from trtree.runtime.session import Session

MAX_TOKENS = 16

speculation = st.one_of(
    st.just(SpeculativeConfig(DecodingMode.CHAIN)),
    st.sampled_from([0, 1, 16, 33, 64, 128]).map(
        lambda budget: SpeculativeConfig(DecodingMode.TREE, tree_budget=budget)
    ),
)
prompts = st.lists(st.integers(0, DEMO_VOCAB - 1), min_size=1, max_size=24)


@pytest.mark.parametrize("activations", ["nvfp4", "bf16", "float32"])
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=st.lists(st.tuples(prompts, speculation), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_speculation_is_lossless(
    demo_session: Callable[..., Session],
    activations: str,
    batch: list[tuple[list[int], SpeculativeConfig]],
    page_size: int,
) -> None:
    session = demo_session(
        backend="reference", activations=activations, page_size=page_size, max_tree_budget=128
    )

    def run(requests: list[Request]) -> list[list[int]]:
        return [completion.token_ids for completion in session.complete_all(requests)]

    together = run([Request(p, max_tokens=MAX_TOKENS, speculative=s) for p, s in batch])
    for (prompt, _), tokens in zip(batch, together, strict=True):
        ((alone),) = run([Request(prompt, max_tokens=MAX_TOKENS, speculative=PLAIN)])
        assert tokens == alone


def test_text_the_pair_knows_is_drafted_well(demo_session: Callable[..., Session]) -> None:
    """Acceptance is real: several tokens per pass, more with a tree than with a chain."""
    session = demo_session(backend="reference")
    prompt = session.tokenizer.encode(
        "Sort, highest first: Miovin 97, Cebel 53, Grovin 69, Liomi 45, Priobel 75."
    )
    lengths = {}
    for mode, budget in (("plain", 0), ("chain", 0), ("tree", 64)):
        request = Request(
            prompt, max_tokens=64, speculative=session.speculative_config(mode, budget)
        )
        lengths[mode] = session.complete(request).statistics.acceptance_length
    assert lengths["plain"] == 1.0
    assert lengths["tree"] >= lengths["chain"] > 2.0


def test_nan_is_an_error_that_says_where(demo_session: Callable[..., Session]) -> None:
    """Pitfall 27: a NaN never turns into silent zero acceptance."""
    session = demo_session(backend="reference")
    cache = session.engine._caches["model.layers.0.self_attn.kv"]
    saved = cache.v[3].clone()
    executor = Executor(session.engine)
    executor.enqueue_request(Request([1, 2, 3], max_tokens=4, speculative=PLAIN))
    executor.await_responses()
    cache.v.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="NaN in the logits of output row 0"):
        executor.await_responses()
    cache.v.zero_()
    cache.v[3] = saved
