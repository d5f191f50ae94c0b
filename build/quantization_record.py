"""What a manifest says of the checkpoints' quantization, and what the log does."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trtree.build.checkpoint import Checkpoint
from trtree.build.checkpoint.headers import is_factor
from trtree.build.checkpoint.quantized import CONFIG as BY_BUILDER
from trtree.build.checkpoint.scheme import ALGORITHMS, W4A8
from trtree.build.network.network import Owner, Weight
from trtree.build.source import BuildSource, SourceWithWeights

log = logging.getLogger(__name__)


def quantization_record(
    source: BuildSource, owner: Owner, weights: Iterable[Weight]
) -> dict[str, Any] | None:
    """One checkpoint's quantization as the manifest has it; None for a plain one.

    algorithm: the checkpoint's, or the builder's own (``by``). linears: how many modules
    are stored in which way. kv_cache: the algorithm that the cache was calibrated for;
    ``kv_cache.py`` says what became of the target's.
    """
    found = source.quantization(owner)
    if found is None:
        return None
    record: dict[str, Any] = {
        "algorithm": found.algorithm,
        "by": "builder" if found is BY_BUILDER else "checkpoint",
        "kv_cache": found.kv_cache,
    }
    checkpoint = source.checkpoint(owner) if isinstance(source, SourceWithWeights) else None
    if isinstance(checkpoint, Checkpoint):
        record["linears"] = _linears(checkpoint, owner, weights)
    return record


def warn_of_differences(record: dict[str, Any] | None, owner: str) -> None:
    """Log where the engine is not what the checkpoint was calibrated for."""
    if record is None:
        return
    widened = {
        name: count
        for name, count in record.get("linears", {}).items()
        if name in ALGORITHMS and ALGORITHMS[name].weights == "fp8"
    }
    for name, count in widened.items():
        log.warning(
            "%s: %d %s linears are widened, and their inputs are not rounded to FP8",
            owner,
            count,
            name,
        )
    if count := record.get("linears", {}).get(W4A8):
        log.warning("%s: the inputs of %d %s linears are not rounded to FP8", owner, count, W4A8)
    if owner == "drafter" and record["kv_cache"] is not None:
        log.warning(
            "%s: its KV cache was calibrated for %s, and is kept in the engine's own type",
            owner,
            record["kv_cache"],
        )


def _linears(checkpoint: Checkpoint, owner: Owner, weights: Iterable[Weight]) -> dict[str, int]:
    modules = {
        module
        for weight in weights
        if weight.owner == owner and len(weight.shape) > 1
        for module in weight.modules
        if not is_factor(module)
    }
    infos = [checkpoint.linear_info(module) for module in modules]
    kinds = (info.algorithm or str(info.dtype).removeprefix("torch.") for info in infos)
    return dict(sorted(Counter(kinds).items()))
