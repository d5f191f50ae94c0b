"""A DFlash drafter's configuration, normalised and checked.

The format is z-lab's (``DFlashDraftModel``): Qwen3 fields at the top level and
drafter fields there or under ``dflash_config``; ``speculators.py`` restates the other one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtree.build.checkpoint import speculators
from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.reader import Checkpoint

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
FULL, SLIDING = "full_attention", "sliding_attention"

# Drafters that extend DFlash, by a key that only they have.
_VARIANTS = {
    "DSpark": ("markov_rank", "markov_head_type", "dspark_config"),
    "DFlash2": ("conv_kernel_size", "selector_rank", "selector_top_k"),
    "JetSpec": ("causal_head", "jetspec_config"),
    "Domino": ("gru_hidden_dim", "domino_config"),
}
# Fields that change the arithmetic, with the value that leaves it alone.
_NEUTRAL = {
    "attention_sink_bias": False,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1,
    "output_multiplier": 1,
}

LayerIds = Literal["L", "L+1", "default"]


@dataclass(frozen=True)
class DrafterConfig:
    """What distinguishes a DFlash drafter from the transformer it is made of.

    transformer: its Qwen3 configuration; layer_types, sliding_window and
        use_sliding_window agree with one another.
    block_size: slots of a draft block, the bonus token's included.
    target_layer_ids: the target layers whose outputs it sees, in concatenation order;
        zero-based, so L is Hugging Face's ``hidden_states[L + 1]``.
    layer_ids_read_as: how the file counted: "L", "L+1", or "default" when it named none.
    num_target_layers: None where the file does not say.
    causal: per layer, whether a block slot sees only the slots before it. Unless the
        file says so for all layers, sliding layers are causal and full ones are not, as
        in z-lab's model.
    draft_vocab: tokens that a head of the drafter's own knows; None: the target's head.
    """

    transformer: Mapping[str, Any]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_ids_read_as: LayerIds
    num_target_layers: int | None
    causal: tuple[bool, ...]
    draft_vocab: int | None = None

    def check_target(self, target: Mapping[str, Any]) -> None:
        """Check that the drafter was made for a target of this config.json.

        Raises:
            CheckpointError: naming the field and both values.
        """
        text = target.get("text_config", target)
        layers = text.get("num_hidden_layers")
        for field, ours, theirs in (
            ("hidden_size", self.transformer["hidden_size"], "hidden_size"),
            ("vocab_size", self.transformer["vocab_size"], "vocab_size"),
            ("num_target_layers", self.num_target_layers or layers, "num_hidden_layers"),
        ):
            if ours != text.get(theirs):
                raise CheckpointError(
                    f"the drafter's {field} is {ours}, the target's {theirs} is "
                    f"{text.get(theirs)}; use the drafter made for this target"
                )
        if isinstance(layers, int) and max(self.target_layer_ids) >= layers:
            raise CheckpointError(
                f"the drafter taps layer {max(self.target_layer_ids)} (from 0), the target has "
                f"num_hidden_layers {layers}; use the drafter made for this target"
            )


def read_drafter(checkpoint: Checkpoint) -> DrafterConfig:
    """The configuration of an opened drafter, its tensors checked against it.

    Raises:
        CheckpointError: not a DFlash drafter, a variant that is not supported, a field
            or tensor that is missing, unknown or of the wrong value or shape.
    """
    drafter = parse(checkpoint.config, checkpoint.directory / "config.json")
    drafter = _without_last_tap(checkpoint, drafter)
    _check_tensors(checkpoint, drafter)
    return drafter


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layers tapped when the file names none: even steps from 1 to num_target_layers - 3.

    Source: z-lab's ``build_target_layer_ids``.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def usual_shape(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that a drafter of the usual shape would have, for a target's (its text
    part): what plans assume where no drafter is published.

    Source of the shape: z-lab's Qwen3-8B-DFlash-b16. The layers tapped are the default ones.
    """
    hidden = target["hidden_size"]
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "qwen3",
        "block_size": 16,
        "mask_token_id": 0,
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 5,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": target["vocab_size"],
    }


