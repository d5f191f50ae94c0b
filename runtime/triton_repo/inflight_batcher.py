"""The older layout's models, by the names and tensors its clients send.

``ensemble``: text to ``preprocessing``, token ids to ``tensorrt_llm``, tokens to
``postprocessing``. ``tensorrt_llm_bls``: the same from one model, which keeps the text's
state between responses. What those models could do and this engine cannot (beams, LoRA,
guided decoding, drafts from clients) either has no tensor here, so that Triton refuses it by
name, or is refused by value.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trtree.runtime.service import Chunk, Service, Submission
from trtree.runtime.tokenizer import Tokenizer
from trtree.runtime.triton_repo.answers import Output, acceptance, floats, integers
from trtree.runtime.triton_repo.inputs import Array, InputError, Inputs
from trtree.runtime.triton_repo.model_config import ModelConfig, Step, Tensor
from trtree.runtime.triton_repo.settings import EngineSettings
from trtree.runtime.triton_repo.submissions import SPECULATION, positive, submissions

ENGINE_MODEL = "tensorrt_llm"
_FORBIDDEN = -1e9  # the logit bias of a bad word
_INCOMPLETE = "\ufffd"
NAMES = {
    "temperature": "temperature",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "num_return_sequences",
}


def _inputs(data_type: str, *names: str, dims: tuple[int, ...] = (1,)) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, data_type, dims, optional=True) for name in names)  # type: ignore[arg-type]


_COMMON = (
    *_inputs("TYPE_INT32", "num_return_sequences", "beam_width", "min_tokens"),
    *_inputs("TYPE_INT32", "end_id", "pad_id"),
    *_inputs("TYPE_FP32", "temperature", "repetition_penalty"),
    *_inputs("TYPE_FP32", "presence_penalty", "frequency_penalty"),
    *_inputs("TYPE_UINT64", "seed"),
    *_inputs("TYPE_BOOL", "exclude_input_in_output", "return_log_probs", "return_perf_metrics"),
    *_inputs("TYPE_BOOL", "return_context_logits", "return_generation_logits"),
    *_inputs("TYPE_BOOL", "return_num_input_tokens", "return_num_output_tokens"),
    *SPECULATION,
)
TOKEN_INPUTS = (
    *_inputs("TYPE_INT32", "input_ids", dims=(-1,)),
    *_inputs("TYPE_INT32", "input_lengths", "request_output_len", "runtime_top_k"),
    *_inputs("TYPE_FP32", "runtime_top_p", "len_penalty"),
    *_inputs("TYPE_INT32", "stop_words_list", "bad_words_list", dims=(2, -1)),
    *_inputs("TYPE_FP32", "embedding_bias", dims=(-1,)),
    *_inputs("TYPE_BOOL", "streaming", "stop"),
    *_COMMON,
)
_FIGURES = (
    Tensor("cum_log_probs", "TYPE_FP32", (-1,)),
    Tensor("output_log_probs", "TYPE_FP32", (-1, -1)),
    Tensor("batch_index", "TYPE_INT32"),
    Tensor("sequence_index", "TYPE_INT32"),
    Tensor("acceptance_rate", "TYPE_FP32"),
    Tensor("total_accepted_draft_tokens", "TYPE_INT32"),
    Tensor("total_draft_tokens", "TYPE_INT32"),
    Tensor("num_input_tokens", "TYPE_INT32"),
    Tensor("num_output_tokens", "TYPE_INT32"),
)
TOKEN_OUTPUTS = (
    Tensor("output_ids", "TYPE_INT32", (-1, -1)),
    Tensor("sequence_length", "TYPE_INT32", (-1,)),
    *_FIGURES,
)
TEXT_INPUTS = (
    Tensor("text_input", "TYPE_STRING"),
    Tensor("max_tokens", "TYPE_INT32"),
    *_inputs("TYPE_STRING", "bad_words", "stop_words", dims=(-1,)),
    *_inputs("TYPE_INT32", "top_k"),
    *_inputs("TYPE_FP32", "top_p", "length_penalty"),
    *_inputs("TYPE_BOOL", "stream"),
    *_COMMON,
)
TEXT_OUTPUTS = (Tensor("text_output", "TYPE_STRING", (-1,)), *_FIGURES)
# The text models' names for what has another one with tokens.
RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
PREPROCESSED = {  # tensorrt_llm's inputs, by the preprocessing's outputs
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
PREPROCESSING_INPUTS = {  # the text models' inputs, by the preprocessing's
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
}
# Passed on as they are, by tensorrt_llm's name.
PASSED_ON = {
    RENAMED.get(tensor.name, tensor.name): tensor.name
    for tensor in TEXT_INPUTS
    if tensor.name not in PREPROCESSING_INPUTS.values()
}


def configs(
    settings: EngineSettings, *, decoupled: bool, max_batch_size: int
) -> list[tuple[ModelConfig, str | None]]:
    """The layout's models, each with the class that runs it (None: an ensemble)."""
    text_parameters = {"engine_dir": settings.engine_dir}
    preprocessing = ModelConfig(
        "preprocessing",
        (
            Tensor("QUERY", "TYPE_STRING"),
            Tensor("REQUEST_OUTPUT_LEN", "TYPE_INT32"),
            *_inputs("TYPE_STRING", "BAD_WORDS_DICT", "STOP_WORDS_DICT", dims=(-1,)),
            *_inputs("TYPE_INT32", "END_ID", "PAD_ID"),
        ),
        (
            Tensor("INPUT_ID", "TYPE_INT32", (-1,)),
            Tensor("REQUEST_INPUT_LEN", "TYPE_INT32"),
            Tensor("BAD_WORDS_IDS", "TYPE_INT32", (2, -1)),
            Tensor("STOP_WORDS_IDS", "TYPE_INT32", (2, -1)),
            Tensor("REQUEST_OUTPUT_LEN", "TYPE_INT32", (-1,)),
            Tensor("OUT_END_ID", "TYPE_INT32"),
            Tensor("OUT_PAD_ID", "TYPE_INT32"),
        ),
        max_batch_size,
        parameters=text_parameters,
    )
    engine = ModelConfig(
        ENGINE_MODEL,
        TOKEN_INPUTS,
        TOKEN_OUTPUTS,
        max_batch_size,
        decoupled=decoupled,
        parameters=settings.to_parameters() | {"exclude_input_in_output": "true"},
    )
    postprocessing = ModelConfig(
        "postprocessing",
        (
            Tensor("TOKENS_BATCH", "TYPE_INT32", (-1, -1)),
            Tensor("SEQUENCE_LENGTH", "TYPE_INT32", (-1,)),
        ),
        (Tensor("OUTPUT", "TYPE_STRING", (-1,)),),
        max_batch_size,
        parameters=text_parameters,
    )
    bls = ModelConfig(
        "tensorrt_llm_bls",
        TEXT_INPUTS,
        TEXT_OUTPUTS,
        1,  # prompts of a batch are requests of their own
        decoupled=decoupled,
        parameters=text_parameters
        | {"accumulate_tokens": "false", "tensorrt_llm_model_name": ENGINE_MODEL},
    )
    return [
        (preprocessing, "Preprocessing"),
        (engine, "TokenModel"),
        (postprocessing, "Postprocessing"),
        (_ensemble(max_batch_size), None),
        (bls, "BlsModel"),
    ]


