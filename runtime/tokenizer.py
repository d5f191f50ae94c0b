"""Text to token ids and back, from an engine directory's tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from trtree.build.engine_dir import EngineDirError

# A token that ends inside a UTF-8 sequence decodes to this.
_INCOMPLETE = "\ufffd"
# Decoders strip or merge at a text's beginning, so a stream keeps some tokens before it.
_CONTEXT_TOKENS = 8
_MOST_TOKENS = 24


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

    Held back is what may be the beginning of a character: at its end text can lack at most
    three bytes, each of which shows as one replacement character or with the others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens, decoded again each time
        self._emitted = 0  # characters of the window's text that were returned already

    def push(self, token_ids: list[int]) -> str:
        """Add tokens; returns the text that became certain."""
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        return self._emit(text, max(len(text.rstrip(_INCOMPLETE)), len(text) - 3))

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        text = self._tokenizer.decode(self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, certain: int) -> str:
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if len(self._window) > _MOST_TOKENS:
            held = len(text) - self._emitted
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._emitted = len(self._tokenizer.decode(self._window)) - held
        return piece
