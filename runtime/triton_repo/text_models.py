"""``preprocessing`` and ``postprocessing``: text to token ids and back, with no state."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.tokenizer import Tokenizer
from trtree.runtime.triton_repo.answers import texts
from trtree.runtime.triton_repo.errors import triton_error
from trtree.runtime.triton_repo.inflight_batcher import words_list
from trtree.runtime.triton_repo.inputs import Array, Inputs
from trtree.runtime.triton_repo.settings import parameters_of


class EngineText:
    """The tokenizer of a model's engine, and the id that ends its texts (-1: none)."""

    def __init__(self, args: Mapping[str, str]) -> None:
        parameters = parameters_of(args["model_config"])
        folder = Path(args["model_repository"]) / parameters["engine_dir"]
        try:
            engine_dir = EngineDir.open(folder.resolve(), verify=False)
            self.tokenizer = Tokenizer(engine_dir.tokenizer_path)
        except EngineDirError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        eos = engine_dir.generation_config().get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        self.end_id = -1 if not ids or ids[0] is None else int(ids[0])


def answer_each(
    requests: Sequence[Any], answer: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> list[Any]:
    """A response for each request; what one raises is its own error."""
    responses = []
    for request in requests:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            tensors = [pb_utils.Tensor(name, array) for name, array in answer(arrays).items()]
            responses.append(pb_utils.InferenceResponse(tensors))
        except Exception as error:  # one request must not end the others
            responses.append(pb_utils.InferenceResponse(error=triton_error(error)))
    return responses


class Preprocessing:
    """Prompts, stop words and bad words to token ids."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._text = EngineText(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self._answer)

    def _answer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        encode = self._text.tokenizer.encode
        rows = Inputs.rows(arrays)
        prompts = [encode(inputs.text("QUERY") or "") for inputs in rows]
        end_ids = [_given(inputs, "END_ID", self._text.end_id) for inputs in rows]
        pad_ids = [_given(inputs, "PAD_ID", end) for inputs, end in zip(rows, end_ids, strict=True)]
        input_ids = np.array(pad_ids, np.int32)[:, None].repeat(max(map(len, prompts)), 1)
        for row, ids in zip(input_ids, prompts, strict=True):
            row[: len(ids)] = ids
        answer = {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": _column([len(ids) for ids in prompts]),
            "REQUEST_OUTPUT_LEN": _column([i.value("REQUEST_OUTPUT_LEN") for i in rows]),
            "OUT_END_ID": _column(end_ids),
            "OUT_PAD_ID": _column(pad_ids),
        }
        for name, source in (
            ("STOP_WORDS_IDS", "STOP_WORDS_DICT"),
            ("BAD_WORDS_IDS", "BAD_WORDS_DICT"),
        ):
            words = [[encode(word) for word in i.texts(source) if word] for i in rows]
            width = max(max(len(w), sum(map(len, w))) for w in words)
            answer[name] = np.stack([words_list(w, width) for w in words])
        return answer


class Postprocessing:
    """Token ids of each beam to text."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._text = EngineText(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self._answer)

    def _answer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        rows = zip(arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"], strict=True)
        decoded = [
            texts(
                [
                    self._text.tokenizer.decode(ids[:length].tolist())
                    for ids, length in zip(beams, lengths, strict=True)
                ]
            )
            for beams, lengths in rows
        ]
        return {"OUTPUT": np.stack(decoded)}


def _given(inputs: Inputs, name: str, default: int) -> int:
    value = inputs.value(name)
    return default if value is None else int(value)


def _column(values: Sequence[int]) -> Array:
    return np.array(values, np.int32)[:, None]
