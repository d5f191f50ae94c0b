"""Log-probs as OpenAI's clients read them."""

import json
import math
from collections.abc import Callable

from trtree.runtime.executor import TokenLogProbs
from trtree.runtime.server.formats import LEAST_LOG_PROB, ChatFormat, CompletionFormat
from trtree.runtime.service import Chunk, TokenText
from trtree.runtime.session import Session


def log_probs(value: float, rank: int, top: list[tuple[int, float]]) -> TokenLogProbs:
    made = TokenLogProbs.__new__(TokenLogProbs)
    made.__setstate__((value, rank, top))
    return made


def chunk(session: Session) -> Chunk:
    day, of = session.tokenizer.encode("day of")[0], session.tokenizer.encode(" of")[0]
    tokens = [
        TokenText(day, "day", 0, None),
        TokenText(of, " of", 3, log_probs(-2.5, 2, [(day, -0.5), (7, -math.inf)])),
    ]
    return Chunk("day of", [day, of], tokens)


def test_completions(demo_session: Callable[..., Session]) -> None:
    session = demo_session()
    answer = CompletionFormat("demo", session.tokenizer, log_probs=True)
    (part,) = answer.parts(3, chunk(session))
    (choice,) = part["choices"]
    assert choice["index"] == 3
    seven = session.tokenizer.token_text(7)
    assert choice["logprobs"] == {
        "tokens": ["day", " of"],
        "token_logprobs": [None, -2.5],
        # The token itself is there, though not among the most probable.
        "top_logprobs": [None, {"day": -0.5, seven: LEAST_LOG_PROB, " of": -2.5}],
        "text_offset": [0, 3],
    }
    json.dumps(part, allow_nan=False)


def test_chat(demo_session: Callable[..., Session]) -> None:
    session = demo_session()
    answer = ChatFormat("demo", session.tokenizer, log_probs=True)
    first, part = answer.parts(0, chunk(session))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (choice,) = part["choices"]
    assert choice["delta"] == {"content": "day of"}
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (" of", -2.5, list(b" of"))
    assert entry["top_logprobs"][0]["token"] == "day"
    assert len(list(answer.parts(0, chunk(session)))) == 1, "the role is told once"
