"""The DFlash drafter's configuration: normalised, checked, variants refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import ROOT
from trtree.build import builder
from trtree.build.checkpoint import (
    Checkpoint,
    CheckpointError,
    DrafterConfig,
    QuantizationConfig,
    read_drafter,
)
from trtree.build.checkpoint.dflash_config import default_target_layer_ids, parse
from trtree.build.checkpoint.write import quantize_state_dict, write_checkpoint
from trtree.build.models.qwen3 import Qwen3Config
from trtree.build.options import read_options

Json = dict[str, Any]
WHERE = Path("drafter/config.json")


def config(*, drop: tuple[str, ...] = (), dflash: Json | None = None, **fields: Any) -> Json:
    """A drafter's fields, with a target of 36 layers; ``drop`` removes any."""
    nested = {"mask_token_id": 1, "target_layer_ids": [1, 17, 33], **(dflash or {})}
    top = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 2048,
        "num_target_layers": 36,
        **fields,
    }
    top = {key: value for key, value in top.items() if key not in drop}
    return top | {"dflash_config": {k: v for k, v in nested.items() if k not in drop}}


def refused(fields: Json, pattern: str | None = None) -> str:
    with pytest.raises(CheckpointError, match=pattern) as caught:
        parse(fields, WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: ") and "\n" not in message
    return message


def test_the_demo_drafter(demo: Path) -> None:
    drafter = read_drafter(Checkpoint.open(demo / "drafter"))
    assert drafter.block_size == 8
    assert drafter.mask_token_id == 1
    assert drafter.target_layer_ids == (1, 2, 3, 4)
    assert drafter.layer_ids_read_as == "L"
    assert drafter.num_target_layers == 6
    assert drafter.causal == (False, False)
    assert drafter.transformer["layer_types"] == ["full_attention", "full_attention"]
    assert drafter.transformer["rope_theta"] == 10000.0
    drafter.check_target(Checkpoint.open(demo / "target_nvfp4").config)


# Where fields stand


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids"])
def test_fields_stand_at_either_level(field: str) -> None:
    value: Any = [1, 17, 33] if field == "target_layer_ids" else 8
    expected = tuple(value) if isinstance(value, list) else value
    outer = parse(config(drop=(field,)) | {field: value}, WHERE)
    inner = config(drop=(field,))
    inner["dflash_config"][field] = value
    assert getattr(outer, field) == getattr(parse(inner, WHERE), field) == expected


def test_two_places_must_agree() -> None:
    assert parse(config(dflash={"block_size": 8}), WHERE).block_size == 8
    message = refused(config(dflash={"block_size": 16}))
    assert "dflash_config.block_size is 16, block_size is 8" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (config(drop=("block_size",)), "block_size is missing"),
        (config(block_size=2**31), "block_size is 2147483648, expected at most 2147483647"),
        (config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000, expected at most"),
        (config(block_size=0), "block_size is 0, expected an integer of at least 1"),
        (config(block_size=True), "block_size is True"),
        (config(drop=("mask_token_id",)), "mask_token_id is missing"),
        (config(dflash={"mask_token_id": -1}), "mask_token_id is -1"),
        (config(dflash={"mask_token_id": 2048}), "mask_token_id 2048 is outside the voc.* 2048"),
        (config(drop=("num_target_layers",)), "num_target_layers is missing"),
        (config(hidden_size="256"), "hidden_size is '256'"),
        (config() | {"dflash_config": [1]}, "dflash_config must be an object"),
        (config(is_causal=1), "is 1, expected true or false"),
    ],
)
def test_bad_fields_are_named(fields: Json, message: str) -> None:
    refused(fields, message)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_any_positive_block_size_is_legal(size: int) -> None:
    assert parse(config(block_size=size), WHERE).block_size == size


def test_token_zero_may_be_the_mask() -> None:
    assert parse(config(dflash={"mask_token_id": 0}), WHERE).mask_token_id == 0


# Target layers


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 1, [18]),
        (37, 1, [18]),
        (28, 2, [1, 25]),
        (9, 3, [1, 4, 6]),  # 3.5 rounds to the even 4
    ],
)
def test_default_layers(target_layers: int, draft_layers: int, expected: list[int]) -> None:
    assert default_target_layer_ids(target_layers, draft_layers) == expected


def test_default_layers_are_recorded_as_such() -> None:
    drafter = parse(config(drop=("target_layer_ids",), num_hidden_layers=5), WHERE)
    assert drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert drafter.layer_ids_read_as == "default"


def test_layer_order_is_kept() -> None:
    drafter = parse(config(dflash={"target_layer_ids": [33, 1, 0]}), WHERE)
    assert drafter.target_layer_ids == (33, 1, 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 17, 36], r"\[1, 17, 36\] has \[36\] outside 0..35 \(num_target_layers 36\)"),
        ([-1, 3], r"has \[-1\] outside 0..35"),
        ([], "is not a list of layer numbers"),
        ([1.0], "is not a list of layer numbers"),
        ("1,2", "is not a list of layer numbers"),
    ],
)
def test_layers_outside_the_target_are_refused(ids: Any, message: str) -> None:
    refused(config(dflash={"target_layer_ids": ids}), message)


