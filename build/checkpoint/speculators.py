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
# What maps a reduced vocabulary: offsets of its ids, and which of the target's it has.
_MAPS = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}
# Used in training only, or checked to say nothing (d2t: unless the vocabulary is reduced).
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of this format."""
    return any(key in config for key in _KEYS)


def restated(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The same drafter's config.json as z-lab would write it, without num_target_layers.

    Raises:
        CheckpointError: another algorithm, or a field that is missing, of the wrong type, or
            not supported.
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
        "draft_vocab_size": _draft_vocab(config, layers["vocab_size"]),
    }


def check_copies(drafter: Checkpoint, target: Checkpoint) -> None:
    """Copies of the target's embedding and head, in either format, must be just that; they
    are not stored. A head of a reduced vocabulary is the drafter's own.

    Raises:
        CheckpointError: a copy differs.
    """
    reduced = (
        is_speculators(drafter.config)
        and _draft_vocab(drafter.config, _vocabulary(drafter.config)) is not None
    )
    for module, original in _COPIES.items():
        name = f"{module}.weight"
        if name not in drafter or (reduced and module == "lm_head"):
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
        CheckpointError: d2t or t2d are of another type than the library writes, or say something
            else than config.json, or each other.
    """
    copies = [f"{module}.weight" for module in _COPIES]
    if not is_speculators(checkpoint.config):
        return copies
    draft_vocab = _draft_vocab(checkpoint.config, _vocabulary(checkpoint.config))
    for name, dtypes in _MAPS.items():
        if name in checkpoint and (info := checkpoint.info(name)).dtype not in dtypes:
            found, *expected = (str(t).removeprefix("torch.") for t in (info.dtype, *dtypes))
            raise CheckpointError(
                f"{info.file}: tensor {name} is {found}, expected {' or '.join(expected)}; export "
                "again"
            )
    if draft_vocab is not None:
        _check_maps(checkpoint, draft_vocab)
        return [name for name in (*IGNORED, "embed_tokens.weight") if name != "d2t"]
    for name, identity in (("d2t", 0), ("t2d", 1)):
        if name in checkpoint and not bool((checkpoint.tensor(name) == identity).all()):
            raise CheckpointError(
                f"{checkpoint.info(name).file}: tensor {name} maps a reduced draft vocabulary, but "
                "config.json's draft_vocab_size is the target's; set it to d2t's length"
            )
    return [*IGNORED, *copies]


def _check_maps(checkpoint: Checkpoint, draft_vocab: int) -> None:
    """d2t [draft_vocab]: what is added to a drafted id. Ids rise, so that of equal logits the
    lower one is first in both vocabularies. t2d [vocab]: which ids are drafted."""
    if "d2t" not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.directory}: has no d2t, which maps the {draft_vocab} ids of "
            "draft_vocab_size to the target's"
        )
    offsets, file = checkpoint.tensor("d2t"), checkpoint.info("d2t").file
    if offsets.shape != (draft_vocab,):
        raise CheckpointError(
            f"{file}: tensor d2t has shape {list(offsets.shape)}, draft_vocab_size is {draft_vocab}"
        )
    ids, vocab = offsets.long() + torch.arange(draft_vocab), _vocabulary(checkpoint.config)
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise CheckpointError(
            f"{file}: tensor d2t maps drafted ids to {int(ids.min())}..{int(ids.max())}; expected "
            f"rising ids of the target's {vocab}"
        )
    if "t2d" not in checkpoint:
        return
    drafted = torch.zeros(vocab, dtype=torch.bool)
    drafted[ids] = True
    if not torch.equal(checkpoint.tensor("t2d").bool(), drafted):
        raise CheckpointError(
            f"{checkpoint.info('t2d').file}: tensor t2d names other tokens than d2t's "
            f"{draft_vocab}; export again"
        )


def _vocabulary(config: Mapping[str, Any]) -> int:
    """The target's vocabulary, as a drafter's file states it."""
    layers = config["transformer_layer_config"]
    return int(layers.get("vocab_size") or QWEN3_DEFAULTS["vocab_size"])


def _draft_vocab(config: Mapping[str, Any], vocab: int) -> int | None:
    """None where the drafter has the target's vocabulary."""
    size = config.get("draft_vocab_size")
    return None if size is None or size == vocab else int(size)


def _check_fields(config: Mapping[str, Any], layers: Mapping[str, Any], where: Path) -> None:
    vocab = config.get("draft_vocab_size")
    if vocab is not None and (type(vocab) is not int or not 0 < vocab <= layers["vocab_size"]):
        raise CheckpointError(
            f"{where}: draft_vocab_size {vocab!r} is not between 1 and the target's vocab_size "
            f"{layers['vocab_size']}"
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
