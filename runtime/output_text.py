"""Generated tokens to text: stop strings, token texts and their offsets."""

from collections.abc import Sequence
from dataclasses import dataclass

from trtree.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What tokens added. ``used``: how many of them belong to the output."""

    text: str
    used: int
    stop: str | None  # the stop string that ended the output
    offsets: list[int]  # of each used token's text, in characters from the output's start


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces.

    The one that is complete first wins, of those the longest, so that the result does not
    depend on where the pieces end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may be the start of a stop string

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text; returns what is certainly no part of a stop string, and the one found."""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of ``text`` that ``stop`` begins with."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class OutputText:
    """The text of one output, as far as it is certain."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, offsets: bool) -> None:
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._one_by_one = offsets or bool(stops)
        self.length = 0  # characters that are certain, held back ones included

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens, up to the one that completes a stop string."""
        if not self._one_by_one:
            return Piece(self._stream.push(list(token_ids)), len(token_ids), None, [])
        text, offsets = "", []
        for token_id in token_ids:
            offsets.append(self.length)
            added = self._stream.push([token_id])
            self.length += len(added)
            certain, stop = self._stops.push(added)
            text += certain
            if stop is not None:
                return Piece(text, len(offsets), stop, offsets)
        return Piece(text, len(offsets), None, offsets)

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, and the stop string it completes, if it does."""
        added = self._stream.finish()
        self.length += len(added)
        certain, stop = self._stops.push(added)
        return (certain, stop) if stop is not None else (certain + self._stops.finish(), None)
