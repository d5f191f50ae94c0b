"""The sampler against oracles: the steps written out, transformers' processors, chi-square."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sampling_oracle as oracle
from trtree._core import sampler
from trtree.runtime.executor import SamplingConfig

VOCAB = 151_936
Logits = NDArray[np.float32]
# A draw this improbable under the right distribution is called wrong. With some 30 tests
# of fixed seeds the suite as a whole cries wolf for 3 choices of seeds in 100,000.
FALSE_ALARM = 1e-6


def counts_of(prompt: list[int], output: list[int]) -> sampler.TokenCounts:
    counts = sampler.TokenCounts(prompt)
    for token in output:
        counts.add(token)
    return counts


def drawn(logits: Logits, config: SamplingConfig, draws: int) -> NDArray[np.int64]:
    """How often each token was drawn at `draws` positions."""
    choices = sampler.choose_at(logits, config, sampler.TokenCounts(), list(range(draws)))
    return np.bincount(choices, minlength=len(logits))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Logits, SamplingConfig, list[int], list[int]]:
    """A row with exact ties and forbidden tokens, any configuration, a prompt and an output."""
    vocab = draw(st.sampled_from([1, 2, 3, 7, 63, 64, 65, 130]))
    quarter = st.integers(-20, 20).map(lambda n: n / 4)
    values = st.one_of(quarter, st.sampled_from([0.0, -0.0, 5.0, -math.inf]))
    logits = np.array(draw(st.lists(values, min_size=vocab, max_size=vocab)), np.float32)
    logits[draw(st.integers(0, vocab - 1))] = 5.0
    token = st.integers(0, vocab - 1)
    config = SamplingConfig(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.7, 100.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 64, 1000])),
        top_p=draw(st.sampled_from([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 0.9999999])),
        min_p=draw(st.sampled_from([0.0, 1e-7, 0.05, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 2.0, -0.3])),
        logit_bias=draw(
            st.lists(st.tuples(token, st.sampled_from([-100.0, 0.25, 4.0])), max_size=3)
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    tokens = st.lists(token, max_size=6)
    return logits, config, draw(tokens), draw(tokens)


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 2**40))
def test_any_configuration_is_what_the_steps_say(
    case: tuple[Logits, SamplingConfig, list[int], list[int]], position: int
) -> None:
    logits, config, prompt, output = case
    expected, margin = oracle.probabilities(logits, config, prompt, output)
    assume(margin > 1e-9)
    counts = counts_of(prompt, output)
    probs = np.array(sampler.distribution(logits, config, counts))
    assert np.array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, rtol=1e-12)

    choice = sampler.choose(logits, config, counts, position)
    u = sampler.uniform(config.seed, position) if config.temperature > 0 else 0.0
    ends = np.cumsum(expected)
    assert ends[choice] - expected[choice] <= u + 1e-12
    assert u <= ends[choice] + 1e-12
    assert expected[choice] > 0


# Each changes one step as an implementation might get it wrong.
def bias_after_penalties(d: oracle.Draw) -> None:
    oracle.presence_and_frequency(d)
    oracle.logit_bias(d)


def repetition_in_the_output_only(d: oracle.Draw) -> None:
    oracle.repetition_penalty(oracle.Draw(d.config, [], d.output, d.logits))


def repetition_always_divides(d: oracle.Draw) -> None:
    for token in {*d.prompt, *d.output}:
        d.logits[token] /= np.float32(d.config.repetition_penalty)


def repetition_once_a_time(d: oracle.Draw) -> None:
    for token in [*d.prompt, *d.output]:
        oracle.repetition_penalty(oracle.Draw(d.config, [token], [], d.logits))


def presence_of_the_prompt(d: oracle.Draw) -> None:
    oracle.presence_and_frequency(oracle.Draw(d.config, [], d.prompt + d.output, d.logits))


def presence_each_time(d: oracle.Draw) -> None:
    for token in d.output:
        oracle.presence_and_frequency(oracle.Draw(d.config, [], [token], d.logits))


def top_k_with_ties(d: oracle.Draw) -> None:
    k = d.config.top_k or len(d.logits)
    d.restrict(d.logits >= np.sort(d.logits)[::-1][min(k, len(d.logits)) - 1])


def top_p_without_the_crossing_token(d: oracle.Draw) -> None:
    ranking = d.ranking()
    upto = np.cumsum(d.probs[ranking])
    keep = (upto < d.config.top_p) | (np.arange(len(upto)) == 0)
    d.restrict(np.isin(np.arange(len(d.logits)), ranking[keep]))


def min_p_of_all_the_weight(d: oracle.Draw) -> None:
    keep = d.probs >= d.config.min_p
    d.restrict(keep if keep.any() else d.probs == d.probs.max())


def temperature_after_filters(d: oracle.Draw) -> None:
    oracle.min_p(d)
    tempered = np.where(d.probs > 0, d.probs, np.nan) ** (1 / max(d.config.temperature, 1e-3))
    d.probs = np.nan_to_num(tempered / np.nansum(tempered))


def nothing(_: oracle.Draw) -> None:
    pass


def unit_temperature(d: oracle.Draw) -> None:
    one = SamplingConfig(temperature=1.0)
    plain = oracle.Draw(one, [], [], d.logits)
    oracle.temperature(plain)
    d.probs = plain.probs


Faulty = dict[oracle.Step, oracle.Step]
FAULTS: dict[str, tuple[Faulty, dict[str, Any]]] = {
    "bias last": (
        {oracle.logit_bias: nothing, oracle.presence_and_frequency: bias_after_penalties},
        {"logit_bias": [(1, 0.25), (6, 2.0)]},
    ),
    "repetition: output only": ({oracle.repetition_penalty: repetition_in_the_output_only}, {}),
    "repetition: negative too": ({oracle.repetition_penalty: repetition_always_divides}, {}),
    "repetition: once a time": ({oracle.repetition_penalty: repetition_once_a_time}, {}),
    "presence: prompt too": ({oracle.presence_and_frequency: presence_of_the_prompt}, {}),
    "presence: each time": ({oracle.presence_and_frequency: presence_each_time}, {}),
    "temperature last": (
        {oracle.temperature: unit_temperature, oracle.min_p: temperature_after_filters},
        {"min_p": 0.2},
    ),
    "top-k keeps ties": ({oracle.top_k: top_k_with_ties}, {"top_k": 2}),
    "top-p drops the crossing token": (
        {oracle.top_p: top_p_without_the_crossing_token},
        {"top_p": 0.8},
    ),
    "min-p of the whole": ({oracle.min_p: min_p_of_all_the_weight}, {"min_p": 0.2}),
    "min-p before top-p": (
        {oracle.top_p: oracle.min_p, oracle.min_p: oracle.top_p},
        {"top_p": 0.7, "min_p": 0.3},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_gone_wrong_is_noticed(fault: str) -> None:
    faulty_steps, settings = FAULTS[fault]
    logits = np.array([2.0, 1.5, 1.0, 1.0, 0.5, 0.25, -0.5, -1.0], np.float32)
    prompt, output = [0, 6, 6], [1, 1, 7]
    config = SamplingConfig(
        temperature=0.6,
        repetition_penalty=1.25,
        presence_penalty=0.125,
        frequency_penalty=0.25,
        **settings,
    )
    expected, margin = oracle.probabilities(logits, config, prompt, output)
    assert margin > 1e-9
    probs = sampler.distribution(logits, config, counts_of(prompt, output))
    np.testing.assert_allclose(probs, expected, rtol=1e-12)
    steps = [faulty_steps.get(step, step) for step in oracle.STEPS]
    faulty, _ = oracle.probabilities(logits, config, prompt, output, steps)
    assert np.abs(faulty - expected).max() > 1e-3


@pytest.mark.parametrize("vocab", [100, VOCAB])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.5, "top_p": 0.99},
        {"repetition_penalty": 1.2, "top_k": 20},
    ],
)
def test_transformers_processors_agree(vocab: int, settings: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, vocab).astype(np.float32)
    prompt = rng.integers(0, vocab, 30).tolist()
    config = SamplingConfig(**{"temperature": 0.8, **settings})
    processors = LogitsProcessorList()
    if config.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        processors.append(MinPLogitsWarper(config.min_p))
    scores = processors(torch.tensor([prompt]), torch.tensor(logits).double()[None])
    expected = torch.softmax(scores[0], 0).numpy()
    probs = np.array(sampler.distribution(logits, config, counts_of(prompt, [])))
    assert np.array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, rtol=1e-5)  # penalties round to float32 here


@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_a_nucleus_of_thousands_ends_where_it_should(top_p: float, spread: float) -> None:
    logits = np.random.default_rng(8).normal(0, spread, 5000).astype(np.float32)
    config = SamplingConfig(temperature=1.3, top_p=top_p)
    expected, margin = oracle.probabilities(logits, config, [], [])
    assert margin > 1e-9
    probs = np.array(sampler.distribution(logits, config, sampler.TokenCounts()))
    assert np.array_equal(probs > 0, expected > 0)


def test_ties_go_to_lower_ids_and_one_token_always_stays() -> None:
    level = np.zeros(200, np.float32)
    counts = sampler.TokenCounts()

    def kept(**settings: float) -> list[int]:
        config = SamplingConfig(temperature=1.0, **settings)
        return np.flatnonzero(sampler.distribution(level, config, counts)).tolist()

    assert kept(top_k=3) == [0, 1, 2]
    assert kept(top_p=0.5) == list(range(100))
    assert kept(top_p=0.5, top_k=8) == [0, 1, 2, 3]
    assert kept(top_p=1e-30) == [0]
    assert len(kept(min_p=1.0)) == 200
    level[70] = 1.0
    assert kept(min_p=1.0) == [70]
    assert kept(top_k=2) == [0, 70]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_temperature_zero_is_the_lowest_of_the_largest(vocab: int) -> None:
    logits = np.full(vocab, -1.0, np.float32)
    greedy = SamplingConfig()
    assert sampler.choose(logits, greedy, sampler.TokenCounts(), 5) == 0
    logits[[vocab // 2, vocab - 1]] = 2.0
    assert sampler.choose(logits, greedy, sampler.TokenCounts(), 5) == vocab // 2
    penalized = SamplingConfig(frequency_penalty=0.5, logit_bias=[(0, 0.25)])
    if vocab > 1:
        counts = counts_of([], [vocab // 2])
        assert sampler.choose(logits, penalized, counts, 5) == vocab - 1


def test_a_temperature_near_zero_is_greedy_and_a_high_one_is_flat() -> None:
    logits = np.array([1.0, 3.0, 3.0 - 1e-3, -math.inf], np.float32)
    cold = SamplingConfig(temperature=1e-40)
    assert sampler.distribution(logits, cold, sampler.TokenCounts()) == [0, 1, 0, 0]
    hot = sampler.distribution(logits, SamplingConfig(temperature=100.0), sampler.TokenCounts())
    assert hot[3] == 0
    assert max(hot) / min(hot[:3]) < 1.03


def peaked(vocab: int, scale: float = 3.0) -> Logits:
    return np.random.default_rng(0).normal(0, scale, vocab).astype(np.float32)


@pytest.mark.parametrize("vocab", [12, 3000])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.5}]
)
def test_draws_follow_the_distribution(vocab: int, settings: dict[str, float]) -> None:
    logits = peaked(vocab)
    config = SamplingConfig(**{"temperature": 1.0, "seed": 11, **settings})
    counts = drawn(logits, config, 20_000)
    expected, _ = oracle.probabilities(logits, config, [], [])
    assert oracle.chi_square_p_value(counts, expected) > FALSE_ALARM


def test_draws_of_other_distributions_are_told_apart() -> None:
    """The power of the test above: small biases, as acceptance by min(1, p/q) has them."""
    logits = peaked(12)
    config = SamplingConfig(temperature=1.0, seed=11)
    expected, _ = oracle.probabilities(logits, config, [], [])

    def p_value(**settings: float) -> float:
        biased = SamplingConfig(**{"temperature": 1.0, "seed": 11, **settings})
        return oracle.chi_square_p_value(drawn(logits, biased, 20_000), expected)

    assert p_value() > FALSE_ALARM
    assert p_value(temperature=1.05) < FALSE_ALARM
    assert p_value(top_p=0.99) < FALSE_ALARM
    assert p_value(logit_bias=[(int(np.argmax(logits)), 0.1)]) < FALSE_ALARM


def test_draws_at_neighbouring_positions_and_seeds_are_independent() -> None:
    pairs: list[tuple[Callable[[int], float], Callable[[int], float]]] = [
        (lambda i: sampler.uniform(5, 2 * i), lambda i: sampler.uniform(5, 2 * i + 1)),
        (lambda i: sampler.uniform(2 * i, 7), lambda i: sampler.uniform(2 * i + 1, 7)),
        (lambda i: sampler.uniform(i, 0), lambda i: sampler.uniform(i << 32, 0)),
        (lambda i: sampler.uniform(i, 1), lambda i: sampler.uniform(1, i)),
    ]
    for first, second in pairs:
        cells = [int(8 * first(i)) * 8 + int(8 * second(i)) for i in range(2, 20_002)]
        counts = np.bincount(cells, minlength=64)
        assert oracle.chi_square_p_value(counts, np.full(64, 1 / 64)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The vectors its authors publish with Random123."""
    assert list(sampler.philox4x32(counter, key)) == expected


