"""What the executor promises on the CPU engine at any temperature: a request's text depends
on nothing but itself, and is a sample of the target's own distribution."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from decoding import Answer
from engines import DEMO, DEMO_PROMPTS, DEMO_VOCAB
from request_mixes import CHAIN, PLAIN, tree
from steps import prefill
from trtree import _core
from trtree._core import sampler
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    OutputConfig,
    Request,
    SamplingConfig,
)
from trtree.runtime.tokenizer import Tokenizer

VOCAB = DEMO_VOCAB

Load = Callable[..., _core.Engine]


@pytest.fixture(scope="module")
def load(demo_engine: Callable[..., Path]) -> Load:
    @cache
    def loaded(page_size: int, kv_tokens: int, max_batch_size: int = 16) -> _core.Engine:
        path = demo_engine(
            backend="cpu",
            page_size=page_size,
            kv_tokens=kv_tokens,
            max_batch_size=max_batch_size,
            max_num_rows=256,
            max_seq_len=320,
        )
        return load_cpu_engine(EngineDir.open(path), num_threads=2)

    return loaded


def run(executor: Executor, requests: Sequence[Request]) -> list[Answer]:
    answers = {executor.enqueue_request(request): Answer() for request in requests}
    while responses := executor.await_responses():
        for response in responses:
            answers[response.request_id].add(response)
    return list(answers.values())


def prompts(count: int) -> list[list[int]]:
    """Token ids of the demo's own kind of text would do no better: any ids are a prompt.
    Many begin alike, so that the prefix cache has work."""
    rng = random.Random(5)
    shared = [[rng.randrange(VOCAB) for _ in range(90)] for _ in range(4)]
    return [
        rng.choice(shared)[: rng.randrange(90)] + [rng.randrange(VOCAB) for _ in range(1 + i % 20)]
        for i in range(count)
    ]


def random_requests(count: int) -> list[Request]:
    rng = random.Random(7)
    requests = []
    for index, prompt in enumerate(prompts(count)):
        greedy = index % 2 == 0
        sampling = SamplingConfig(
            temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 40]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            logit_bias=rng.choice([[], [(11, 4.0), (12, -100.0)]]),
            seed=index,
        )
        output = OutputConfig(rng.choice([-1, -1, 0, 3]), rng.choice([-1, -1, -1, 2]))
        requests.append(
            Request(
                prompt,
                max_tokens=rng.randrange(1, 48),
                stop_token_ids=[rng.randrange(VOCAB) for _ in range(30)],
                sampling=sampling if index % 4 else SamplingConfig(),
                speculative=rng.choice([PLAIN, CHAIN, tree(2), tree(16), tree(64)]),
                output=output,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(load: Load) -> list[list[object]]:
    """The answers of requests that run one after the other, without a prefix cache."""
    executor = Executor(load(16, 8192), ExecutorConfig(kv_cache_config=KvCacheConfig(False)))
    return [run(executor, [request])[0].figures() for request in random_requests(200)]


# The third pool holds a few requests at a time, so that most of the others are pre-empted.
@pytest.mark.parametrize(("page_size", "kv_tokens"), [(16, 8192), (1, 8192), (16, 640)])
def test_200_requests_at_once_answer_as_if_alone(
    load: Load, alone: list[list[object]], page_size: int, kv_tokens: int
) -> None:
    requests = random_requests(200)
    together = Executor(load(page_size, kv_tokens))
    cold = [answer.figures() for answer in run(together, requests)]
    warm = [answer.figures() for answer in run(together, requests)]
    assert cold == alone
    assert warm == alone
    statistics = together.latest_statistics()
    assert statistics.max_step_requests > 4
    assert statistics.cached_prompt_tokens > 0
    assert statistics.free_pages + statistics.cached_pages == statistics.total_pages
    if kv_tokens == 640:
        assert statistics.preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_a_seed_gives_one_text_in_every_mode(load: Load, temperature: float) -> None:
    executor = Executor(load(16, 8192))
    sampling = [
        SamplingConfig(temperature, top_p=0.95, repetition_penalty=1.1, seed=seed)
        for seed in range(6)
    ]
    prompt = prompts(1)[0]
    texts = [
        [a.token_ids for a in run(executor, [Request(prompt, 40, [], s, mode) for s in sampling])]
        for mode in (PLAIN, CHAIN, tree(4), tree(16), tree(64))
    ]
    assert all(text == texts[0] for text in texts)
    if temperature > 0:
        assert len(set(map(tuple, texts[0]))) == 6


def test_log_probs_are_those_of_plain_steps(load: Load) -> None:
    """Pitfall 23: accepted rows are not contiguous."""
    engine = load(16, 8192)
    prompt = prompts(3)[2]
    request = Request(prompt, 24, speculative=tree(16), output=OutputConfig(2, 1))
    (answer,) = run(Executor(engine), [request])
    assert answer.last and answer.last.statistics.accepted_tokens > 0
    at = _core.Sequence(99, 0, 0, list(range(20)))
    logits = prefill(engine, at, prompt + answer.token_ids)
    found = answer.prompt_log_probs + answer.log_probs
    for row, token in enumerate((prompt + answer.token_ids)[1:]):
        expected = sampler.log_probs(logits[row], token, 1 if row < len(prompt) - 1 else 2)
        assert (found[row].log_prob, found[row].top) == (expected.log_prob, expected.top)
    assert len(found) == len(prompt) + len(answer.token_ids) - 1


# Chi-square tests below fail by chance once in a million runs of this seed range; the
# seeds are fixed, so they pass or fail for good.
FALSE_ALARM = 1e-6
SAMPLES = 20_000
NUCLEUS = SamplingConfig(1.0, top_p=0.9)


def next_logits(engine: _core.Engine, tokens: list[int]) -> np.ndarray:
    """The target's logits after these tokens, by one plain prefill."""
    return prefill(engine, _core.Sequence(99, 0, 0, list(range(20))), tokens)[-1]


