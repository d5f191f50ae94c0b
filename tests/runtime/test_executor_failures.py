"""An engine that fails in any of its calls: no token is lost, doubled or told before its time."""

import threading

import pytest

from request_mixes import CHAIN, NO_EVICT, PLAIN, tree
from toy_engine import ToyEngine, ToyLogits, decode
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    FinishReason,
    OutputConfig,
    QueueFullError,
    Request,
    SamplingConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from wrapped_engine import FailingEngine, GatedEngine

MODES = [PLAIN, CHAIN, tree(8)]
PROMPTS = [[i, 1, 2, 3, 4, 5] for i in range(5)]


def run(executor: Executor) -> tuple[dict[int, list[int]], dict[int, FinishReason], int]:
    """Tokens and ends by request, and how many calls failed."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    failures = 0
    for _ in range(500):
        try:
            responses = executor.await_responses()
        except RuntimeError:
            failures += 1
            continue
        if not responses:
            return tokens, ends, failures
        for response in responses:
            assert response.request_id not in ends
            tokens.setdefault(response.request_id, []).extend(response.token_ids)
            if response.finished:
                ends[response.request_id] = response.finish_reason
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize("at", [1, 2, 4, 9])
@pytest.mark.parametrize(
    ("mode", "call"),
    [
        (mode, call)
        for mode in MODES
        for call in ("draft", "step", "commit", "half")
        if call != "draft" or mode is not PLAIN
    ],
)
def test_a_failed_round_has_not_been(mode: SpeculativeConfig, call: str, at: int) -> None:
    for scheduler in (SchedulerConfig(), NO_EVICT):
        engine = FailingEngine(ToyEngine(num_pages=30 if at > 2 else 400), call, at)
        executor = Executor(engine, ExecutorConfig(scheduler_config=scheduler))
        ids = [executor.enqueue_request(Request(p, 12, speculative=mode)) for p in PROMPTS]
        tokens, ends, failures = run(executor)
        assert (failures == 1) == engine.failed
        assert tokens == {i: decode(p, 12, 13) for i, p in zip(ids, PROMPTS, strict=True)}
        assert set(ends.values()) == {FinishReason.LENGTH}
        after = executor.latest_statistics()
        assert after.free_pages + after.cached_pages == after.total_pages
        assert after.output_tokens == 12 * len(PROMPTS)
        assert after.prompt_tokens == sum(map(len, PROMPTS))
        assert after.finished_requests == len(PROMPTS)


@pytest.mark.parametrize("call", ["draft", "step", "commit", "half"])
@pytest.mark.parametrize("by_shutdown", [True, False])
def test_requests_can_be_ended_after_a_failure(call: str, by_shutdown: bool) -> None:
    executor = Executor(FailingEngine(ToyEngine(), call, 2))
    ids = [executor.enqueue_request(Request(p, 50, speculative=MODES[2])) for p in PROMPTS]
    with pytest.raises(RuntimeError, match="failed"):
        while True:
            executor.await_responses()
    if by_shutdown:
        executor.shutdown()
    else:
        for request_id in ids:
            executor.cancel_request(request_id)
    last = {r.request_id: r.finish_reason for r in executor.await_responses()}
    assert last == dict.fromkeys(ids, FinishReason.CANCELLED)
    assert executor.await_responses() == []
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == after.total_pages
    assert after.active_requests == after.queued_requests == 0


@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_row_that_cannot_be_sampled_undoes_the_rows_before_it(bad_step: int) -> None:
    """Penalties count each token once, and prompt log-probs are complete."""
    sampling = SamplingConfig(frequency_penalty=2.0, presence_penalty=2.0)
    outputs = OutputConfig(2, 2)

    def results(bad: int) -> object:
        executor = Executor(ToyLogits(ToyEngine(), nan_at_step=bad))
        for prompt in PROMPTS:
            executor.enqueue_request(
                Request(prompt, 120, sampling=sampling, speculative=MODES[2], output=outputs)
            )
        tokens: dict[int, list[int]] = {}
        log_probs: dict[int, list[float]] = {}
        prompts: dict[int, int] = {}
        failures = 0
        while True:
            try:
                responses = executor.await_responses()
            except RuntimeError as error:
                assert "NaN" in str(error)
                failures += 1
                continue
            if not responses:
                return failures == (bad > 0), tokens, log_probs, prompts
            for r in responses:
                tokens.setdefault(r.request_id, []).extend(r.token_ids)
                log_probs.setdefault(r.request_id, []).extend(p.log_prob for p in r.log_probs)
                prompts[r.request_id] = prompts.get(r.request_id, 0) + len(r.prompt_log_probs)

    assert results(bad_step) == results(0)


def test_a_running_round_counts_what_waits_for_it() -> None:
    engine = GatedEngine(ToyEngine(max_batch_size=1))
    executor = Executor(engine, ExecutorConfig(max_queue_size=2))
    for i in range(2):
        executor.enqueue_request(Request([i], 1))
    thread = threading.Thread(target=executor.await_responses)
    thread.start()
    assert engine.waiting.wait(60)
    now = executor.latest_statistics()
    executor.enqueue_request(Request([2], 1))
    try:
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            executor.enqueue_request(Request([3], 1))
        assert (now.active_requests, now.queued_requests) == (1, 1)
        assert now.free_pages < now.total_pages
    finally:
        engine.open()
        thread.join()


@pytest.mark.parametrize("timeout", [1e10, 1e300, float("inf")])
def test_a_wait_without_end_waits(timeout: float) -> None:
    executor = Executor(ToyEngine())
    timer = threading.Timer(0.1, executor.enqueue_request, [Request([1], 1)])
    timer.start()
    (response,) = executor.await_responses(timeout)
    assert response.token_ids == decode([1], 1, 13)


def test_timeouts_that_are_none() -> None:
    executor = Executor(ToyEngine())
    assert executor.await_responses(-1.0) == executor.await_responses(float("-inf")) == []
    with pytest.raises(ValueError, match="timeout_seconds is NaN"):
        executor.await_responses(float("nan"))
