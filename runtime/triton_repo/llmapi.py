"""The model ``trtree``: text in, text out, in the manner of TensorRT-LLM's ``llmapi`` model."""

from collections.abc import Mapping, Sequence

from trtree.runtime.service import Chunk, Finish, Service, Submission
from trtree.runtime.triton_repo.answers import (
    Output,
    acceptance,
    floats,
    integers,
    log_prob_rows,
    texts,
)
from trtree.runtime.triton_repo.inputs import Array, InputError, Inputs
from trtree.runtime.triton_repo.model_config import Tensor
from trtree.runtime.triton_repo.settings import EngineSettings
from trtree.runtime.triton_repo.submissions import SPECULATION, positive, submissions

DEFAULT_MAX_TOKENS = 16
NAMES = {
    name: f"sampling_param_{name}"
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "n",
    )
}
INPUTS = (
    Tensor("text_input", "TYPE_STRING", optional=True),  # a request that says stop has none
    Tensor("max_tokens", "TYPE_INT32", optional=True),
    Tensor("streaming", "TYPE_BOOL", optional=True),
    Tensor("stop", "TYPE_BOOL", optional=True),
    Tensor("sampling_param_max_tokens", "TYPE_INT32", optional=True),
    Tensor("sampling_param_temperature", "TYPE_FP32", optional=True),
    Tensor("sampling_param_top_k", "TYPE_INT32", optional=True),
    Tensor("sampling_param_top_p", "TYPE_FP32", optional=True),
    Tensor("sampling_param_min_p", "TYPE_FP32", optional=True),
    Tensor("sampling_param_repetition_penalty", "TYPE_FP32", optional=True),
    Tensor("sampling_param_presence_penalty", "TYPE_FP32", optional=True),
    Tensor("sampling_param_frequency_penalty", "TYPE_FP32", optional=True),
    Tensor("sampling_param_seed", "TYPE_UINT64", optional=True),
    Tensor("sampling_param_n", "TYPE_INT32", optional=True),
    Tensor("sampling_param_best_of", "TYPE_INT32", optional=True),
    Tensor("sampling_param_stop", "TYPE_STRING", (-1,), optional=True),
    Tensor("sampling_param_stop_token_ids", "TYPE_INT32", (-1,), optional=True),
    Tensor("sampling_param_ignore_eos", "TYPE_BOOL", optional=True),
    Tensor("sampling_param_exclude_input_from_output", "TYPE_BOOL", optional=True),
    Tensor("sampling_param_return_perf_metrics", "TYPE_BOOL", optional=True),
    Tensor("return_finish_reason", "TYPE_BOOL", optional=True),
    Tensor("return_stop_reason", "TYPE_BOOL", optional=True),
    Tensor("return_cumulative_logprob", "TYPE_BOOL", optional=True),
    Tensor("return_log_probs", "TYPE_BOOL", optional=True),
    *SPECULATION,
)
OUTPUTS = (
    Tensor("text_output", "TYPE_STRING", (-1,)),
    Tensor("finish_reason", "TYPE_STRING", (-1,)),
    Tensor("stop_reason", "TYPE_STRING", (-1,)),
    Tensor("cumulative_logprob", "TYPE_FP32", (-1,)),
    Tensor("output_log_probs", "TYPE_FP32", (-1, -1)),
    Tensor("acceptance_rate", "TYPE_FP32", (1,)),
    Tensor("total_accepted_draft_tokens", "TYPE_INT32", (1,)),
    Tensor("total_draft_tokens", "TYPE_INT32", (1,)),
    Tensor("num_input_tokens", "TYPE_INT32", (1,)),
    Tensor("num_output_tokens", "TYPE_INT32", (1,)),
)


class TextAnswer:
    """Whole outputs once all have ended, or (streaming) one output's new text as it comes."""

    def __init__(
        self,
        submissions: Sequence[Submission],
        *,
        streaming: bool,
        log_probs: bool,
        cumulative_log_prob: bool,
    ) -> None:
        self.submissions = submissions
        self._outputs = [Output() for _ in submissions]
        self._streaming = streaming
        self._log_probs = log_probs
        self._cumulative = cumulative_log_prob
        self._sent = 0  # log-probs of the stream

    def take(self, index: int, chunk: Chunk) -> dict[str, Array] | None:
        output = self._outputs[index]
        output.add(chunk)
        if self._streaming:
            if not chunk.text and chunk.finish is None:
                return None
            return self._streamed(output, chunk)
        finishes = [one.finish for one in self._outputs if one.finish is not None]
        if len(finishes) < len(self._outputs):
            return None
        answer = {"text_output": texts([one.text for one in self._outputs])}
        if self._log_probs:
            answer["output_log_probs"] = log_prob_rows([one.log_probs for one in self._outputs])
        return answer | self._ended(finishes)

    def _streamed(self, output: Output, chunk: Chunk) -> dict[str, Array]:
        answer = {"text_output": texts([chunk.text])}
        if self._log_probs:
            answer["output_log_probs"] = log_prob_rows([output.log_probs[self._sent :]])
            self._sent = len(output.log_probs)
        return answer if chunk.finish is None else answer | self._ended([chunk.finish])

    def _ended(self, finishes: Sequence[Finish]) -> dict[str, Array]:
        answer = {
            "finish_reason": texts([finish.reason for finish in finishes]),
            "stop_reason": texts([str(f.stop) if f.stop is not None else "" for f in finishes]),
            "num_input_tokens": integers(finishes[0].usage.prompt_tokens),
            "num_output_tokens": integers(sum(f.usage.completion_tokens for f in finishes)),
            **acceptance(finishes),
        }
        if self._cumulative:
            answer["cumulative_logprob"] = floats(*(sum(one.log_probs) for one in self._outputs))
        return answer


def text_answer(
    service: Service,
    settings: EngineSettings,
    arrays: Mapping[str, Array],
    *,
    decoupled: bool,
) -> TextAnswer:
    """What a request to the model asks for.

    Raises:
        InputError: an input is missing, malformed, or asks for what this server does not do.
    """
    inputs = Inputs(arrays)
    prompt = inputs.text("text_input")
    if prompt is None:
        raise InputError("text_input is missing")
    streaming = inputs.flag("streaming")
    count = positive(inputs, NAMES["n"], "sampling_param_best_of") or 1
    inputs.accept_only("sampling_param_best_of", count)  # nothing is ranked
    if streaming and not decoupled:
        raise InputError("streaming needs a decoupled model; this one was written without")
    if streaming and count > 1:
        raise InputError(f"streaming gives one output, not {NAMES['n']} {count}")
    own_stops = [] if inputs.flag("sampling_param_ignore_eos") else service.stop_token_ids
    log_probs = inputs.flag("return_log_probs")
    cumulative = inputs.flag("return_cumulative_logprob")
    max_tokens = positive(inputs, "max_tokens", "sampling_param_max_tokens")
    return TextAnswer(
        submissions(
            service,
            inputs,
            service.tokenizer.encode(prompt),
            max_tokens or DEFAULT_MAX_TOKENS,
            names=NAMES,
            count=count,
            stop=inputs.texts("sampling_param_stop"),
            stop_token_ids=[*own_stops, *inputs.integers("sampling_param_stop_token_ids")],
            log_probs=log_probs or cumulative,
            echo=None if inputs.flag("sampling_param_exclude_input_from_output", True) else prompt,
            defaults=settings.speculation(),
        ),
        streaming=streaming,
        log_probs=log_probs,
        cumulative_log_prob=cumulative,
    )
