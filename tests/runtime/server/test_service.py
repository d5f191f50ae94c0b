"""The service below HTTP: text, routing, failure; on engines that are quick to reason about."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toy_engine import ToyEngine, decode
from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.executor import DecodingMode, Executor, ExecutorConfig, QueueFullError, Request
from trtree.runtime.executor import SpeculativeConfig as Speculative
from trtree.runtime.output_text import OutputText, StopStrings
from trtree.runtime.service import (
    Chunk,
    Finish,
    Finished,
    Service,
    ServiceUnavailableError,
    Submission,
    choice_seeds,
)
from trtree.runtime.session import RequestError, Session
from trtree.runtime.tokenizer import Tokenizer
from wrapped_engine import FailingEngine, GatedEngine

VOCAB = 300
UNKNOWN = decode([7, 7], 20, VOCAB)[10]


@pytest.fixture
def serve(demo_engine: Callable[..., Path]) -> Iterator[Callable[..., Service]]:
    services = []

    def start(*engines: _core.Engine, max_queue_size: int = 0) -> Service:
        config = ExecutorConfig(max_queue_size=max_queue_size)
        executors = [Executor(engine, config) for engine in engines]
        services.append(Service(EngineDir.open(demo_engine()), executors))
        return services[-1]

    yield start
    for service in services:
        service.close()


def run(service: Service, submissions: Sequence[Submission]) -> list[tuple[str, list[int], Finish]]:
    """Submit together; each one's text, tokens and end."""
    queues: list[queue.SimpleQueue[Chunk]] = [queue.SimpleQueue() for _ in submissions]
    for submission, chunks in zip(submissions, queues, strict=True):
        service.submit(submission, chunks.put)
    return [_result(chunks) for chunks in queues]


def _result(chunks: "queue.SimpleQueue[Chunk]") -> tuple[str, list[int], Finish]:
    text, token_ids = "", []
    while True:
        chunk = chunks.get(timeout=60)
        text += chunk.text
        token_ids += chunk.token_ids
        if chunk.finish is not None:
            return text, token_ids, chunk.finish


def request(prompt: Sequence[int], max_tokens: int = 20, **more: object) -> Request:
    more.setdefault("speculative", Speculative(DecodingMode.TREE, tree_budget=12))
    return Request(list(prompt), max_tokens, **more)


def test_executors_share_the_load(serve: Callable[..., Service]) -> None:
    engines = [ToyEngine(vocab=VOCAB), ToyEngine(vocab=VOCAB)]
    service = serve(*engines)
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    results = run(service, [Submission(request(prompt)) for prompt in prompts])
    for prompt, (text, token_ids, finish) in zip(prompts, results, strict=True):
        assert token_ids == decode(prompt, 20, VOCAB)
        assert text == service.tokenizer.decode(token_ids)
        assert (finish.reason, finish.usage.completion_tokens) == ("length", 20)
    finished = [s.target_forwards for s in service.statistics().values()]
    assert len(finished) == 2
    assert min(finished) > 0
    assert service.open_requests == 0


def test_a_failing_engine_ends_its_requests(serve: Callable[..., Service]) -> None:
    service = serve(FailingEngine(ToyEngine(vocab=VOCAB), "step", 3))
    told: list[Finished] = []
    service.observers.append(told.append)
    results = run(service, [Submission(request([i, 5])) for i in range(3)])
    for _, _, finish in results:
        assert finish.reason == "error"
        assert finish.error == "the engine failed: step failed"
    assert service.failure == "the engine failed: step failed"
    with pytest.raises(ServiceUnavailableError, match="step failed"):
        service.submit(Submission(request([1])), print)
    assert service.open_requests == 0
    assert [finished.finish.reason for finished in told] == ["error"] * 3


def test_refusals(serve: Callable[..., Service]) -> None:
    engine = GatedEngine(ToyEngine(vocab=VOCAB, max_batch_size=1))
    service = serve(engine, max_queue_size=2)
    try:
        with pytest.raises(RequestError, match="vocabulary has 300"):
            service.submit(Submission(request([VOCAB])), print)
        chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        handles = [service.submit(Submission(request([1])), chunks.put)]
        assert engine.waiting.wait(60)  # the first one runs
        with pytest.raises(QueueFullError, match="max_queue_size is 2"):
            for _ in range(4):  # one runs, two wait
                handles.append(service.submit(Submission(request([1])), chunks.put))
        service.drain()
        with pytest.raises(ServiceUnavailableError, match="shutting down"):
            service.submit(Submission(request([1])), print)
        for handle in handles:
            handle.cancel()
            handle.cancel()  # no harm
        # What a step says is told behind the cancellations, so they are known by then.
        engine.allow()
        assert chunks.get(timeout=60).finish is None
    finally:
        engine.open()
    reasons = []
    while len(reasons) < len(handles):
        if (finish := chunks.get(timeout=60).finish) is not None:
            reasons.append(finish.reason)
    assert set(reasons) == {"cancelled"}