def test_a_default_that_does_not_fit_is_refused() -> None:
    message = refused(config(drop=("target_layer_ids",), num_target_layers=2))
    assert "[1, -1] (the default, as the file names none) has [-1] outside 0..1" in message


# Attention


SLIDING = ["sliding_attention", "full_attention"]


def attention(drafter: DrafterConfig) -> tuple[list[str], int | None, bool]:
    layers = drafter.transformer
    return layers["layer_types"], layers["sliding_window"], layers["use_sliding_window"]


def test_sliding_layers_keep_their_window() -> None:
    drafter = parse(config(layer_types=SLIDING, sliding_window=2048), WHERE)
    assert attention(drafter) == (SLIDING, 2048, True)


def test_the_family_reads_the_normalised_transformer() -> None:
    """NVIDIA's exporter marks sliding layers by use_swa alone; the family sees windows."""
    fields = config(
        dflash={"use_swa": True, "swa_window_size": 512},
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
    )
    drafter = parse(fields, WHERE)
    assert Qwen3Config.from_dict(drafter.transformer).windows == (512, 512)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_window_layers": 1}, (["full_attention", "sliding_attention"], 64, True)),
        ({"max_window_layers": 1, "sliding_window": None}, (["full_attention"] * 2, None, False)),
        (
            {"use_sliding_window": False, "max_window_layers": 0},
            (["full_attention"] * 2, None, False),
        ),
    ],
)
def test_layer_types_are_derived_as_transformers_does(
    fields: Json, expected: tuple[list[str], int | None, bool]
) -> None:
    stated = {"use_sliding_window": True, "sliding_window": 64, **fields}
    assert attention(parse(config(**stated), WHERE)) == expected


def test_a_window_without_sliding_layers_is_dropped() -> None:
    drafter = parse(config(sliding_window=4096, use_sliding_window=True), WHERE)
    assert attention(drafter) == (["full_attention"] * 2, None, False)


@pytest.mark.parametrize(
    "fields",
    [
        config(dflash={"use_swa": True, "swa_window_size": 512}, sliding_window=512),
        config(dflash={"use_swa": True, "swa_window_size": 512}),
        config(dflash={"use_swa": True}, sliding_window=512, layer_types=["full_attention"] * 2),
    ],
)
def test_use_swa_makes_every_layer_sliding(fields: Json) -> None:
    assert attention(parse(fields, WHERE)) == (["sliding_attention"] * 2, 512, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (config(layer_types=SLIDING), "sliding_window is None, but layer_types has sliding"),
        (config(layer_types=SLIDING, sliding_window=0), "sliding_window is 0"),
        (
            config(layer_types=SLIDING, sliding_window=2048, use_sliding_window=False),
            "use_sliding_window is false, but layer_types has sliding_attention",
        ),
        (
            config(layer_types=SLIDING, sliding_window=2048, dflash={"use_swa": False}),
            "use_swa is false, but layer_types has sliding_attention",
        ),
        (
            config(layer_types=SLIDING, sliding_window=2048, dflash={"swa_window_size": 64}),
            "swa_window_size is 64, sliding_window is 2048",
        ),
        (config(layer_types=["full_attention"]), "does not list num_hidden_layers 2 layers"),
        (config(layer_types=["linear_attention"] * 2), "'linear_attention'.* are not supported"),
    ],
)
def test_contradictory_windows_are_refused(fields: Json, message: str) -> None:
    refused(fields, message)


@pytest.mark.parametrize(
    ("extra", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"dflash": {"causal": False}}, (False, False)),
        ({"dflash": {"causal": True}, "is_causal": True}, (True, True)),
    ],
)
def test_sliding_layers_are_causal_unless_stated(extra: Json, causal: tuple[bool, ...]) -> None:
    fields = config(layer_types=SLIDING, sliding_window=2048, **extra)
    assert parse(fields, WHERE).causal == causal


def test_causality_stated_twice_must_agree() -> None:
    message = refused(config(dflash={"causal": False}, is_causal=True))
    assert "dflash_config.causal is False, is_causal is True" in message


# Variants


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("DSpark", config(dflash={"markov_rank": 64})),
        ("DSpark", config(dflash={"projector_type": "dspark"})),
        ("DFlash2", config(dflash={"conv_kernel_size": 4, "selector_rank": 32})),
        ("DFlash2", config(architectures=["DFlash2DraftModel"])),
        ("JetSpec", config(causal_head=True)),
        ("Domino", config(dflash={"gru_hidden_dim": 128})),
        ("Domino", config(dflash={"projector_type": "domino"})),
    ],
)
def test_variants_are_refused_by_name(name: str, fields: Json) -> None:
    message = refused(fields)
    assert f"{name} drafters" in message and "not supported yet; supported: DFlash" in message


