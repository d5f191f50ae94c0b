"""The Python surface of the C++ builder. README.md in this folder is the contract.

Arrays are NumPy's or torch CPU tensors. What is wrong with an argument is said in a
ValueError.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from trtree._core import ddtree as _core

_INT32_MAX = 2**31 - 1


class Tree:
    """A draft tree of n nodes below a root, the bonus token of the round before.

    Row 0 is the root and row i + 1 is node i. Parents come before their children. Made
    by the functions of this module; the arrays are read-only.
    """

    __slots__ = ("_tree",)

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[n] int32: the token of each node, the root left out."""
        return self._tree.token_ids  # type: ignore[no-any-return]

    @property
    def depths(self) -> npt.NDArray[np.int32]:
        """[n] int32 from 1. The RoPE position of a node is the root's plus this."""
        return self._tree.depths  # type: ignore[no-any-return]

    @property
    def parents(self) -> npt.NDArray[np.int32]:
        """[n + 1] int32: the row each row continues, -1 for the root."""
        return self._tree.parents  # type: ignore[no-any-return]

    @property
    def log_probs(self) -> npt.NDArray[np.float64]:
        """[n] float64: of the path from the root to each node, under the product of the marginals.

        Empty for trees that were not built from marginals.
        """
        return self._tree.log_probs  # type: ignore[no-any-return]

    @property
    def num_rows(self) -> int:
        """n + 1: the rows a target pass over the tree takes."""
        return len(self.parents)

    @property
    def packed_mask(self) -> npt.NDArray[np.int32]:
        """[n + 1, ceil((n + 1) / 32)] int32, computed on each access.

        Bit j % 32 (from the lowest) of word j // 32 in row i is set where row i attends
        row j: its ancestors and itself. Bit 31 makes the word negative.
        """
        return self._tree.packed_mask()  # type: ignore[no-any-return]

    def first(self, nodes: int) -> "Tree":
        """The tree's first nodes: what its builder gives for that smaller budget."""
        return Tree(self._tree.first(_count("nodes", nodes, 0)))

    def walk(self, choices: npt.ArrayLike) -> tuple[npt.NDArray[np.int32], int]:
        """Follow the target's own choices down the tree: lossless at any temperature.

        choices: [n + 1] integers, at each row the argmax or one sample of the target's
        distribution. Returns the accepted rows, int32, increasing, root included, and
        the bonus token: the choice at the last accepted row, which is none of its
        children. Among siblings of one token the lower row is taken.
        """
        accepted, bonus = self._tree.walk(_integers("choices", choices, ("n + 1",)))
        return accepted, bonus

    def __repr__(self) -> str:
        deepest = int(self.depths.max(initial=0))
        return f"Tree({len(self.token_ids)} nodes, {deepest} deep)"


def build_tree(
    logits: npt.ArrayLike,
    budget: int,
    *,
    top_k: int | None = None,
    chain_seed: bool = False,
    num_threads: int | None = None,
) -> Tree:
    """The `budget` most probable prefixes under the product of the marginals.

    logits: float32 [depth, vocab], row d for the position d + 1 after the root; -inf
    forbids a token. budget: nodes besides the root, 0 for the root alone; the tree is
    smaller where the prefixes run out. top_k: ranks per depth to consider at most, by
    default min(budget, vocab), which leaves nothing out. chain_seed: the first min(depth,
    budget) nodes are the chain of the largest logits instead, and the most probable
    prefixes besides it follow. num_threads: see `top_k_log_probs`.

    Paper, section 4. Raises ValueError for a wrong rank, dtype or shape, a negative
    budget, top_k below 1, and a depth whose logits hold NaN or +inf or only -inf.
    """
    array = _logits(logits)
    budget = _count("budget", budget, 0)
    ranks = budget if top_k is None else min(_count("top_k", top_k, 1), budget)
    threads = _threads(num_threads)
    if budget == 0:
        return chain(np.empty(0, np.int32))
    return Tree(_core.build_tree(array, budget, min(ranks, array.shape[1]), threads, chain_seed))


