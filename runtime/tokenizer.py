"""Text to token ids and back, from an engine directory's tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from trtree.build.engine_dir import EngineDirError

# A token that ends inside a UTF-8 sequence decodes to this.
_INCOMPLETE = "\ufffd"


class Tokenizer:
    """A Hugging Face ``tokenizer.json``.

    Raises:
        EngineDirError: it is missing, or no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        try:
            self._tokenizer = HfTokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise EngineDirError(f"{file}: not a tokenizer: {error}") from None
        self._texts: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids; white space is kept, special tokens in the text are recognised."""
        # The batch call lets other threads run meanwhile; a long prompt takes seconds.
        (encoding,) = self._tokenizer.encode_batch([text])
        return list(encoding.ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text, special tokens left out."""
        return str(self._tokenizer.decode(token_ids))

    def token_text(self, token_id: int) -> str:
        """A token's own text, as the vocabulary writes it where it is part of a character."""
        if token_id not in self._texts:
            text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
            if _INCOMPLETE in text:
                text = str(self._tokenizer.id_to_token(token_id))
            self._texts[token_id] = text
        return self._texts[token_id]

    def stream(self) -> "TextStream":
        return TextStream(self)


class TextStream:
    """Turns a growing list of tokens into text pieces that add up to the whole.

    Text is held back while it ends inside a character, or could still change.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0  # first token of the window that is decoded again
        self._emitted = ""  # what of the window's text was returned already

    def push(self, token_ids: list[int]) -> str:
        """Add tokens; returns the text that became certain."""
        self._token_ids += token_ids
        text = self._tokenizer.decode(self._token_ids[self._start :])
        if text.endswith(_INCOMPLETE):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        return self._emit(self._tokenizer.decode(self._token_ids[self._start :]))

    def _emit(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        # Keep the last tokens as context: decoders strip or merge at the beginning.
        window = max(self._start, len(self._token_ids) - 8)
        self._emitted = text
        if window > self._start:
            self._start = window
            self._emitted = self._tokenizer.decode(self._token_ids[window:])
        return piece
