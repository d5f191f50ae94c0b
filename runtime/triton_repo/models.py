"""The classes that a repository's ``model.py`` files name."""

from collections.abc import Mapping

from trtree.runtime.triton_repo.engine_model import Answer, EngineModel
from trtree.runtime.triton_repo.inputs import Array
from trtree.runtime.triton_repo.llmapi import text_answer


class TextModel(EngineModel):
    """``trtree``: an engine with text in and out."""

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        return text_answer(self.service, self.settings, arrays, decoupled=self.decoupled)
