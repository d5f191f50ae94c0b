"""The demo's drafter as the speculators library saves drafters."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engines import DEMO, DEMO_VOCAB
from trtree.build.checkpoint import Checkpoint

Json = dict[str, Any]
DRAFTER_FIELDS = ("architectures", "block_size", "dflash_config", "num_target_layers")


def restate(fields: Json, **changes: Any) -> Json:
    """A z-lab config.json as speculators writes it, its defaults included."""
    layers = {key: value for key, value in fields.items() if key not in DRAFTER_FIELDS}
    dflash = fields["dflash_config"]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "demo"}},
        "transformer_layer_config": layers,
        "draft_vocab_size": layers["vocab_size"],
        "block_size": fields["block_size"],
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "sliding_window_non_causal": False,
        "projector_type": "dflash",
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
        "shift_label": False,
        "sample_from_anchor": False,
    } | changes


def reduced(ids: torch.Tensor, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a drafter of these target ids has beside the demo's tensors."""
    drafted = torch.zeros(DEMO_VOCAB, dtype=torch.bool)
    drafted[ids] = True
    head = Checkpoint.open(DEMO / "target_nvfp4").tensor("model.embed_tokens.weight")
    offsets = ids - torch.arange(len(ids))
    return {"lm_head.weight": head[ids].clone(), "d2t": offsets, "t2d": drafted} | changes


def write_speculators(
    path: Path, extra: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """The demo's drafter in this format, with tensors added and fields changed."""
    path.mkdir()
    fields = json.loads((DEMO / "drafter" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(restate(fields, **changes)))
    tensors = load_file(DEMO / "drafter" / "model.safetensors")
    save_file(tensors | (extra or {}), path / "model.safetensors")
    return path
