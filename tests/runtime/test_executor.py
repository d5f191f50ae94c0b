"""The executor over the toy engine: whatever is batched, the tokens are plain decoding's."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from request_mixes import CHAIN, PLAIN, tree
from toy_engine import ToyEngine, ToyLogits, decode, next_token
from trtree import _core
from trtree.runtime.executor import (
    DecodingMode,
    Executor,
    ExecutorConfig,
    FinishReason,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SpeculativeConfig,
    TreeKind,
)
from trtree.runtime.generation import Usage
from trtree.runtime.server.formats import usage_of


def run(executor: Executor, requests: list[Request]) -> dict[int, tuple[list[int], Response]]:
    """Tokens and last response by request id, ids in the order of ``requests``."""
    tokens: dict[int, list[int]] = {executor.enqueue_request(r): [] for r in requests}
    last = {}
    while responses := executor.await_responses():
        for response in responses:
            tokens[response.request_id] += response.token_ids
            last[response.request_id] = response
    return {key: (tokens[key], last[key]) for key in tokens}


speculation = st.one_of(
    st.just(PLAIN),
    st.just(CHAIN),
    st.sampled_from([0, 1, 2, 16, 31, 32, 33, 64, 128]).map(tree),
)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=1, max_size=40),
        st.integers(1, 24),
        speculation,
        st.lists(st.integers(0, 12), max_size=1),
    ),
    min_size=1,
    max_size=12,
)


def expected_output(prompt: list[int], max_tokens: int, stops: list[int]) -> list[int]:
    output = decode(prompt, max_tokens, vocab=13)
    cut = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
    return output[:cut]


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from([1, 3, 16, 64]), st.integers(1, 8), st.integers(129, 300))
def test_any_mix_of_requests_decodes_as_if_alone(specs, page_size, max_batch, max_rows):
    engine = ToyEngine(
        page_size=page_size,
        num_pages=1200 // page_size,
        max_batch_size=max_batch,
        max_num_rows=max_rows,
    )
    executor = Executor(engine)
    results = run(
        executor,
        [Request(p, max_tokens=n, stop_token_ids=s, speculative=c) for p, n, c, s in specs],
    )
    for (prompt, max_tokens, _, stops), (tokens, last) in zip(specs, results.values(), strict=True):
        assert tokens == expected_output(prompt, max_tokens, stops)
        stopped = bool(stops) and tokens[-1] in stops
        assert last.finish_reason == (FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH)
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == engine.c.num_pages
    assert after.active_requests == after.queued_requests == 0


def test_requests_share_steps_and_drafter_passes():
    engine = ToyEngine(skill=8)
    executor = Executor(engine)
    run(executor, [Request([i, i + 1], max_tokens=20, speculative=tree(16)) for i in range(6)])
    assert max(len(batch.segments) for batch in engine.batches) == 6
    assert max(engine.drafts) == 6


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding_requests():
    engine = ToyEngine(max_num_rows=40, verify_width=17)
    executor = Executor(engine)
    prompt = [i % 13 for i in range(150)]
    results = run(
        executor,
        [Request([1], max_tokens=30, speculative=tree(16)), Request(prompt, max_tokens=3)],
    )
    assert [tokens for tokens, _ in results.values()] == [
        decode([1], 30, 13),
        decode(prompt, 3, 13),
    ]
    mixed = [b for b in engine.batches if len(b.segments) == 2]
    assert mixed, "prefill and decoding never shared a step"


def test_the_tree_is_no_deeper_than_the_tokens_still_wanted():
    engine = ToyEngine(skill=8)
    run(Executor(engine), [Request([1, 2], max_tokens=4, speculative=tree(64))])
    for batch in engine.batches[1:]:
        depth = batch.positions.max() - batch.segments[0].sequence.committed_length
        done = batch.segments[0].sequence.committed_length + 1 - 2
        assert depth <= 4 - done - 1


@pytest.mark.parametrize("budget", [1, 4, 64])
def test_the_drafters_block_does_not_follow_the_budget(budget: int) -> None:
    """Pitfall 13: a small budget still spends its nodes over all of the block's depths."""
    engine = ToyEngine(skill=8, block_size=6)
    choices = [[0] * depth for depth in range(1, budget + 1)][:5]
    executor = Executor(engine, ExecutorConfig(medusa_choices=choices))
    run(executor, [Request([2], max_tokens=40, speculative=tree(budget, TreeKind.STATIC))])
    depths = {int(b.positions.max() - b.positions.min()) for b in engine.batches[1:]}
    assert max(depths) == min(budget, 5)
    assert engine.c.block_size == 6


def test_statistics_count_passes_and_tokens():
    engine = ToyEngine(skill=8, block_size=6)
    ((tokens, last),) = run(
        Executor(engine), [Request([3], max_tokens=19, speculative=CHAIN)]
    ).values()
    s = last.statistics
    # A perfect chain of 5 gives 6 tokens a pass: 1 by prefill, then 6 + 6 + 6.
    assert (s.prefill_forwards, s.verify_forwards, s.target_forwards) == (1, 3, 4)
    assert (s.decoded_tokens, s.drafted_tokens, s.accepted_tokens) == (18, 15, 15)
    assert s.acceptance_length == 6.0
    assert len(tokens) == 19


