"""Vectors that experts' inputs are multiplied by (AWQ): one for all experts of a layer.

ModelOpt averages those of Qwen3-MoE over the experts and over gate and up, so that a layer's
input is scaled once. Experts with vectors of their own, as it leaves them in GLM, are refused.
"""

import re

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.headers import PRE_QUANT_SCALE
from trtree.build.checkpoint.reader import Checkpoint

_VECTOR = re.compile(rf"(?P<experts>.+\.experts)\.\d+\.(?P<leaf>\w+)\.{PRE_QUANT_SCALE}")


def check(checkpoint: Checkpoint) -> None:
    """All experts of a layer scale what they read alike.

    Raises:
        CheckpointError: naming two vectors that differ.
    """
    first: dict[tuple[str, bool], tuple[str, torch.Tensor]] = {}
    for name in checkpoint.names():
        match = _VECTOR.fullmatch(name)
        if match is None:
            continue
        vector = checkpoint.tensor(name)
        key = (match["experts"], match["leaf"] == "down_proj")
        other, expected = first.setdefault(key, (name, vector))
        if not torch.equal(vector, expected):
            raise CheckpointError(
                f"{checkpoint.info(name).file}: tensor {name} is not {other}: experts that scale "
                "their inputs each by a vector of its own are not supported; export the experts "
                "without AWQ"
            )
