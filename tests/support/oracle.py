"""The reference lowering of a whole target against logits from elsewhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import write_target
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine

# In float32, prefill and single steps alike.
TOLERANCE = 1e-4
TOKENS = 48


def reference_engine(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> _core.Engine:
    """The reference engine of a checkpoint with these tensors."""
    options = BuildOptions(
        checkpoint=write_target(folder / "checkpoint", tensors, config),
        output=folder / "engine",
        backend="reference",
        page_size=4,
    )
    return open_engine(builder.write(builder.describe(options)))[1]


def check_logits(
    engine: _core.Engine,
    model: Callable[[torch.Tensor], Any],
    *,
    chunks: Sequence[int] = (40,),
    vocab: int = 80,
    tokens: int = TOKENS,
) -> None:
    """Random tokens in ``chunks``, then one by one, give the logits of transformers' model."""
    token_ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0].numpy()
    assert expected.std() > 0.1  # the network says something
    pages = list(range(tokens // 4))
    start = 0
    for size in (*chunks, *[1] * (tokens - sum(chunks))):
        end = start + size
        at = _core.Sequence(1, 3, start, pages)
        logits = prefill(engine, at, token_ids[start:end].tolist())
        np.testing.assert_allclose(logits, expected[start:end], rtol=0, atol=TOLERANCE)
        start = end


def check_w4a4_export(checkpoint: Path, model: Callable[[torch.Tensor], Any], folder: Path) -> None:
    """An NVFP4 checkpoint against transformers with the same weights expanded: equal with
    float32 activations on the reference engine, near as it is on the CPU engine."""
    token_ids = torch.randint(0, 80, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0].numpy()

    def logits(backend: str, activations: Any) -> np.ndarray:
        output = folder / f"{backend}.{activations}"
        options = BuildOptions(
            checkpoint=checkpoint, output=output, backend=backend, activations=activations
        )
        _, engine = open_engine(builder.write(builder.describe(options)))
        return prefill(engine, _core.Sequence(1, 0, 0, list(range(3))), token_ids.tolist())

    np.testing.assert_allclose(logits("reference", "float32"), expected, rtol=0, atol=TOLERANCE)
    w4a4 = logits("cpu", None)
    difference = np.linalg.norm(w4a4 - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0 < np.median(difference) < 0.5  # four-bit activations