def exact_probabilities(
    engine: _core.Engine, prompt: list[int], length: int, least: float
) -> dict[tuple[int, ...], float]:
    """Every continuation of `length` tokens more probable than `least`, from plain logits."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for path, probability in found.items():
            logits = next_logits(engine, [*prompt, *path])
            counts = sampler.TokenCounts()
            for token, p in enumerate(sampler.distribution(logits, NUCLEUS, counts)):
                if probability * p > least:
                    longer[(*path, token)] = probability * p
        found = longer
    return found


def chi_square(
    samples: Sequence[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]
) -> float:
    """p-value of the samples, all continuations not listed taken as one; printed (pytest -rP)."""
    counts = dict.fromkeys(probabilities, 0)
    rest = 0
    for sample in samples:
        if sample in counts:
            counts[sample] += 1
        else:
            rest += 1
    expected = [p * len(samples) for p in probabilities.values()]
    left = len(samples) - sum(expected)
    observed = [*counts.values(), rest]
    result = stats.chisquare(observed, [*expected, left])
    print(
        f"{len(samples)} samples, {len(observed)} categories (the rest has "
        f"{100 * left / len(samples):.1f}%), "
        f"chi-square {result.statistic:.1f}, p {result.pvalue:.2g}"
    )
    return float(result.pvalue)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """The beginning of a question, which goes on in many ways that the drafter can guess."""
    question = DEMO_PROMPTS[0].removesuffix(" little violin.")
    return Tokenizer(DEMO / "target_nvfp4").encode(question)


@pytest.fixture(scope="module")
def probabilities(load: Load, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of the first three tokens; at least ten samples are expected of each."""
    return exact_probabilities(load(16, 8192), prompt, 3, 10 / SAMPLES)


def test_trees_sample_the_targets_distribution(
    load: Load, prompt: list[int], probabilities: dict[tuple[int, ...], float]
) -> None:
    executor = Executor(load(16, 8192, 64))
    samples, accepted = [], 0
    for first in range(0, SAMPLES, 1000):
        requests = [
            Request(prompt, 3, [], SamplingConfig(1.0, top_p=0.9, seed=seed), tree(6))
            for seed in range(first, first + 1000)
        ]
        for answer in run(executor, requests):
            samples.append(tuple(answer.token_ids))
            assert answer.last
            accepted += answer.last.statistics.accepted_tokens
    print(f"{accepted} draft tokens accepted")
    assert accepted > SAMPLES / 20  # the trees had a say
    assert len(probabilities) > 20
    assert chi_square(samples, probabilities) > FALSE_ALARM


def test_accepting_by_min_1_p_over_q_is_caught(load: Load, prompt: list[int]) -> None:
    """A planted bias: the drafter's first candidate accepted with min(1, p / q), the
    target's own distribution sampled otherwise."""
    engine = load(16, 8192)
    rng = np.random.default_rng(3)
    logits = next_logits(engine, prompt)
    first = np.array(sampler.distribution(logits, NUCLEUS, sampler.TokenCounts()))
    seconds = {}
    samples = []
    at = _core.Sequence(99, 0, len(prompt), list(range(20)))
    for token in rng.choice(VOCAB, SAMPLES, p=first):
        if token not in seconds:
            next_logits(engine, prompt)  # commits the prompt and the drafter's context
            draft = engine.draft([_core.DraftRequest(at, int(token))], 1)
            p = sampler.distribution(
                next_logits(engine, [*prompt, int(token)]), NUCLEUS, sampler.TokenCounts()
            )
            seconds[token] = (
                int(draft.token_ids.ravel()[0]),
                float(np.exp(draft.log_probs.ravel()[0])),
                np.array(p),
            )
        candidate, q, p = seconds[token]
        accept = rng.random() < min(1.0, p[candidate] / q)
        samples.append((int(token), candidate if accept else int(rng.choice(VOCAB, p=p))))
    exact = exact_probabilities(engine, prompt, 2, 10 / SAMPLES)
    assert chi_square(samples, exact) < FALSE_ALARM