def build_tree_from_top_k(
    log_probs: npt.ArrayLike, token_ids: npt.ArrayLike, budget: int, *, chain_seed: bool = False
) -> Tree:
    """`build_tree` from what `top_k_log_probs` gives.

    log_probs: float32 [depth, k], no row increasing; -inf marks ranks that are not to be
    used. token_ids: integers [depth, k]. Raises ValueError for a wrong rank, dtype or
    shape, a negative budget, NaN, +inf, or an increasing row.
    """
    ranked = _floats("log_probs", log_probs, ("depth", "k"))
    ids = _integers("token_ids", token_ids, ("depth", "k"))
    if ranked.shape != ids.shape:
        raise ValueError(f"log_probs {ranked.shape} and token_ids {ids.shape} differ in shape")
    return Tree(_core.build_tree_from_top_k(ranked, ids, _count("budget", budget, 0), chain_seed))


def top_k_log_probs(
    logits: npt.ArrayLike, k: int, *, num_threads: int | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """The k largest logits of each row as log-probs, equal ones by lower id.

    logits: float32 [depth, vocab]. Returns log-probs float32 [depth, k], not increasing,
    and ids int32 [depth, k]. A log-prob is float32(logit) - float32(lse), with lse over
    the whole row summed in float64. num_threads: by default one per processor, 8 at most;
    the result does not depend on it.

    Raises ValueError for a wrong rank, dtype or shape, k outside [1, vocab], and a row
    that holds NaN or +inf or only -inf.
    """
    array = _logits(logits)
    k = _count("k", k, 1)
    if k > array.shape[1]:
        raise ValueError(f"k is {k}, more than the vocabulary's {array.shape[1]}")
    log_probs, token_ids = _core.top_k_log_probs(array, k, _threads(num_threads))
    return log_probs, token_ids


def chain(token_ids: npt.ArrayLike) -> Tree:
    """One node per depth. token_ids: integers [n]."""
    return Tree(_core.chain(_integers("token_ids", token_ids, ("n",))))


def static_tree(choices: Sequence[Sequence[int]], token_ids: npt.ArrayLike) -> Tree:
    """A tree of fixed shape, filled with this round's tokens.

    choices: a rank path for each node, in any order; nodes are numbered by depth, then
    lexicographically. token_ids: integers [depth, k], the drafter's tokens by rank.
    Raises ValueError for a path deeper than depth, a rank outside [0, k), a duplicate,
    and a path whose prefix is missing.
    """
    ids = _integers("token_ids", token_ids, ("depth", "k"))
    return Tree(_core.static_tree([list(path) for path in choices], ids))


def _array(name: str, value: npt.ArrayLike, axes: tuple[str, ...]) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as a NumPy array: {error}") from error
    if array.ndim != len(axes):
        raise ValueError(f"{name} must be [{', '.join(axes)}], not of shape {array.shape}")
    return array


def _floats(name: str, value: npt.ArrayLike, axes: tuple[str, ...]) -> npt.NDArray[np.float32]:
    array = _array(name, value, axes)
    if array.dtype != np.float32:
        raise ValueError(f"{name} must be float32, not {array.dtype}")
    return np.ascontiguousarray(array, np.float32)


def _integers(name: str, value: npt.ArrayLike, axes: tuple[str, ...]) -> npt.NDArray[np.int32]:
    array = _array(name, value, axes)
    if array.dtype == np.int32:
        return np.ascontiguousarray(array, np.int32)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    converted = np.ascontiguousarray(array, np.int32)
    if not np.array_equal(converted, array):
        raise ValueError(f"{name} holds values that do not fit in int32")
    return converted


def _logits(value: npt.ArrayLike) -> npt.NDArray[np.float32]:
    logits = _floats("logits", value, ("depth", "vocab"))
    if logits.shape[1] == 0:
        raise ValueError(f"logits of shape {logits.shape} have no vocabulary")
    return logits


def _count(name: str, value: int, least: int) -> int:
    if not least <= index(value) <= _INT32_MAX:
        raise ValueError(f"{name} must be from {least} to {_INT32_MAX}, not {value}")
    return index(value)


def _threads(num_threads: int | None) -> int:
    return 0 if num_threads is None else _count("num_threads", num_threads, 1)
