"""The classes that a repository's ``model.py`` files name."""

from collections.abc import Mapping

from trtree.runtime.triton_repo.bls import BlsModel
from trtree.runtime.triton_repo.engine_model import Answer, EngineModel
from trtree.runtime.triton_repo.inflight_batcher import token_answer
from trtree.runtime.triton_repo.inputs import Array
from trtree.runtime.triton_repo.llmapi import text_answer
from trtree.runtime.triton_repo.settings import flag
from trtree.runtime.triton_repo.text_models import Postprocessing, Preprocessing

__all__ = ["BlsModel", "Postprocessing", "Preprocessing", "TextModel", "TokenModel"]


class TextModel(EngineModel):
    """``trtree``: an engine with text in and out."""

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        return text_answer(self.service, self.settings, arrays, decoupled=self.decoupled)


class TokenModel(EngineModel):
    """``tensorrt_llm``: an engine with token ids in and out."""

    def configure(self, parameters: Mapping[str, str]) -> None:
        self._exclude_input = flag(parameters, "exclude_input_in_output")

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        return token_answer(
            self.service,
            self.settings,
            arrays,
            decoupled=self.decoupled,
            exclude_input=self._exclude_input,
        )