def test_uniform_is_53_bits_of_philox() -> None:
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A8
    counter = [position & 0xFFFFFFFF, position >> 32, 0, 0]
    low, high, *_ = sampler.philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])
    assert sampler.uniform(seed, position) == ((high << 32 | low) >> 11) / 2**53


def test_counts_can_be_taken_back() -> None:
    logits = peaked(40)
    config = SamplingConfig(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
    )
    counts = counts_of([3, 4], [4, 5, 5])
    before = sampler.distribution(logits, config, counts)
    for token in (5, 3, 9):
        counts.add(token)
    extended = sampler.distribution(logits, config, counts)
    assert extended == sampler.distribution(logits, config, counts_of([3, 4], [4, 5, 5, 5, 3, 9]))
    assert extended != before
    for token in (9, 3, 5):
        counts.take_back(token)
    assert sampler.distribution(logits, config, counts) == before


def test_every_kernel_gives_the_same_weights() -> None:
    rng = np.random.default_rng(1)
    logits = np.concatenate([rng.normal(0, 4, 1000), -rng.random(1000) * 900, [-math.inf, 9.5]])
    logits = np.ascontiguousarray(logits, np.float32)
    (_, weights, sums), *others = sampler.exp_weights(logits, 9.5, 1 / 0.7)
    for name, *other in others:
        assert other == [weights, sums], name
    x = (logits.astype(np.longdouble) - np.longdouble(9.5)) * np.longdouble(1 / 0.7)
    expected = np.where(x >= -708, np.exp(x), 0)
    # The exponent itself is rounded once: half an ulp of x is |x| / 2^53 of its exp.
    error = np.abs(np.array(weights) - expected)
    assert (error <= expected * (np.clip(-x, 1, 708) / 2**53 + 2 / 2**52)).all()
    assert weights[-1] == 1.0
    assert weights[-2] == 0.0
    chunks = [sum(weights[i : i + 64]) for i in range(0, len(weights), 64)]
    np.testing.assert_allclose(sums, chunks, rtol=1e-14)


