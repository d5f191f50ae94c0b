"""What every implementation of expert routing is given; README.md defines the arithmetic."""

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """How a row's router logits choose its experts and their weights.

    top_k: experts per row. scores: what logits become. normalize: divide the chosen
    scores by their sum. scale: then multiply them. groups, top_groups: only experts of
    the best ``top_groups`` of ``groups`` equal runs can be chosen.

    Raises:
        ValueError: the numbers do not fit each other; the message names both.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups {self.top_groups} of {self.groups} groups")
        if self.groups > 1 and self.group_size < 2:
            raise ValueError(f"{self.groups} groups of {self.experts} experts hold fewer than two")
        candidates = self.top_groups * self.group_size
        if not 1 <= self.top_k <= candidates:
            raise ValueError(f"top_k {self.top_k} of {candidates} candidate experts")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups
