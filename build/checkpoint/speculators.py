"""DFlash drafters as the speculators library saves them, restated in z-lab's terms.

Its config.json nests the transformer, counts target layers from 1 (the residual stream
before layer n is that after layer n - 1) and may carry copies of the target's embedding
and head. Source of the format: its ``DFlashSpeculatorConfig``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.reader import Checkpoint

_KEYS = ("speculators_model_type", "transformer_layer_config", "speculators_config")
# Of transformers' Qwen3Config: older releases leave out what equals them.
QWEN3_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
}
# Fields that change the arithmetic, with the value that leaves it alone.
_NEUTRAL = {"sample_from_anchor": False, "shift_label": False}
# Copies of the target's weights: the drafter's module, and the target's.
_COPIES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
# Used in training only, or checked to say nothing.
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of this format."""
    return any(key in config for key in _KEYS)


def restated(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The same drafter's config.json as z-lab would write it, without num_target_layers.

    Raises:
        CheckpointError: another algorithm, a reduced draft vocabulary, or a field that is
            missing, of the wrong type, or not supported.
    """
    kind = config.get("speculators_model_type")
    projector = config.get("projector_type", "dflash")
    if kind != "dflash" or projector != "dflash":
        name = kind if kind != "dflash" else projector
        raise CheckpointError(
            f"{where}: speculators drafters of type {name!r} are not supported yet; supported: "
            "dflash"
        )
    transformer = config.get("transformer_layer_config")
    if not isinstance(transformer, dict):
        raise CheckpointError(
            f"{where}: transformer_layer_config must be an object, not {transformer!r:.80}"
        )
    if transformer.get("model_type", "qwen3") != "qwen3":
        raise CheckpointError(
            f"{where}: transformer_layer_config.model_type {transformer['model_type']!r} is not "
            "supported; supported: qwen3"
        )
    layers = {**QWEN3_DEFAULTS, **{k: v for k, v in transformer.items() if v is not None}}
    _check_fields(config, layers, where)
    dflash: dict[str, Any] = {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": _layer_ids(config.get("aux_hidden_state_layer_ids"), where),
    }
    if config.get("sliding_window_non_causal"):
        dflash["causal"] = False
    return {
        **layers,
        "architectures": ["DFlashDraftModel"],
        "block_size": config.get("block_size"),
        "dflash_config": dflash,
    }


def check_copies(drafter: Checkpoint, target: Checkpoint) -> None:
    """Copies of the target's embedding and head must be just that; they are not stored.

    Raises:
        CheckpointError: a copy differs, or the vocabulary's map is not the identity.
    """
    for module, original in _COPIES.items():
        name = f"{module}.weight"
        if not is_speculators(drafter.config) or name not in drafter:
            continue
        theirs = f"{original}.weight"
        if theirs not in target:  # a tied head
            theirs = "model.embed_tokens.weight"
        if not torch.equal(drafter.tensor(name).float(), target.tensor(theirs).float()):
            raise CheckpointError(
                f"{drafter.info(name).file}: tensor {name} is not the target's {theirs}; drafters "
                "with an embedding or head of their own are not supported"
            )


def ignored_tensors(checkpoint: Checkpoint) -> list[str]:
    """Tensors that no network uses.

    Raises:
        CheckpointError: d2t or t2d map a reduced vocabulary.
    """
    if not is_speculators(checkpoint.config):
        return []
    for name, identity in (("d2t", 0), ("t2d", 1)):
        if name in checkpoint and not bool((checkpoint.tensor(name) == identity).all()):
            raise CheckpointError(
                f"{checkpoint.info(name).file}: tensor {name} maps a reduced draft vocabulary, "
                "which is not supported yet; train the drafter on the target's vocabulary"
            )
    return [*IGNORED, *(f"{module}.weight" for module in _COPIES)]


def _check_fields(config: Mapping[str, Any], layers: Mapping[str, Any], where: Path) -> None:
    vocab = config.get("draft_vocab_size")
    if vocab is not None and vocab != layers["vocab_size"]:
        raise CheckpointError(
            f"{where}: draft_vocab_size {vocab} is not the target's vocab_size "
            f"{layers['vocab_size']}: a reduced draft vocabulary (d2t, t2d) is not supported yet"
        )
    hidden = config.get("target_hidden_size")
    if hidden is not None and hidden != layers["hidden_size"]:
        raise CheckpointError(
            f"{where}: target_hidden_size {hidden} is not the drafter's hidden_size "
            f"{layers['hidden_size']}, which is not supported"
        )
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in (None, neutral):
            raise CheckpointError(f"{where}: {key} {config[key]!r} is not supported yet")


def _layer_ids(ids: Any, where: Path) -> list[int]:
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 1 for i in ids):
        raise CheckpointError(
            f"{where}: aux_hidden_state_layer_ids {ids!r} is not a list of layer numbers that "
            "count from 1"
        )
    return [i - 1 for i in ids]
