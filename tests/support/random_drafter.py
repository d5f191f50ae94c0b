"""DFlash drafters with random weights for tiny targets: their drafts are seldom right, which
is what a test of losslessness wants."""

from pathlib import Path
from typing import Any

import torch

from engines import tiny_config
from random_target import random_target
from trtree.build.checkpoint.write import write_checkpoint


def random_drafter(directory: Path, target: dict[str, Any], *, block_size: int = 4) -> Path:
    """A drafter of one layer that sees both layers of ``target``, a config.json."""
    config = tiny_config(
        architectures=["DFlashDraftModel"],
        block_size=block_size,
        dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 1]},
        num_hidden_layers=1,
        num_target_layers=target["num_hidden_layers"],
        vocab_size=target["vocab_size"],
    )
    generator = torch.Generator().manual_seed(7)
    hidden = config["hidden_size"]
    own = random_target(config, dtype=torch.bfloat16, seed=7)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in own.items()
        if "embed_tokens" not in name and "lm_head" not in name
    }
    fc = 0.15 * torch.randn(hidden, 2 * hidden, generator=generator)
    norm = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors |= {"fc.weight": fc.bfloat16(), "hidden_norm.weight": norm.bfloat16()}
    write_checkpoint(directory, tensors.items(), config)
    return directory