def parse(config: Mapping[str, Any], where: Path) -> DrafterConfig:
    """Read a drafter's config.json; ``where`` names it in errors.

    Raises:
        CheckpointError: see ``read_drafter``.
    """
    other_format = speculators.is_speculators(config)
    if other_format:
        config = speculators.restated(config, where)
    fields = _Fields(config, where)
    _refuse_variants(fields)
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        fields.integer(key, 1)
    target_layers = None if other_format else fields.integer("num_target_layers", 1)
    ids, read_as = _target_layer_ids(fields, target_layers)
    layer_types, window = _attention(fields)
    mask = fields.integer("mask_token_id", 0)
    if mask >= config["vocab_size"]:
        raise CheckpointError(
            f"{where}: mask_token_id {mask} is outside the vocabulary of {config['vocab_size']}"
        )
    left = ("dflash_config", "draft_vocab_size")
    transformer = {key: value for key, value in config.items() if key not in left}
    transformer |= {
        "layer_types": list(layer_types),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    return DrafterConfig(
        transformer=transformer,
        block_size=fields.integer("block_size", 1),
        mask_token_id=mask,
        target_layer_ids=ids,
        layer_ids_read_as="L+1" if other_format else read_as,
        num_target_layers=target_layers,
        causal=_causal(fields, layer_types),
        draft_vocab=config.get("draft_vocab_size") if other_format else None,
    )


# Layers are listed before any tensor is looked at: more than any drafter has.
_MOST = {"num_hidden_layers": 1000}


class _Fields:
    """Fields that stand at the top level or under ``dflash_config``."""

    def __init__(self, config: Mapping[str, Any], where: Path) -> None:
        nested = config.get("dflash_config") or {}
        if not isinstance(nested, dict):
            raise CheckpointError(f"{where}: dflash_config must be an object, not {nested!r}")
        self.where = where
        self.config = config
        self._nested = nested

    def get(self, *keys: str) -> Any:
        """The value under any of these names; None if there is none.

        Raises:
            CheckpointError: it stands in two places with different values.
        """
        found = [
            (f"{prefix}{key}", level[key])
            for prefix, level in (("dflash_config.", self._nested), ("", self.config))
            for key in keys
            if level.get(key) is not None
        ]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise CheckpointError(
                    f"{self.where}: {found[0][0]} is {found[0][1]!r}, {name} is {value!r}; "
                    "correct one of them"
                )
        return found[0][1] if found else None

    def integer(self, key: str, least: int) -> int:
        """A required integer of at least ``least``, and no more than engines count to."""
        value, most = self.get(key), _MOST.get(key, 2**31 - 1)
        if type(value) is int and value > most:
            raise CheckpointError(f"{self.where}: {key} is {value}, expected at most {most}")
        if type(value) is not int or value < least:
            what = "is missing" if value is None else f"is {value!r}"
            raise CheckpointError(
                f"{self.where}: {key} {what}, expected an integer of at least {least}"
            )
        return value

    def flag(self, *keys: str) -> bool | None:
        """A boolean, or None where absent."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {keys[0]} is {value!r}, expected true or false")
        return value


def _refuse_variants(fields: _Fields) -> None:
    architectures = fields.config.get("architectures") or []
    projector = str(fields.get("projector_type") or "").lower()
    for variant, keys in _VARIANTS.items():
        named = any(variant.lower() in str(name).lower() for name in architectures)
        key = next((key for key in keys if fields.get(key)), None)
        if named or key or projector == variant.lower():
            reason = f"key {key}" if key else f"architectures {architectures}"
            raise CheckpointError(
                f"{fields.where}: {variant} drafters ({reason}) are not supported yet; "
                "supported: DFlash"
            )
    if not any(name in ARCHITECTURES for name in architectures):
        raise CheckpointError(
            f"{fields.where}: architectures {architectures} is no DFlash drafter; "
            f"expected {ARCHITECTURES[0]}"
        )
    for key, neutral in _NEUTRAL.items():
        value = fields.get(key)
        if value is not None and value != neutral:
            raise CheckpointError(f"{fields.where}: {key} {value!r} is not supported yet")


def _without_last_tap(checkpoint: Checkpoint, drafter: DrafterConfig) -> DrafterConfig:
    """speculators may list the layer whose states it trained against after those it taps."""
    if drafter.layer_ids_read_as != "L+1" or not checkpoint.has_weight("fc"):
        return drafter
    taps = checkpoint.linear_info("fc").in_features / drafter.transformer["hidden_size"]
    ids = drafter.target_layer_ids
    return replace(drafter, target_layer_ids=ids[:-1]) if taps == len(ids) - 1 else drafter


def _target_layer_ids(
    fields: _Fields, target_layers: int | None
) -> tuple[tuple[int, ...], LayerIds]:
    ids = fields.get("target_layer_ids")
    read_as: LayerIds = "default" if ids is None else "L"
    if ids is None:
        assert target_layers is not None  # only z-lab's files leave the ids out
        ids = default_target_layer_ids(target_layers, fields.integer("num_hidden_layers", 1))
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"{fields.where}: target_layer_ids {ids!r} is not a list of layer numbers"
        )
    if target_layers is None:
        return tuple(ids), read_as
    if outside := [i for i in ids if not 0 <= i < target_layers]:
        origin = " (the default, as the file names none)" if read_as == "default" else ""
        raise CheckpointError(
            f"{fields.where}: target_layer_ids {ids}{origin} has {outside} outside "
            f"0..{target_layers - 1} (num_target_layers {target_layers}); z-lab's ids count "
            "from 0, speculators' from 1"
        )
    return tuple(ids), read_as


def _attention(fields: _Fields) -> tuple[tuple[str, ...], int | None]:
    """Per layer full or sliding attention, and the window of the sliding ones in tokens."""
    layers = fields.integer("num_hidden_layers", 1)
    types = fields.config.get("layer_types")
    if types is None:
        types = _derived_layer_types(fields, layers)
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(
            f"{fields.where}: layer_types {types!r} does not list num_hidden_layers {layers} layers"
        )
    if unknown := sorted({str(t) for t in types} - {FULL, SLIDING}):
        raise CheckpointError(
            f"{fields.where}: layer_types {unknown} are not supported; supported: {FULL}, {SLIDING}"
        )
    if fields.flag("use_swa") and SLIDING not in types:
        types = [SLIDING] * layers  # NVIDIA's exporter lists such layers as full
    if SLIDING not in types:
        return tuple(types), None
    for key in ("use_swa", "use_sliding_window"):
        if fields.flag(key) is False:
            raise CheckpointError(
                f"{fields.where}: {key} is false, but layer_types has {SLIDING}; correct one"
            )
    window = fields.get("swa_window_size", "sliding_window")
    if type(window) is not int or window < 1:
        raise CheckpointError(
            f"{fields.where}: sliding_window is {window!r}, but layer_types has {SLIDING}; "
            "expected a positive number of tokens"
        )
    return tuple(types), window


def _derived_layer_types(fields: _Fields, layers: int) -> list[str]:
    """transformers' rule for Qwen3 files that list no types (configuration_qwen3.py)."""
    windowed = fields.flag("use_sliding_window") and (
        "sliding_window" not in fields.config or fields.config["sliding_window"] is not None
    )
    first = fields.config.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise CheckpointError(
            f"{fields.where}: max_window_layers must be a non-negative integer, not {first!r}"
        )
    return [SLIDING if windowed and i >= first else FULL for i in range(layers)]


def _causal(fields: _Fields, layer_types: Sequence[str]) -> tuple[bool, ...]:
    stated = fields.flag("causal", "is_causal")
    return tuple(kind == SLIDING if stated is None else stated for kind in layer_types)


def _check_tensors(checkpoint: Checkpoint, drafter: DrafterConfig) -> None:
    """11 tensors per layer and 3 more, each of the shape the configuration implies."""
    fields = _Fields(drafter.transformer, checkpoint.directory / "config.json")
    shapes = _shapes(fields, len(drafter.target_layer_ids))
    if drafter.draft_vocab:
        shapes["lm_head"] = (drafter.draft_vocab, fields.integer("hidden_size", 1))
    missing = [f"{module}.weight" for module in shapes if not checkpoint.has_weight(module)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory}: the drafter lacks {len(missing)} of {len(shapes)} tensors: "
            f"{', '.join(missing[:5])}"
        )
    for module, shape in shapes.items():
        name = f"{module}.weight"
        stored = checkpoint.weight_info(module)
        actual = stored.shape
        if len(shape) == 2:
            info = checkpoint.linear_info(module)
            actual = (info.out_features, info.in_features)
        if actual != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name} has shape {list(actual)}, "
                f"config.json implies {list(shape)}"
            )
    used = [*shapes, "d2t"] if drafter.draft_vocab else shapes
    checkpoint.check_coverage(used, speculators.ignored_tensors(checkpoint))


def _shapes(fields: _Fields, taps: int) -> dict[str, tuple[int, ...]]:
    """Module -> the shape of its weight, [out_features, in_features] or [features]."""
    hidden, ffn = fields.integer("hidden_size", 1), fields.integer("intermediate_size", 1)
    heads = fields.integer("num_attention_heads", 1)
    head_dim = fields.integer("head_dim", 1)
    q, kv = heads * head_dim, fields.integer("num_key_value_heads", 1) * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, taps * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for i in range(fields.integer("num_hidden_layers", 1)):
        shapes |= {f"layers.{i}.{module}": shape for module, shape in layer.items()}
    return shapes