def test_pages_are_reserved_for_verify_width_and_block_before_a_step():
    """Pitfall 30: every row's slot lies in the request's own pages (the toy checks it)."""
    engine = ToyEngine(page_size=1, num_pages=2 + 10 + 129)
    executor = Executor(engine)
    run(executor, [Request([1, 2], max_tokens=10, speculative=tree(128))])
    with pytest.raises(ValueError, match=r"needs 142 KV pages, the engine has 141"):
        executor.enqueue_request(Request([1, 2, 3], max_tokens=10, speculative=tree(128)))


def test_a_queue_longer_than_the_pool_is_served_in_order():
    engine = ToyEngine(page_size=4, num_pages=16)
    executor = Executor(engine)
    results = run(executor, [Request([i], max_tokens=8, speculative=CHAIN) for i in range(9)])
    assert [tokens for tokens, _ in results.values()] == [decode([i], 8, 13) for i in range(9)]


def test_cancelling_ends_a_request_and_frees_its_pages():
    engine = ToyEngine()
    executor = Executor(engine)
    kept = executor.enqueue_request(Request([1], max_tokens=20, speculative=CHAIN))
    ended = executor.enqueue_request(Request([2], max_tokens=20, speculative=CHAIN))
    executor.await_responses()
    executor.cancel_request(ended)
    executor.cancel_request(12345)
    seen = {}
    while responses := executor.await_responses():
        seen |= {r.request_id: r.finish_reason for r in responses}
    assert seen == {kept: FinishReason.LENGTH, ended: FinishReason.CANCELLED}
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == engine.c.num_pages


def test_a_batch_accepts_what_each_request_accepts_alone():
    """Pitfall 15: nobody is verified against another request's drafts."""
    requests = [
        Request([i, 3, i], max_tokens=30, speculative=tree(16) if i % 2 else CHAIN)
        for i in range(8)
    ]
    together = run(Executor(ToyEngine()), requests)
    for request, (_, last) in zip(requests, together.values(), strict=True):
        ((_, alone),) = run(Executor(ToyEngine()), [request]).values()
        assert last.statistics.accepted_tokens == alone.statistics.accepted_tokens
        assert last.statistics.verify_forwards == alone.statistics.verify_forwards


def test_plain_requests_leave_the_drafter_alone():
    class Watching(ToyEngine):
        extended = False

        def commit(self, commits):
            self.extended |= any(commit.extend_drafter for commit in commits)
            super().commit(commits)

    engine = Watching()
    run(Executor(engine), [Request([1, 2, 3], max_tokens=9, speculative=PLAIN)])
    assert not engine.extended
    assert engine.drafts == []


def test_a_chain_fits_a_narrow_verify_width():
    engine = ToyEngine(verify_width=3, block_size=8, max_num_rows=3, skill=8)
    ((tokens, _),) = run(Executor(engine), [Request([1], 30, speculative=CHAIN)]).values()
    assert tokens == decode([1], 30, 13)
    assert max(batch.num_rows for batch in engine.batches) == 3


def test_rounds_that_do_not_hold_everybody_take_turns():
    engine = ToyEngine(max_num_rows=17, verify_width=17)
    executor = Executor(engine)
    ids = [executor.enqueue_request(Request([i], 12, speculative=tree(16))) for i in range(3)]
    seen = []
    while responses := executor.await_responses():
        seen += [response.request_id for response in responses]
    assert set(seen[3:6]) == set(ids)  # after the prefill round, each once before any twice


def test_other_threads_may_cancel_and_enqueue_during_rounds():
    engine = ToyEngine(num_pages=4000)
    executor = Executor(engine)
    ids = [executor.enqueue_request(Request([i], 60, speculative=tree(16))) for i in range(12)]
    more: list[int] = []

    def disturb() -> None:
        for index, request_id in enumerate(ids[::2]):
            executor.cancel_request(request_id)
            more.append(executor.enqueue_request(Request([index], 20, speculative=CHAIN)))
            executor.latest_statistics()

    thread = threading.Thread(target=disturb)
    thread.start()
    tokens: dict[int, list[int]] = {}
    while responses := executor.await_responses():
        for response in responses:
            tokens.setdefault(response.request_id, []).extend(response.token_ids)
    thread.join()
    while responses := executor.await_responses():  # what arrived after the last round
        for response in responses:
            tokens.setdefault(response.request_id, []).extend(response.token_ids)
    for i, request_id in list(enumerate(ids))[1::2]:
        assert tokens[request_id] == decode([i], 60, 13)
    for i, request_id in enumerate(more):
        assert tokens[request_id] == decode([i], 20, 13)
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == 4000


