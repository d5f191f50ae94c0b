"""Checkpoints of FP8 in blocks of 128 x 128, as transformers, DeepSeek and Qwen write them."""

import json
from pathlib import Path
from typing import Any

import torch

from engines import write_target

BLOCK = 128
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
}


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in e4m3, and the scales [ceil(out / 128), ceil(in / 128)]."""
    grid = [
        torch.stack([part.float().abs().max() / 448 for part in rows.split(BLOCK, dim=1)])
        for rows in weight.split(BLOCK)
    ]
    scale = torch.stack(grid)
    return (weight.float() / spread(scale, weight)).to(torch.float8_e4m3fn), scale


def spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each block's scale over the block."""
    rows, columns = weight.shape
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[:rows, :columns]


def stored_in_blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Attention and experts quantized; the first layer's MLP, routers and the head are not, and
    only two of those are listed in ``QUANTIZATION``."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and "layers.0.mlp" not in name:
            stored[name], stored[f"{name}_scale_inv"] = in_blocks(tensor)
        else:
            stored[name] = tensor
    return stored


def write_in_blocks(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], **changes: Any
) -> Path:
    """A directory of such tensors; ``changes``: to its quantization_config."""
    write_target(directory, tensors, config)
    file = directory / "config.json"
    described = json.loads(file.read_text()) | {"quantization_config": QUANTIZATION | changes}
    file.write_text(json.dumps(described))
    return directory
