"""What a request of the API asks of the service."""

from collections.abc import Mapping, Sequence
from typing import cast

from trtree.runtime.chat_template import ChatTemplate
from trtree.runtime.cli import INT32_MAX
from trtree.runtime.executor import OutputConfig, Request, SamplingConfig, SpeculativeConfig
from trtree.runtime.server.errors import ApiError
from trtree.runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Speculative,
)
from trtree.runtime.service import Service, Submission, choice_seeds

MAX_OUTPUTS = 1024  # of one request: prompts times n


def completion_submissions(
    service: Service, body: CompletionRequest, speculative: Speculative
) -> list[Submission]:
    """``n`` outputs for each prompt, in the order of the answer's choices.

    Raises:
        ApiError: a parameter, or several together, that make no sense.
    """
    if body.best_of is not None and body.best_of != body.n:
        raise ApiError(
            400, f"best_of {body.best_of} is not supported; leave it out, or n", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens 0 leaves nothing to answer without echo", param="max_tokens"
        )
    prompts = _prompts(body)
    if len(prompts) * body.n > MAX_OUTPUTS:
        raise ApiError(
            400,
            f"{len(prompts)} prompts times n {body.n} are more than {MAX_OUTPUTS} outputs; "
            "send several requests",
            param="prompt",
        )
    wanted = -1 if body.logprobs is None else body.logprobs
    output = OutputConfig(wanted, wanted if body.echo else -1)
    submissions = []
    for prompt in prompts:
        ids = _encode(service, prompt) if isinstance(prompt, str) else prompt
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else service.tokenizer.decode(ids)
        submissions += [
            Submission(request, body.stops, echo, body.max_tokens == 0)
            for request in _requests(service, body, ids, body.max_tokens or 1, output, speculative)
        ]
    return submissions


def chat_submissions(
    service: Service, body: ChatRequest, template: ChatTemplate, speculative: Speculative
) -> list[Submission]:
    """``n`` answers to the messages.

    Raises:
        ApiError: parameters that make no sense together.
        ChatTemplateError: the template refuses the messages.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs true", param="top_logprobs")
    messages = [
        {"role": message.role, "content": message.text()}
        | ({"name": message.name} if message.name is not None else {})
        for message in body.messages
    ]
    ids = _encode(service, template.render(messages, body.chat_template_kwargs or {}))
    output = OutputConfig((body.top_logprobs or 0) if body.logprobs else -1)
    # By default, as much as the engine can hold.
    limit = body.max_completion_tokens or body.max_tokens or service.max_seq_len - len(ids)
    requests = _requests(service, body, ids, max(limit, 1), output, speculative)
    return [Submission(request, body.stops) for request in requests]


def _encode(service: Service, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise ApiError(400, f"the prompt is not Unicode text: {error.reason}") from None
    return service.tokenizer.encode(text)


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Of a text, texts, token ids or lists of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return cast(Sequence[str | list[int]], prompt)


def _requests(
    service: Service,
    body: GenerationRequest,
    prompt: list[int],
    max_tokens: int,
    output: OutputConfig,
    defaults: Speculative,
) -> list[Request]:
    if len(prompt) + max_tokens > service.max_seq_len:  # before it is copied n times
        raise ApiError(
            400,
            f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the engine's "
            f"max_seq_len {service.max_seq_len}",
            code="context_length_exceeded",
        )
    stop_token_ids = [] if body.ignore_eos else service.stop_token_ids
    speculative = _speculative(service, body.speculative, defaults)
    seed = None if body.seed is None else body.seed % 2**64
    return [
        Request(
            prompt,
            max_tokens,
            [*stop_token_ids, *body.stop_token_ids],
            _sampling(body, service.sampling_defaults(), choice_seed),
            speculative,
            output,
        )
        for choice_seed in choice_seeds(seed, body.n)
    ]


def _sampling(body: GenerationRequest, defaults: Mapping[str, float], seed: int) -> SamplingConfig:
    chosen = dict(defaults)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        if (value := getattr(body, name)) is not None:
            chosen[name] = value
    if chosen["temperature"] == 0:  # greedy: these change nothing
        chosen = {n: v for n, v in chosen.items() if n not in ("top_k", "top_p", "min_p")}
        seed = 0
    return SamplingConfig(
        temperature=chosen["temperature"],
        top_k=int(chosen.get("top_k", 0)),
        top_p=chosen.get("top_p", 1.0),
        min_p=chosen.get("min_p", 0.0),
        repetition_penalty=chosen.get("repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=seed,
    )


def _logit_bias(bias: Mapping[str, float]) -> list[tuple[int, float]]:
    entries: dict[int, float] = {}
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit()) or len(token) > 10 or int(token) > INT32_MAX:
            raise ApiError(400, f"logit_bias: {token[:40]!r} is no token id", param="logit_bias")
        if int(token) in entries:
            raise ApiError(
                400, f"logit_bias: token {int(token)} is given twice", param="logit_bias"
            )
        entries[int(token)] = value
    return list(entries.items())


def _speculative(
    service: Service, asked: Speculative | None, defaults: Speculative
) -> SpeculativeConfig:
    """The request's own, over the server's defaults."""
    values = defaults.model_dump(exclude_unset=True)
    if asked is not None:
        values |= asked.model_dump(exclude_unset=True)
    return service.speculative_config(**values)
