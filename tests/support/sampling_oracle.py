"""Every step of sampling in its most obvious form: full sorts, float64, one function each.

`STEPS` are the steps in order; a planted fault replaces one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from trtree.runtime.executor import SamplingConfig

Floats = NDArray[np.float64]


@dataclass
class Draw:
    """Of one row: logits float32 as steps 1 to 3 leave them, then what is still in."""

    config: SamplingConfig
    prompt: list[int]
    output: list[int]
    logits: NDArray[np.float32]
    probs: Floats = field(default_factory=lambda: np.empty(0))
    # How close a token came to staying, or to being cut; too close means rounding decides.
    margin: float = 1.0

    def ranking(self) -> NDArray[np.intp]:
        """Token ids by decreasing logit, equal ones by id."""
        return np.argsort(-self.logits, kind="stable")

    def restrict(self, keep: NDArray[np.bool_]) -> None:
        self.probs = np.where(keep, self.probs, 0.0)
        self.probs /= self.probs.sum()


def logit_bias(d: Draw) -> None:
    for token, bias in d.config.logit_bias:
        d.logits[token] += np.float32(bias)


def repetition_penalty(d: Draw) -> None:
    penalty = np.float32(d.config.repetition_penalty)
    for token in {*d.prompt, *d.output}:
        positive = d.logits[token] > 0
        d.logits[token] = d.logits[token] / penalty if positive else d.logits[token] * penalty


def presence_and_frequency(d: Draw) -> None:
    presence, frequency = np.float32(d.config.presence_penalty), d.config.frequency_penalty
    for token in set(d.output):
        times = np.float32(d.output.count(token))
        d.logits[token] -= presence + times * np.float32(frequency)


def temperature(d: Draw) -> None:
    if d.config.temperature == 0:
        d.probs = np.zeros(len(d.logits))
        d.probs[np.flatnonzero(d.logits == d.logits.max())[0]] = 1.0
        return
    exponents = (d.logits.astype(np.float64) - float(d.logits.max())) / d.config.temperature
    d.probs = np.exp(exponents)
    d.probs /= d.probs.sum()


def top_k(d: Draw) -> None:
    k = d.config.top_k or len(d.logits)
    d.restrict(np.isin(np.arange(len(d.logits)), d.ranking()[:k]))


def top_p(d: Draw) -> None:
    if d.config.top_p == 1:
        return
    ranking = d.ranking()
    before = np.concatenate([[0.0], np.cumsum(d.probs[ranking])[:-1]])
    d.margin = min(d.margin, float(np.abs(before - d.config.top_p).min()))
    d.restrict(np.isin(np.arange(len(d.logits)), ranking[before < d.config.top_p]))


def min_p(d: Draw) -> None:
    if d.config.min_p == 0:
        return
    ratio = d.probs / d.probs.max()
    d.margin = min(d.margin, float(np.abs(ratio[ratio < 1] - d.config.min_p).min(initial=1.0)))
    d.restrict(ratio >= d.config.min_p)


Step = Callable[[Draw], None]
STEPS: list[Step] = [
    logit_bias,
    repetition_penalty,
    presence_and_frequency,
    temperature,
    top_k,
    top_p,
    min_p,
]


def probabilities(
    logits: NDArray[np.float32],
    config: SamplingConfig,
    prompt: list[int],
    output: list[int],
    steps: list[Step] = STEPS,
) -> tuple[Floats, float]:
    """[vocab], and the least margin by which any token stayed or was cut."""
    draw = Draw(config, prompt, output, logits.copy())
    with np.errstate(over="ignore"):
        for step in steps:
            step(draw)
    return draw.probs, draw.margin


def chi_square_p_value(counts: NDArray[np.int64], expected: Floats) -> float:
    """How often draws of these probabilities look at least this wrong.

    counts, expected probabilities: [tokens]. Tokens expected less than 5 times count as
    one (Cochran's rule). 0 where a token of probability 0 was drawn.
    """
    if counts[expected == 0].any():
        return 0.0
    times = expected * counts.sum()
    rare = times < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(times[~rare], times[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half)) if len(wanted) > 1 else 1.0