def test_a_callers_error_is_its_own(serve: Callable[..., Service]) -> None:
    service = serve(ToyEngine(vocab=VOCAB))
    called = []

    def broken(chunk: Chunk) -> None:
        called.append(chunk)
        raise ValueError("the caller has gone")

    service.submit(Submission(request([1, 2])), broken)
    ((_, token_ids, _),) = run(service, [Submission(request([3, 4]))])
    assert token_ids == decode([3, 4], 20, VOCAB)
    assert [chunk.finish and chunk.finish.reason for chunk in called] == [None, "error"]
    assert service.open_requests == 0


class FailingTokenizer(Tokenizer):
    """Knows one token less than the model."""

    def decode(self, token_ids: list[int]) -> str:
        if UNKNOWN in token_ids:
            raise KeyError(UNKNOWN)
        return super().decode(token_ids)


def test_an_output_without_text_ends_with_an_error(serve: Callable[..., Service]) -> None:
    """Its caller would wait for ever."""
    service = serve(ToyEngine(vocab=VOCAB))
    service.tokenizer = FailingTokenizer(service.engine_dir.tokenizer_path)
    (other,) = [p for p in range(9) if UNKNOWN not in decode([p], 20, VOCAB)][:1]
    results = run(service, [Submission(request([7, 7])), Submission(request([other]))])
    assert [finish.reason for _, _, finish in results] == ["error", "length"]
    assert results[0][2].error == "the output could not be written as text"
    assert service.open_requests == 0


@pytest.mark.parametrize("mode", [DecodingMode.PLAIN, DecodingMode.CHAIN, DecodingMode.TREE])
def test_stop_strings_cut_at_the_same_token_in_every_mode(
    serve: Callable[..., Service], mode: DecodingMode
) -> None:
    service = serve(ToyEngine(vocab=VOCAB, skill=8))
    tokens = decode([9, 8], 40, VOCAB)
    whole = service.tokenizer.decode(tokens)
    stop = whole[30:33]
    at = whole.index(stop)
    used = next(i for i in range(41) if stop in service.tokenizer.decode(tokens[:i]))
    asked = request([9, 8], 40, speculative=Speculative(mode, tree_budget=12))
    ((text, token_ids, finish),) = run(service, [Submission(asked, (stop,))])
    assert text == whole[:at]
    assert token_ids == tokens[:used]
    assert (finish.reason, finish.stop) == ("stop", stop)
    assert finish.usage.completion_tokens == used


def test_close_ends_everything(serve: Callable[..., Service]) -> None:
    service = serve(ToyEngine(vocab=VOCAB))
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    service.submit(Submission(request([1, 2], 1500)), chunks.put)
    service.close()
    _, _, finish = _result(chunks)
    assert finish.reason == "cancelled"
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"executor0", "text"}


def test_choice_seeds() -> None:
    seeds = choice_seeds(7, 4)
    assert seeds == choice_seeds(7, 4)
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert choice_seeds(7, 2) == seeds[:2]
    assert not set(choice_seeds(8, 4)) & set(seeds)
    assert choice_seeds(None, 1) != choice_seeds(None, 1)
    assert all(0 <= seed < 2**64 for seed in choice_seeds(2**64 - 1, 9))


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    """The stop string that is complete first, wherever the pieces end."""
    ends = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    matcher, seen = StopStrings(stops), ""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(bounds):
        certain, stop = matcher.push(text[start:end])
        seen += certain
        assert expected[0].startswith(seen)
        if stop is not None:
            break
    else:
        seen, stop = seen + matcher.finish(), None
    assert (seen, stop) == expected


@pytest.mark.parametrize("step", [1, 3])
def test_offsets_are_where_each_tokens_text_begins(
    demo_session: Callable[..., Session], step: int
) -> None:
    tokenizer = demo_session().tokenizer
    token_ids = tokenizer.encode("naïve café — 日本 of the License")
    output = OutputText(tokenizer, (), offsets=True)
    text, offsets = "", []
    for i in range(0, len(token_ids), step):
        piece = output.push(token_ids[i : i + step])
        text, offsets = text + piece.text, offsets + piece.offsets
    text += output.finish()[0]
    assert text == tokenizer.decode(token_ids)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token_id, offset in zip(token_ids, offsets, strict=True):
        own = tokenizer.decode([token_id])
        if "\ufffd" not in own:
            assert text[offset:].startswith(own)