@pytest.mark.parametrize("vocab", [2, 65, VOCAB])
def test_log_probs_are_those_of_the_untouched_logits(vocab: int) -> None:
    logits = peaked(vocab, 8.0)
    logits[vocab // 2] = logits[0]
    expected = torch.log_softmax(torch.tensor(logits).double(), 0).numpy()
    ranking = np.argsort(-logits, kind="stable")
    for token in {0, vocab // 2, int(ranking[0]), int(ranking[-1])}:
        result = sampler.log_probs(logits, token, 20)
        assert result.log_prob == np.float32(expected[token])
        assert ranking[result.rank] == token
        assert [id for id, _ in result.top] == ranking[:20].tolist()
        np.testing.assert_array_equal(
            np.float32([log_prob for _, log_prob in result.top]),
            expected[ranking[:20]].astype(np.float32),
        )
    assert sampler.log_probs(logits, 0, 0).top == []


def test_forbidden_tokens_are_no_alternatives() -> None:
    logits = np.array([-math.inf, 1.0, -math.inf, 1.0], np.float32)
    result = sampler.log_probs(logits, 2, 4)
    assert result.log_prob == -math.inf
    assert result.rank == 3
    assert result.top == [(1, np.float32(-math.log(2))), (3, np.float32(-math.log(2)))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflowing_row_is_an_error_that_names_the_token(
    bad: float, temperature: float
) -> None:
    logits = np.zeros(100, np.float32)
    logits[77] = bad
    config = SamplingConfig(temperature=temperature)
    for call in (
        lambda: sampler.choose(logits, config, sampler.TokenCounts(), 0),
        lambda: sampler.distribution(logits, config, sampler.TokenCounts()),
        lambda: sampler.log_probs(logits, 0, 1),
    ):
        with pytest.raises(RuntimeError, match=r"token 77: (NaN|\+inf)"):
            call()


def test_a_row_that_forbids_everything_is_an_error() -> None:
    logits = np.full(70, -math.inf, np.float32)
    with pytest.raises(RuntimeError, match="every token has logit -inf"):
        sampler.choose(logits, SamplingConfig(temperature=1.0), sampler.TokenCounts(), 0)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [-0.1, 101, math.nan, math.inf], [0, 100]),
        ("top_k", [-1], [0, 10**6]),
        ("top_p", [0, -1, 1.5, math.nan], [1e-9, 1]),
        ("min_p", [-0.1, 1.1, math.nan], [0, 1]),
        ("repetition_penalty", [0, -1, math.inf, math.nan], [0.01, 100]),
        ("presence_penalty", [-2.1, 2.1, math.nan], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1, math.inf], [-2, 2]),
        ("logit_bias", [[(3, 101)], [(3, math.nan)], [(3, -math.inf)]], [[(99, -100)]]),
        ("logit_bias", [[(100, 1)], [(-1, 1)]], [[]]),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    name: str, values: list[object], allowed: list[object]
) -> None:
    for value in values:
        config = SamplingConfig()
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name) as error:
            sampler.check_sampling(config, 100)
        number = value[0][1] if isinstance(value, list) else value
        if "vocabulary" not in str(error.value):
            assert f"not {number:g}" in str(error.value)
    for value in allowed:
        config = SamplingConfig()
        setattr(config, name, value)
        sampler.check_sampling(config, 100)
