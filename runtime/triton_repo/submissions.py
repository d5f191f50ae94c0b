"""What both layouts ask of the service: sampling and speculation from input tensors."""

from collections.abc import Mapping, Sequence

from trtree.runtime.executor import (
    BudgetPolicy,
    DecodingMode,
    OutputConfig,
    Request,
    SamplingConfig,
    SpeculativeConfig,
    TreeKind,
)
from trtree.runtime.service import Service, Submission, choice_seeds
from trtree.runtime.triton_repo.inputs import InputError, Inputs
from trtree.runtime.triton_repo.model_config import Tensor

MAX_OUTPUTS = 128  # of one request
# What a request may say of its own speculation; the same names in every model.
SPECULATION = (
    Tensor("speculative_mode", "TYPE_STRING", optional=True),
    Tensor("speculative_tree", "TYPE_STRING", optional=True),
    Tensor("speculative_tree_budget", "TYPE_INT32", optional=True),
    Tensor("speculative_top_k", "TYPE_INT32", optional=True),
    Tensor("speculative_policy", "TYPE_STRING", optional=True),
)
_ENUMS = {"mode": DecodingMode, "tree": TreeKind, "policy": BudgetPolicy}
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def submissions(
    service: Service,
    inputs: Inputs,
    prompt: list[int],
    max_tokens: int,
    *,
    names: Mapping[str, str],
    count: int,
    stop: Sequence[str],
    stop_token_ids: list[int],
    log_probs: bool,
    echo: str | None = None,
    logit_bias: Sequence[tuple[int, float]] = (),
    defaults: Mapping[str, str | int] | None = None,
) -> list[Submission]:
    """``count`` outputs of a prompt.

    Args:
        names: the input tensor of each sampling parameter, and of ``seed``.
        defaults: what requests that say nothing draft, as in ``speculation``.

    Raises:
        InputError: a parameter is out of range.
    """
    if not 1 <= count <= MAX_OUTPUTS:
        raise InputError(f"{names['n']} {count} is not between 1 and {MAX_OUTPUTS}")
    if "" in stop:
        raise InputError("a stop string is empty")
    values = service.sampling_defaults()
    for name in _SAMPLING:
        given = inputs.value(names[name]) if name in names else None
        if given is not None:
            values[name] = given
    seed = inputs.value(names["seed"])
    greedy = values["temperature"] == 0
    if greedy:  # these change nothing
        values = {n: v for n, v in values.items() if n not in ("top_k", "top_p", "min_p")}
    speculative = speculation(service, inputs, defaults or {})
    return [
        Submission(
            Request(
                prompt,
                max_tokens,
                stop_token_ids,
                SamplingConfig(
                    **values | {"top_k": int(values.get("top_k", 0))},
                    logit_bias=list(logit_bias),
                    seed=0 if greedy else choice_seed,
                ),
                speculative,
                OutputConfig(0 if log_probs else -1),
            ),
            stop,
            echo,
        )
        for choice_seed in choice_seeds(seed, count)
    ]


def speculation(
    service: Service, inputs: Inputs, defaults: Mapping[str, str | int]
) -> SpeculativeConfig:
    """The request's own speculation, over the model's parameters, over the engine's.

    Raises:
        InputError: a name that is none.
    """
    values = dict(defaults)
    for name in ("mode", "tree", "policy"):
        if (text := inputs.text(f"speculative_{name}")) is not None:
            values[name] = text
    for name in ("tree_budget", "top_k"):
        if (number := inputs.value(f"speculative_{name}")) is not None:
            values[name] = number
    for name, kind in _ENUMS.items():
        known = [member.name.lower() for member in kind]
        if name in values and values[name] not in known:
            allowed = ", ".join(known)
            raise InputError(f"speculative_{name} {values[name]!r:.80} is none of {allowed}")
    return service.speculative_config(**values)  # type: ignore[arg-type]


def positive(inputs: Inputs, name: str, other: str | None = None) -> int | None:
    """A count of at least 1, by either of its names."""
    value = inputs.value(name)
    if value is None and other is not None:
        name, value = other, inputs.value(other)
    if value is not None and value < 1:
        raise InputError(f"{name} must be at least 1, not {value}")
    return None if value is None else int(value)
