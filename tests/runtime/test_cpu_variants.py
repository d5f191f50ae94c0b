"""What the demo does not have, on the CPU engine: against the reference, and bitwise.

Untied heads, biases, sliding windows, other head sizes and group sizes, RoPE scaling,
weights of every dtype, and the quantization algorithms.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import tiny_config, write_tokenizer
from random_target import random_target
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import QuantizationConfig
from trtree.build.checkpoint.write import quantize_state_dict, write_checkpoint
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine

VOCAB = 80
WINDOW = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}


def write_target(
    directory: Path, config: dict[str, Any], dtype: torch.dtype, algorithm: str | None
) -> Path:
    tensors = random_target(config, dtype=dtype).items()
    quantization = None
    if algorithm:
        exclusions = ("lm_head", "model.embed_tokens")
        quantization = QuantizationConfig(algorithm, exclusions)
        tensors = quantize_state_dict(tensors, exclude=exclusions, algorithm=algorithm)
    write_checkpoint(directory, tensors, config, quantization=quantization)
    write_tokenizer(directory, config["vocab_size"])
    return directory


def load(tmp_path: Path, checkpoint: Path, backend: str) -> _core.Engine:
    output = tmp_path / backend
    options = BuildOptions(
        checkpoint=checkpoint, output=output, backend=backend, page_size=4, kv_tokens=512
    )
    return open_engine(builder.write(builder.describe(options)))[1]


CASES: dict[str, tuple[dict[str, Any], torch.dtype, str | None]] = {
    "untied-bf16": ({}, torch.bfloat16, None),
    "tied-fp32": ({"tie_word_embeddings": True}, torch.float32, None),
    "fp16": ({}, torch.float16, None),
    "bias": ({"attention_bias": True}, torch.bfloat16, None),
    "window": (WINDOW, torch.bfloat16, None),
    "window-nvfp4": (WINDOW, torch.bfloat16, "W4A16_NVFP4"),
    "head-128": ({"head_dim": 128, "num_attention_heads": 2}, torch.bfloat16, None),
    "group-4": ({"num_key_value_heads": 1}, torch.bfloat16, None),
    "group-3": ({"num_attention_heads": 6}, torch.bfloat16, None),
    "yarn": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        torch.bfloat16,
        None,
    ),
    "nvfp4": ({}, torch.bfloat16, "NVFP4"),
    "w4a16-bias": ({"attention_bias": True}, torch.bfloat16, "W4A16_NVFP4"),
}


@pytest.mark.parametrize("case", CASES)
def test_variant(tmp_path: Path, case: str) -> None:
    changes, dtype, algorithm = CASES[case]
    checkpoint = write_target(tmp_path / "checkpoint", tiny_config(**changes), dtype, algorithm)
    rng = random.Random(0)
    pages = rng.sample(range(128), 128)
    tokens, parents = random_tree(rng, 40, VOCAB)
    prefix = [rng.randrange(VOCAB) for _ in range(29)]
    logits = {}
    for backend in ("cpu", "reference"):
        engine = load(tmp_path, checkpoint, backend)
        prefill(engine, _core.Sequence(1, 0, 0, pages[:60]), prefix)
        at = _core.Sequence(1, 0, len(prefix), pages[:60])
        (logits[backend],) = run_rows(engine, [(at, tokens, parents)])
    if algorithm != "NVFP4":  # W4A4 is chaotic from end to end
        scale = np.abs(logits["reference"]).max()
        tolerance = 1e-2 if algorithm else 1e-4  # bf16 rounding of inputs may flip a bit
        np.testing.assert_allclose(
            logits["cpu"], logits["reference"], rtol=0, atol=tolerance * scale
        )

    engine = load(tmp_path / "alone", checkpoint, "cpu")
    for row in rng.sample(range(41), 5):
        path = [*prefix, *(tokens[r] for r in path_to(row, parents))]
        for position, token in enumerate(path):
            at = _core.Sequence(9, 0, position, pages[60:])
            alone = prefill(engine, at, [token])
        assert logits["cpu"][row].tobytes() == alone[0].tobytes()
