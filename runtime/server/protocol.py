"""The requests the server takes: OpenAI's parameters and the engine's own.

A parameter that is not here is refused by its name, so that none is silently ignored;
``null`` means the default. ``user`` and ``metadata`` are accepted: they are the caller's
own notes.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from trtree.runtime.cli import INT32_MAX

MAX_PARAMETERS = 128
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_BIASES = 1024
MAX_STOPS = 32
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
# Bodies are large: one error is enough, and of a union only the branch that was meant is tried.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _few_biases(bias: Any) -> Any:
    """Before each is looked at."""
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise ValueError(f"{len(bias)} tokens; at most {MAX_BIASES} can be biased")
    return bias


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)
]


def _kind(prompt: Any) -> str:
    """Which of the kinds of prompt this is, or is nearest to."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("texts")
    ]
    | Annotated[TokenIds, Field(min_length=1), Tag("ids")]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("lists"),
    ],
    Discriminator(_kind),
]


class Model(BaseModel):
    """Strict: no unknown parameters, no conversions, no NaN; ``null`` is the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_PARAMETERS:
            raise ValueError(f"{len(data)} parameters; at most {MAX_PARAMETERS} are read")
        return {name: value for name, value in data.items() if value is not None}


class Speculative(Model):
    """How to draft; what is left out is as the engine was built."""

    mode: Literal["plain", "chain", "tree"] | None = None
    tree: Literal["dynamic", "static"] | None = None
    tree_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    policy: Literal["fixed", "load", "adaptive"] | None = None
    chain_seed: bool = False


class StreamOptions(Model):
    include_usage: bool = False


class GenerationRequest(Model):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] = []
    ignore_eos: bool = False
    speculative: Speculative | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Count | None = None


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None  # OpenAI's older name of it
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """What every status but 200 answers."""

    error: Error
