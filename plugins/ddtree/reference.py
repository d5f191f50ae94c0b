"""The algorithm in the most obvious form: what the C++ is compared with.

Nothing here is fast. Paths are tuples of ranks, as in the paper.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class ReferenceTree:
    """The rank path and token of each node, and the row each row continues."""

    paths: list[RankPath]
    token_ids: list[int]
    parents: list[int]
    log_probs: list[float]  # of the path from the root to each node

    @property
    def depths(self) -> list[int]:
        """Of each node, from 1."""
        return [len(path) for path in self.paths]


def log_sum_exp(row: npt.NDArray[np.float32]) -> float:
    """log of the sum of exp over one row, all of it in float64."""
    wide = row.astype(np.float64)
    largest = wide.max()
    return float(largest + np.log(np.exp(wide - largest).sum()))


def top_k_log_probs(
    logits: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Log-probs and ids, both [depth, k], of the k largest logits of each row.

    Equal logits rank by lower id.
    """
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    lse = np.array([log_sum_exp(row) for row in logits], np.float32)[:, None]
    return np.take_along_axis(logits, ids, axis=1) - lse, ids.astype(np.int32)


def build_tree(
    log_probs: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.int32],
    budget: int,
    *,
    chain_seed: bool = False,
) -> ReferenceTree:
    """Best-first search over log_probs and token_ids [depth, k].

    Ranks of log-prob -inf are never used. Path sums are float64. With chain_seed, paths
    of rank 0 alone come before all others.
    """
    score = log_probs.astype(np.float64).tolist()
    depth, k = log_probs.shape
    rows: dict[RankPath, int] = {(): 0}
    parents = [-1]
    totals: list[float] = []
    heap: list[tuple[bool, float, RankPath]] = []

    def push(total: float, path: RankPath) -> None:
        if total > -np.inf:
            heapq.heappush(heap, (chain_seed and any(path), -total, path))

    if depth and k:
        push(score[0][0], (0,))
    while heap and len(rows) <= budget:
        _, negated, path = heapq.heappop(heap)
        total = -negated
        totals.append(total)
        parents.append(rows[path[:-1]])
        rows[path] = len(rows)
        at, rank = len(path) - 1, path[-1]
        if rank + 1 < k:
            push(total - score[at][rank] + score[at][rank + 1], (*path[:-1], rank + 1))
        if len(path) < depth:
            push(total + score[at + 1][0], (*path, 0))
    paths = list(rows)[1:]
    tokens = [int(token_ids[len(path) - 1, path[-1]]) for path in paths]
    return ReferenceTree(paths, tokens, parents, totals)


def best_prefixes(log_probs: npt.NDArray[np.float32], budget: int) -> list[RankPath]:
    """The definition itself: every prefix there is, best first, ties by rank path.

    Sums from the root down, so it can differ from the search by rounding: compare them
    on log-probs whose sums are exact.
    """
    score = log_probs.astype(np.float64)
    depth, k = log_probs.shape
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(k), repeat=length) for length in range(1, depth + 1)
    )
    totals = [(sum(score[i, rank] for i, rank in enumerate(path)), path) for path in prefixes]
    possible = sorted((-total, path) for total, path in totals if total > -np.inf)
    return [path for _, path in possible[:budget]]


def attends(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[rows, rows]: whether row i attends row j."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, row] = True
    return mask


def walk(
    token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]
) -> tuple[list[int], int]:
    """The accepted rows, root included, and the bonus token."""
    accepted = [0]
    while True:
        row = accepted[-1]
        children = [child for child, parent in enumerate(parents) if parent == row]
        matching = [child for child in children if token_ids[child - 1] == choices[row]]
        if not matching:
            return accepted, choices[row]
        accepted.append(matching[0])
