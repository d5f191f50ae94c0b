"""What users have: checkpoints on disk, read, checked and streamed.

``Checkpoint.open`` reads a Hugging Face directory; ``read_drafter`` a DFlash drafter's
configuration; ``write.py`` makes checkpoints for tests and benchmarks.
"""

from trtree.build.checkpoint.dflash_config import DrafterConfig, read_drafter
from trtree.build.checkpoint.errors import CheckpointError, NoWeightsError
from trtree.build.checkpoint.headers import LinearInfo
from trtree.build.checkpoint.linear import LinearWeight, StoredLinear
from trtree.build.checkpoint.quantized import QuantizedCheckpoint
from trtree.build.checkpoint.reader import Checkpoint
from trtree.build.checkpoint.scheme import QuantizationConfig
from trtree.build.checkpoint.shard import TensorInfo

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DrafterConfig",
    "LinearInfo",
    "LinearWeight",
    "NoWeightsError",
    "QuantizationConfig",
    "QuantizedCheckpoint",
    "StoredLinear",
    "TensorInfo",
    "read_drafter",
]
