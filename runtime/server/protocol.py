"""The requests the server takes: OpenAI's parameters and the engine's own.

A parameter that is not here is refused by its name, so that none is silently ignored;
``null`` means the default. ``user`` and ``metadata`` are accepted: they are the caller's
own notes.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Model(BaseModel):
    """Strict: no unknown parameters, no conversions, no NaN; ``null`` is the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
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
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = []
    ignore_eos: bool = False
    speculative: Speculative | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[list[TokenId]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Count | None = None


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
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
