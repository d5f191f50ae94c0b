"""A CPU engine's rows against plain decoding, byte for byte.

Engines here have pools of ``POOL_TOKENS`` and eight slots.
"""

import random
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from steps import path_to, prefill, random_tree, run_rows
from trtree import _core

POOL_TOKENS = 4096
PAGE = 16
CHUNK = 17  # of prompts, so that chunks end inside pages

Batch = list[tuple[int, int]]  # of each request: its prefix, its tree's budget


def few_examples(count: int) -> settings:
    """Each takes long, and engines outlive them."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def batches(*, prefixes: int, budgets: Sequence[int], requests: int) -> st.SearchStrategy[Batch]:
    """Up to that many requests, behind prefixes of up to that length."""
    request = st.tuples(st.integers(0, prefixes), st.sampled_from(budgets))
    return st.lists(request, min_size=1, max_size=requests)


def pages_of(request: int, page_size: int = PAGE) -> list[int]:
    """An eighth of the pool for each request, in an order of its own."""
    count = POOL_TOKENS // page_size // 8
    pages = list(range(request * count, (request + 1) * count))
    random.Random(request).shuffle(pages)
    return pages


def plain_logits(engine: _core.Engine, tokens: Sequence[int], page_size: int = PAGE) -> bytes:
    """Logits after the last of the tokens, each decoded in a step of its own, in the last slot."""
    pages = pages_of(7, page_size)
    for position, token in enumerate(tokens):
        logits = prefill(engine, _core.Sequence(99, 7, position, pages), [token])
    return logits[0].tobytes()


def check_trees(
    engine: _core.Engine,
    alone: _core.Engine,
    batch: Batch,
    *,
    seed: int,
    vocab: int,
    page_size: int = PAGE,
) -> None:
    """One step of random trees: rows equal what ``alone`` gives along their paths.

    ``alone`` has pages of ``PAGE``, and may be the same engine: the step is over by then.
    """
    rng = random.Random(seed)
    requests, prefixes = [], []
    for index, (length, budget) in enumerate(batch):
        pages, prefix = pages_of(index, page_size), [rng.randrange(vocab) for _ in range(length)]
        for start in range(0, length, CHUNK):
            at = _core.Sequence(index, index, start, pages)
            prefill(engine, at, prefix[start : start + CHUNK])
        tokens, parents = random_tree(rng, budget, vocab)
        requests.append((_core.Sequence(index, index, length, pages), tokens, parents))
        prefixes.append(prefix)
    together = run_rows(engine, requests)
    for (_, tokens, parents), prefix, logits in zip(requests, prefixes, together, strict=True):
        for row in rng.sample(range(len(tokens)), min(2, len(tokens))):
            path = [*prefix, *(tokens[r] for r in path_to(row, parents))]
            assert logits[row].tobytes() == plain_logits(alone, path)


def check_commits(
    engine: _core.Engine, alone: _core.Engine, *, vocab: int, page_size: int = PAGE, rounds: int = 8
) -> int:
    """Rounds of a step that is thrown away, a step, and the commit of a path through the middle
    of its tree, by turns the longest: rows equal what ``alone`` gives. Returns the tokens
    committed."""
    rng = random.Random(5)
    pages = pages_of(1, page_size)
    committed: list[int] = []
    for number in range(rounds):
        at = _core.Sequence(1, 1, len(committed), pages)
        run_rows(engine, [(at, *random_tree(rng, 40, vocab))])  # never committed
        tokens, parents = random_tree(rng, 40, vocab)
        (logits,) = run_rows(engine, [(at, tokens, parents)])
        paths = [path_to(row, parents) for row in range(len(tokens))]
        path = rng.choice(paths) if number % 2 else max(paths, key=len)
        text = committed + [tokens[row] for row in path]
        assert logits[path[-1]].tobytes() == plain_logits(alone, text)
        engine.commit([_core.Commit(at, path)])
        committed = text
    return len(committed)


def check_instruction_sets(load: Callable[[str], _core.Engine], vocab: int) -> None:
    """A prompt's logits, and a block drafted behind it, are the same bits on all of them."""
    rng = random.Random(1)
    prompt = [rng.randrange(vocab) for _ in range(40)]
    results = set()
    for isa in ("portable", "avx2", "avx512"):
        try:
            engine = load(isa)
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
            continue
        logits = prefill(engine, _core.Sequence(1, 0, 0, pages_of(0)), prompt)
        behind = _core.Sequence(1, 0, len(prompt), pages_of(0))
        draft = engine.draft([_core.DraftRequest(behind, 3)], 8)
        results.add(logits.tobytes() + draft.log_probs.tobytes() + draft.token_ids.tobytes())
    assert len(results) == 1