def test_a_variant_key_that_is_off_is_no_variant() -> None:
    assert parse(config(dflash={"markov_rank": 0, "conv_kernel_size": None}), WHERE)


def test_other_drafters_are_refused() -> None:
    message = refused(config(architectures=["LlamaForCausalLMEagle3"]))
    assert "['LlamaForCausalLMEagle3'] is no DFlash drafter" in message
    assert "[] is no DFlash drafter" in refused(config(drop=("architectures",)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sink_bias", True),
        ("final_logit_softcapping", 30.0),
        ("input_embedding_scale", 2.0),
        ("output_multiplier", 0.5),
    ],
)
def test_arithmetic_that_is_not_built_is_refused(key: str, value: Any) -> None:
    assert f"{key} {value!r} is not supported yet" in refused(config(dflash={key: value}))


def test_neutral_arithmetic_passes() -> None:
    neutral = {"attention_sink_bias": False, "output_multiplier": 1.0, "input_embedding_scale": 1}
    assert parse(config(dflash=neutral, final_logit_softcapping=0.0), WHERE)


# Against the target


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 512, "hidden_size is 256, the target's hidden_size is 512"),
        ("vocab_size", 2050, "vocab_size is 2048, the target's vocab_size is 2050"),
        ("num_hidden_layers", 28, "num_target_layers is 36, the target's num_hidden_layers is 28"),
        ("hidden_size", None, "the target's hidden_size is None"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_another_target_is_refused(field: str, value: Any, message: str, nested: bool) -> None:
    drafter = parse(config(), WHERE)
    target = {"hidden_size": 256, "vocab_size": 2048, "num_hidden_layers": 36}
    drafter.check_target({"text_config": target} if nested else target)
    target[field] = value
    with pytest.raises(CheckpointError, match=message):
        drafter.check_target({"text_config": target} if nested else target)


# Tensors


@pytest.fixture
def drafter_copy(demo: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo / "drafter", tmp_path / "drafter")


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **changes}
    file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm.weight": None, "layers.1.self_attn.q_norm.weight": None},
            r"lacks 2 of 25 tensors: norm.weight, layers.1.self_attn.q_norm.weight",
        ),
        (
            {"fc.weight": torch.zeros(256, 512)},
            r"fc.weight has shape \[256, 512\], config.json implies \[256, 1024\]",
        ),
        (
            {"layers.0.self_attn.k_norm.weight": torch.ones(32)},
            r"k_norm.weight has shape \[32\], config.json implies \[64\]",
        ),
        (
            {"embedding.weight": torch.zeros(8, 8), "head.weight": torch.zeros(8, 8)},
            r"2 of 27 tensors would not be used: embedding.weight, head.weight",
        ),
        ({"fc.bias": torch.zeros(7)}, r"fc.bias has shape \[7\], expected \[256\]"),
    ],
)
def test_tensors_are_checked(
    drafter_copy: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(drafter_copy, changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(Checkpoint.open(drafter_copy))


def test_copies_of_the_targets_embedding_and_head_are_left_out(
    drafter_copy: Path, demo: Path
) -> None:
    """GLM-5.2's public drafter has the size of one with both."""
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes({"drafter": drafter_copy})
    plain = builder.describe(options)
    embedding = Checkpoint.open(demo / "target_nvfp4").tensor("model.embed_tokens.weight").clone()
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    change_tensors(drafter_copy, copies)
    copied = builder.describe(options)
    assert copied.weight_bytes("drafter") == plain.weight_bytes("drafter")
    change_tensors(drafter_copy, {"lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not the target's model.embed"):
        builder.describe(options)


def test_the_configuration_decides_the_tensors(drafter_copy: Path) -> None:
    file = drafter_copy / "config.json"
    fields = json.loads(file.read_text())
    fields["num_hidden_layers"], fields["layer_types"] = 3, None
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"lacks 11 of 36 tensors: layers\.2\.input_l"):
        read_drafter(Checkpoint.open(drafter_copy))


def test_a_quantized_drafter_is_read(demo: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(demo / "drafter")
    tensors = ((name, source.tensor(name)) for name in source.names())
    exclude = ("fc", "layers.0.*", "layers.1.mlp.gate_proj", "layers.1.mlp.down_proj")
    write_checkpoint(
        tmp_path / "nvfp4",
        quantize_state_dict(tensors, exclude=exclude),
        source.config,
        quantization=QuantizationConfig("NVFP4", exclude),
    )
    checkpoint = Checkpoint.open(tmp_path / "nvfp4")
    assert read_drafter(checkpoint).target_layer_ids == (1, 2, 3, 4)
    assert checkpoint.linear_info("layers.1.mlp.up_proj").kind == "nvfp4"
    assert checkpoint.linear_info("fc").kind == "dense"