def test_a_static_tree_keeps_its_shape():
    choices = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    engine = ToyEngine()
    executor = Executor(engine, ExecutorConfig(medusa_choices=choices))
    ((tokens, _),) = run(
        executor, [Request([4], max_tokens=30, speculative=tree(16, TreeKind.STATIC))]
    ).values()
    assert tokens == decode([4], 30, 13)
    full = [b for b in engine.batches if b.num_rows == 6]
    assert all(b.parents.tolist() == [-1, 0, 0, 1, 1, 3] for b in full)
    assert len(full) > 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "prompt_token_ids is empty"),
        (Request([13]), "prompt_token_ids holds 13; the vocabulary has 13"),
        (Request([-1]), "prompt_token_ids holds -1"),
        (Request([1], stop_token_ids=[99]), "stop_token_ids holds 99"),
        (Request([1], max_tokens=0), "max_tokens must be at least 1, not 0"),
        (Request([1], max_tokens=5000), "exceed the engine's max_seq_len 1600"),
        (Request([1], speculative=tree(-1)), "tree_budget -1 is negative"),
        (Request([1], speculative=tree(129)), r"needs a verify width of 130; .* built for 129"),
        (Request([1], speculative=tree(2**31 - 1)), "needs a verify width of 2147483648"),
        (Request([1], speculative=tree(4, TreeKind.STATIC)), "built without one"),
        (
            Request([1], speculative=SpeculativeConfig(top_k=14)),
            "top_k 14; the engine offers at most 13",
        ),
        (Request([1], sampling=SamplingConfig(temperature=-0.5)), "temperature"),
        (Request([1], sampling=SamplingConfig(logit_bias=[(13, 1.0)])), "logit_bias"),
        (Request([1], output=OutputConfig(log_probs=14)), "log_probs 14"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(request_, message):
    with pytest.raises(ValueError, match=message):
        Executor(ToyEngine()).enqueue_request(request_)


def test_speculation_without_a_drafter_is_refused_and_plain_works():
    executor = Executor(ToyEngine(block_size=0))
    with pytest.raises(ValueError, match="built without one"):
        executor.enqueue_request(Request([1], speculative=CHAIN))
    ((tokens, _),) = run(executor, [Request([1], max_tokens=5, speculative=PLAIN)]).values()
    assert tokens == decode([1], 5, 13)


@pytest.mark.parametrize("config", [CHAIN, tree(0), tree(16)])
def test_block_size_one_is_plain_decoding(config):
    engine = ToyEngine(block_size=1)
    ((tokens, last),) = run(
        Executor(engine), [Request([1], max_tokens=5, speculative=config)]
    ).values()
    assert tokens == decode([1], 5, 13)
    assert engine.drafts == []
    assert last.statistics.drafted_tokens == 0


def test_trees_on_an_inexact_recurrent_state_need_an_override():
    engine = ToyEngine()
    engine.c.tree_state = _core.TreeState.INEXACT
    with pytest.raises(ValueError, match="allow_unsafe_tree_state"):
        Executor(engine).enqueue_request(Request([1], speculative=tree(4)))
    Executor(engine).enqueue_request(Request([1], speculative=CHAIN))
    allowing = Executor(engine, ExecutorConfig(allow_unsafe_tree_state=True))
    modes = (tree(4), CHAIN)
    found = run(allowing, [Request([1], 4, speculative=mode) for mode in modes]).values()
    said = [last.statistics.inexact_tree_state for _, last in found]
    assert said == [True, False]
    assert not allowing.latest_statistics().exact_tree_state
    assert Executor(ToyEngine()).latest_statistics().exact_tree_state
    usages = [usage_of([Usage(1, 4, last.statistics)], 1) for _, last in found]
    assert ["inexact_tree_state" in usage["speculative"] for usage in usages] == said


def test_an_engine_error_reaches_the_caller():
    class Broken(ToyEngine):
        def step(self, batch: _core.RowBatch) -> _core.StepResult:
            raise FloatingPointError("NaN in the logits")

    executor = Executor(Broken())
    executor.enqueue_request(Request([1]))
    with pytest.raises(FloatingPointError, match="NaN"):
        executor.await_responses()


@pytest.mark.parametrize("mode", [DecodingMode.PLAIN, DecodingMode.CHAIN, DecodingMode.TREE])
def test_penalties_count_the_output_along_the_accepted_path(mode: DecodingMode) -> None:
    prompt, expected, vocab = [1, 2, 3, 1], [], 13
    for _ in range(60):
        logits = [0.0] * vocab
        logits[next_token([*prompt, *expected], vocab)] = ToyLogits.HEIGHT
        penalized = [
            logit - 1.5 * expected.count(token) - 0.5 * (token in expected)
            for token, logit in enumerate(logits)
        ]
        expected.append(penalized.index(max(penalized)))
    assert expected != decode(prompt, 60, vocab)
    executor = Executor(ToyLogits(ToyEngine(vocab=vocab)))
    sampling = SamplingConfig(frequency_penalty=1.5, presence_penalty=0.5)
    config = SpeculativeConfig(mode, tree_budget=16)
    executor.enqueue_request(Request(prompt, 60, sampling=sampling, speculative=config))
    tokens: list[int] = []
    while responses := executor.await_responses():
        tokens += responses[0].token_ids
    assert tokens == expected
