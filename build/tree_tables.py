"""Draft trees of a fixed shape: Medusa choices and the tables derived from them.

A node is a rank path: (1, 0) is the drafter's best token at depth 2 below its second
best at depth 1. `choices` are the rank paths of all nodes, the root left out. The tables
have the fields and the order that TensorRT-LLM's Medusa tables had: breadth-first by
depth, lexicographic within a depth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
import numpy.typing as npt

from trtree.plugins.ddtree import build_tree_from_top_k

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class MedusaTables:
    """What a verify pass needs to know of a static tree with n nodes, d levels, l leaves."""

    topks: list[int]
    """[d]: ranks used at each depth, the largest plus 1."""
    tree_ids: npt.NDArray[np.int32]
    """[n + 1]: 0 for the root, else 1 + sum(topks of the depths above) + rank."""
    position_offsets: npt.NDArray[np.int32]
    """[n + 1]: depth, the root's being 0."""
    paths: npt.NDArray[np.int32]
    """[l, d + 1]: rows from the root to each leaf, in lexicographic order, padded with -1."""
    packed_mask: npt.NDArray[np.int32]
    """[n + 1, ceil((n + 1) / 32)]: bit j % 32 (from the lowest) of word j // 32 in row i is
    set where row i attends row j."""

    def to_json(self) -> dict[str, list[int] | list[list[int]]]:
        """The fields as lists that `json.dumps` takes."""
        return {
            "topks": self.topks,
            "tree_ids": self.tree_ids.tolist(),
            "position_offsets": self.position_offsets.tolist(),
            "paths": self.paths.tolist(),
            "packed_mask": self.packed_mask.tolist(),
        }


def medusa_tables(choices: Iterable[Sequence[int]]) -> MedusaTables:
    """The tables of a static tree. choices: a rank path for each node, in any order.

    Raises ValueError, naming the path, for an empty one, a negative rank, a duplicate,
    and a path whose prefix is missing.
    """
    nodes = sorted(_checked(choices), key=lambda path: (len(path), path))
    depth = len(nodes[-1]) if nodes else 0
    topks = [1 + max(path[-1] for path in nodes if len(path) == d + 1) for d in range(depth)]
    first_id = np.cumsum([1, *topks])
    rows = {path: row for row, path in enumerate([(), *nodes])}

    seen = [1]  # per row, the rows it attends as bits of an integer
    for row, path in enumerate(nodes, start=1):
        seen.append(seen[rows[path[:-1]]] | 1 << row)
    inner = {path[:-1] for path in nodes}
    paths = [
        [rows[leaf[:d]] if d <= len(leaf) else -1 for d in range(depth + 1)]
        for leaf in sorted(rows)
        if leaf not in inner
    ]
    return MedusaTables(
        topks=topks,
        tree_ids=np.array([0, *(first_id[len(p) - 1] + p[-1] for p in nodes)], np.int32),
        position_offsets=np.array([len(path) for path in rows], np.int32),
        paths=np.array(paths, np.int32),
        packed_mask=_packed(seen),
    )


def choices_from_log_probs(log_probs: npt.ArrayLike, budget: int) -> list[RankPath]:
    """The static tree of `budget` nodes that DDTree builds from calibrated marginals.

    log_probs: float [depth, k], the mean log-prob of each rank at each depth over a
    calibration run, rounded here to float32; no row may increase. Most probable path
    first. Raises ValueError as `trtree.plugins.ddtree.build_tree_from_top_k` does.
    """
    means = np.asarray(log_probs)
    if means.ndim != 2:
        raise ValueError(f"log_probs must be [depth, k], not of shape {means.shape}")
    if means.dtype.kind == "f":
        means = means.astype(np.float32)
    # With ranks in place of tokens, a node's token is its own rank.
    ranks = np.broadcast_to(np.arange(means.shape[-1], dtype=np.int32), means.shape)
    tree = build_tree_from_top_k(means, ranks, budget)
    paths: list[RankPath] = [()]
    for rank, parent in zip(tree.token_ids.tolist(), tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def choices_to_json(choices: Iterable[Sequence[int]]) -> list[list[int]]:
    """The list of lists that `speculative_config.medusa_choices` holds."""
    return [list(path) for path in _checked(choices)]


def _checked(choices: Iterable[Sequence[int]]) -> list[RankPath]:
    paths = [tuple(map(index, path)) for path in choices]
    known: set[RankPath] = {()}
    for path in paths:
        if not path:
            raise ValueError("choice []: the root is not listed")
        if min(path) < 0:
            raise ValueError(f"choice {list(path)}: rank {min(path)} is negative")
        if path in known:
            raise ValueError(f"choice {list(path)} is there twice")
        known.add(path)
    for path in paths:
        if path[:-1] not in known:
            raise ValueError(
                f"choice {list(path)} has no parent: add {list(path[:-1])}, "
                "every node must be listed"
            )
    return paths


def _packed(rows: Sequence[int]) -> npt.NDArray[np.int32]:
    words = (len(rows) + 31) // 32
    data = b"".join(bits.to_bytes(4 * words, "little") for bits in rows)
    return np.frombuffer(data, "<i4").reshape(len(rows), words).astype(np.int32)
