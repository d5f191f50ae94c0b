"""ModelOpt's own exports of hybrid targets, read and run."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dequantized import dequantized
from engines import write_tokenizer
from random_hybrid import hybrid_config, random_hybrid, transformers_model
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine

CONFIGS = {
    "next": hybrid_config("Qwen3NextForCausalLM", moe_intermediate_size=64),
    "3.5": hybrid_config("Qwen3_5ForCausalLM"),
    "3.5-moe": hybrid_config("Qwen3_5MoeForCausalLM", moe_intermediate_size=64),
}


def export(config: dict[str, Any], directory: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    tensors = random_hybrid(config, dtype=torch.bfloat16)
    model = transformers_model(config, tensors).to(torch.bfloat16)
    token_ids = torch.randint(0, 80, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), lambda m: m(token_ids))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(directory))
    write_tokenizer(directory, config["vocab_size"])


@pytest.mark.parametrize("family", CONFIGS)
def test_an_export_is_read_and_run(tmp_path: Path, family: str) -> None:
    """Its weights alone against transformers with the same weights expanded; then as it is."""
    directory = tmp_path / "checkpoint"
    export(CONFIGS[family], directory)
    checkpoint = Checkpoint.open(directory)
    quantized = {n for n in checkpoint.names() if n.endswith(".weight_scale")}
    assert any("linear_attn" in name for name in quantized)
    theirs = transformers_model(CONFIGS[family], dequantized(checkpoint))
    token_ids = torch.randint(0, 80, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(token_ids[None]).logits[0].numpy()

    def logits(backend: str, activations: Any) -> np.ndarray:
        output = tmp_path / f"{backend}.{activations}"
        options = BuildOptions(
            checkpoint=directory, output=output, backend=backend, activations=activations
        )
        _, engine = open_engine(builder.write(builder.describe(options)))
        return prefill(engine, _core.Sequence(1, 0, 0, list(range(3))), token_ids.tolist())

    np.testing.assert_allclose(logits("reference", "float32"), expected, rtol=0, atol=1e-4)
    w4a4 = logits("cpu", None)
    difference = np.linalg.norm(w4a4 - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0 < np.median(difference) < 0.5  # four-bit activations
