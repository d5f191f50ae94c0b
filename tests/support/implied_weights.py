"""Weights that are what an op's shape implies: graphs without a checkpoint."""

from trtree.build.network.network import Owner
from trtree.build.network.weight_source import WeightInfo


class ImpliedWeights:
    """A WeightSource: every weight is dense, float32, and of the implied shape."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        return WeightInfo("dense", implied, "float32")
