"""ModelOpt's own exports of hybrid targets, read and run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dequantized import dequantized
from engines import write_tokenizer
from oracle import check_w4a4_export
from random_hybrid import hybrid_config, random_hybrid, transformers_model
from trtree.build.checkpoint import Checkpoint

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
    check_w4a4_export(directory, theirs, tmp_path)