def _ensemble(max_batch_size: int) -> ModelConfig:
    figures = {tensor.name: tensor.name for tensor in _FIGURES}
    return ModelConfig(
        "ensemble",
        TEXT_INPUTS,
        TEXT_OUTPUTS,
        max_batch_size,
        steps=(
            Step(
                "preprocessing", PREPROCESSING_INPUTS, {name: f"_{name}" for name in PREPROCESSED}
            ),
            Step(
                ENGINE_MODEL,
                {name: f"_{source}" for source, name in PREPROCESSED.items()} | PASSED_ON,
                {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"} | figures,
            ),
            Step(
                "postprocessing",
                {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
                {"OUTPUT": "text_output"},
            ),
        ),
    )


class TokenAnswer:
    """Token ids of each output: all at its end, or (streaming) the new ones as they come.

    A streamed response never ends inside a character, so that each can be decoded alone.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        indices: Sequence[tuple[int, int]],
        tokenizer: Tokenizer,
        *,
        streaming: bool,
        with_prompt: bool,
    ) -> None:
        """indices: of each submission, its prompt's in the batch and its own of the prompt's."""
        self.submissions = submissions
        self._indices = indices
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._with_prompt = with_prompt
        self._outputs = [Output() for _ in submissions]
        self._sent = [0 for _ in submissions]  # tokens of each output
        self._totals = [0.0 for _ in submissions]  # log-probs sent

    def take(self, index: int, chunk: Chunk) -> dict[str, Array] | None:
        output = self._outputs[index]
        output.add(chunk)
        finish = chunk.finish
        if finish is None and not self._streaming:
            return None
        if finish is not None and isinstance(finish.stop, int):  # a stop token is no output
            del output.token_ids[-1:], output.log_probs[len(output.token_ids) :]
        token_ids = output.token_ids[self._sent[index] :]
        if finish is None and (
            not token_ids or self._tokenizer.decode(token_ids).endswith(_INCOMPLETE)
        ):
            return None
        log_probs = output.log_probs[self._sent[index] :]
        self._sent[index] += len(token_ids)
        self._totals[index] += sum(log_probs)
        prompt = self.submissions[index].request.prompt_token_ids
        if self._with_prompt:
            token_ids = [*prompt, *token_ids]
        batch_index, sequence_index = self._indices[index]
        figures = {
            "cum_log_probs": floats(self._totals[index]),
            "output_log_probs": floats(*log_probs)[None],
            "batch_index": integers(batch_index),
            "sequence_index": integers(sequence_index),
            "num_input_tokens": integers(len(prompt)),
            "num_output_tokens": integers(self._sent[index]),
            **acceptance([finish] if finish is not None else []),
        }
        answer = {
            "output_ids": integers(*token_ids)[None],
            "sequence_length": integers(len(token_ids)),
            **figures,
        }
        return {name: array[None] for name, array in answer.items()}


def token_answer(
    service: Service,
    settings: EngineSettings,
    arrays: Mapping[str, Array],
    *,
    decoupled: bool,
    exclude_input: bool,
) -> TokenAnswer:
    """What a request to ``tensorrt_llm`` asks for.

    Raises:
        InputError: an input is missing, malformed, or asks for what this server does not do.
    """
    rows = Inputs.rows(arrays)
    streaming = rows[0].flag("streaming")
    found: list[Submission] = []
    indices: list[tuple[int, int]] = []
    for batch_index, inputs in enumerate(rows):
        outputs = _row(service, settings, inputs)
        indices += [(batch_index, sequence_index) for sequence_index in range(len(outputs))]
        found += outputs
    if not decoupled and streaming:
        raise InputError("streaming needs a decoupled model; this one was written without")
    if not decoupled and len(found) > 1:
        raise InputError(
            f"a request for {len(found)} outputs needs a decoupled model; "
            "this one was written without"
        )
    with_prompt = not rows[0].flag("exclude_input_in_output", exclude_input) and not streaming
    return TokenAnswer(
        found, indices, service.tokenizer, streaming=streaming, with_prompt=with_prompt
    )


def _row(service: Service, settings: EngineSettings, inputs: Inputs) -> list[Submission]:
    for name in ("input_ids", "request_output_len"):
        if name not in inputs:
            raise InputError(f"{name} is missing")
    inputs.accept_only("beam_width", 1)
    inputs.accept_only("min_tokens", 0, 1)
    inputs.accept_only("return_context_logits", False)
    inputs.accept_only("return_generation_logits", False)
    ids = inputs.integers("input_ids")
    length = inputs.value("input_lengths")
    if length is not None and not 0 < length <= len(ids):
        raise InputError(f"input_lengths {length}: input_ids has {len(ids)}")
    if inputs.value(NAMES["top_p"]) == 0:  # these clients' way not to ask
        inputs = inputs.without(NAMES["top_p"])
    stops = _words(inputs, "stop_words_list")
    return submissions(
        service,
        inputs,
        ids[:length],
        positive(inputs, "request_output_len") or 1,
        names=NAMES,
        count=positive(inputs, NAMES["n"]) or 1,
        stop=[text for text in map(service.tokenizer.decode, stops) if text],
        stop_token_ids=_stop_token_ids(service, inputs),
        log_probs=inputs.flag("return_log_probs"),
        logit_bias=_logit_bias(inputs),
        defaults=settings.speculation(),
    )


def _stop_token_ids(service: Service, inputs: Inputs) -> list[int]:
    """All of the engine's own, unless ``end_id`` names another; -1: none."""
    end_id = inputs.value("end_id")
    if end_id is None or end_id in service.stop_token_ids:
        return service.stop_token_ids
    return [end_id] if end_id >= 0 else []


def _logit_bias(inputs: Inputs) -> list[tuple[int, float]]:
    bias = inputs.array("embedding_bias")
    found = {} if bias is None else {int(i): float(bias[i]) for i in np.flatnonzero(bias)}
    for word in _words(inputs, "bad_words_list"):
        if len(word) > 1:
            raise InputError(f"bad_words: {word} has {len(word)} tokens; only single ones can be")
        found |= dict.fromkeys(word, _FORBIDDEN)
    return list(found.items())


def _words(inputs: Inputs, name: str) -> list[list[int]]:
    """From int32 [2, n]: all words' ids, and where each word ends among them (-1: no more)."""
    array = inputs.array(name)
    if array is None:
        return []
    if array.ndim != 2 or len(array) != 2:
        raise InputError(f"{name} has the shape {list(array.shape)}; expected [2, n]")
    ids, ends = array.tolist()
    ends = [end for end in ends if end >= 0]
    if ends != sorted(ends) or (ends and ends[-1] > len(ids)):
        raise InputError(f"{name}: the second row must say where words end, not {ends}")
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


def words_list(words: Sequence[Sequence[int]], width: int) -> Array:
    """The inverse: int32 [2, width]."""
    array = np.zeros((2, width), np.int32)
    array[1] = -1
    ids = [token_id for word in words for token_id in word]
    array[0, : len(ids)] = ids
    array[1, : len(words)] = np.cumsum([len(word) for word in words])
    return array
