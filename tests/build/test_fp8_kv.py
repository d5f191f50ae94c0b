"""FP8 KV caches: what a build decides, and the whole network against transformers' with its
keys and values rounded as the contract says."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dequantized import dequantized
from engines import random_checkpoint, tiny_config
from oracle import check_logits
from random_glm5 import glm5_config
from random_hybrid import hybrid_config, transformers_model
from random_moe import fused, glm4_moe_config, qwen3_moe_config
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions, OptionError
from trtree.runtime.engines import open_engine

# Few keys and values, as their rounding is not to be near a tie.
TOKENS = 24
ONE = {"num_key_value_heads": 1}
FAMILIES = {
    "qwen3": tiny_config(**ONE),
    "qwen3-window": tiny_config(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        use_sliding_window=True,
        **ONE,
    ),
    "qwen3-moe": qwen3_moe_config(**ONE),
    "glm4-moe": glm4_moe_config(**ONE),
    "hybrid": hybrid_config("Qwen3NextForCausalLM", **ONE),
}
Scales = Mapping[int, tuple[float, float]]


def rounded(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Through e4m3: 3 bits of mantissa above 2^-6, multiples of 2^-9 below, 448 at most.

    And how near a number is to a tie, of its vector's size: two computations of one beside a
    tie may round it to either side, after which logits are apart.
    """
    wide = (x / torch.tensor(scale)).clamp(-448, 448).double()
    step = 2.0 ** (wide.abs().clamp(min=2.0**-6).log2().floor() - 3)
    from_tie = ((wide / step).frac().abs() - 0.5).abs() * step * scale
    nearest = (from_tie / x.square().mean(-1, keepdim=True).sqrt()).min()
    return ((wide / step).round() * step * scale).float(), float(nearest)  # ties to even


def with_fp8_kv(model: Any, scales: Scales) -> list[float]:
    """transformers' model, whose attention reads rounded keys and values from now on; the list
    gets how near they were to ties."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    ties: list[float] = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        k_scale, v_scale = scales[module.layer_idx]
        (k, k_tie), (v, v_tie) = rounded(k, k_scale), rounded(v, v_scale)
        ties.extend([k_tie, v_tie])
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register("rounded_kv", attend)
    AttentionMaskInterface.register("rounded_kv", sdpa_mask)
    model.set_attn_implementation("rounded_kv")
    return ties


def theirs(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    import transformers

    if "linear_key_head_dim" in config:
        return transformers_model(config, tensors)
    name = config["architectures"][0]
    settings = getattr(transformers, name.replace("ForCausalLM", "Config"))(**config)
    model = getattr(transformers, name)(settings).float().eval()
    assert model.load_state_dict(fused(tensors), strict=False) == ([], [])
    return model


def scales_by_layer(checkpoint: Checkpoint) -> Scales:
    found = checkpoint.kv_scales()
    layers = {int(name.split(".")[2]) for name in found}
    names = "model.layers.{0}.self_attn.{1}_proj.{1}_scale"
    return {i: (found[names.format(i, "k")], found[names.format(i, "v")]) for i in layers}


def build(checkpoint: Path, folder: Path, **options: Any) -> tuple[EngineDir, Any]:
    given = {"backend": "reference", "activations": "float32", "page_size": 4} | options
    description = builder.describe(BuildOptions(checkpoint=checkpoint, output=folder, **given))
    return open_engine(builder.write(description))


@pytest.mark.parametrize("family", FAMILIES)
def test_against_transformers(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]
    path = random_checkpoint(
        tmp_path / "checkpoint", config, algorithm="W4A16_NVFP4", kv_cache="FP8"
    )
    checkpoint = Checkpoint.open(path)
    scales = scales_by_layer(checkpoint)
    _, engine = build(path, tmp_path / "engine")
    model = theirs(config, dequantized(checkpoint))

    def check() -> None:
        check_logits(engine, model, chunks=(20,), tokens=TOKENS)

    with pytest.raises(AssertionError, match="Not equal to tolerance"):  # rounding shows
        check()
    ties = with_fp8_kv(model, scales)
    check()
    assert min(ties) > 1e-6  # by the choice of weights and tokens
    for wrong in (dict.fromkeys(scales, (1.0, 1.0)), {i: s[::-1] for i, s in scales.items()}):
        with_fp8_kv(model, wrong)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):  # and so do scales
            check()


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """By what its cache was calibrated for."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(kv_cache: str | None, **changes: Any) -> Path:
        path = root / f"{kv_cache}.{changes}"
        if not path.exists():
            random_checkpoint(path, tiny_config(**changes), algorithm="NVFP4", kv_cache=kv_cache)
        return path

    return make


PLUGIN = {"backend": "tensorrt", "attention": "plugin"}
FP8_OF_ALL = "FP8 (e4m3), 4 scales of the checkpoint"
NATIVE = "TensorRT's own cache layer takes float32, fp16 and bf16 alone"


@pytest.mark.parametrize(
    ("calibrated", "options", "summary"),
    [
        (None, {}, "float32"),
        (None, {"kv_cache": "fp8"}, "FP8 (e4m3), 0 scales of the checkpoint, the 4 that it lacks "),
        ("FP8", {}, FP8_OF_ALL),
        ("FP8", {"kv_cache": "fp8"}, FP8_OF_ALL),
        ("FP8", {"kv_cache": "float"}, "float32; calibrated for FP8: kv_cache is float"),
        ("FP8", {"backend": "tensorrt-rtx"}, f"bfloat16; calibrated for FP8: {NATIVE}"),
        ("FP8", {"backend": "tensorrt"}, f"bfloat16; calibrated for FP8: {NATIVE}, --attention p"),
        ("FP8", PLUGIN, FP8_OF_ALL),
        ("FP8", PLUGIN | {"sm": (80,), "activations": "bf16"}, "bfloat16; calibrated for FP8: SM "),
        ("NVFP4", {}, "float32; calibrated for NVFP4: no backend stores that; --kv-cache fp8 is "),
        ("NVFP4", {"kv_cache": "fp8"}, f"{FP8_OF_ALL}, calibrated for NVFP4"),
        ("NVFP4", {"backend": "tensorrt"}, "bfloat16; calibrated for NVFP4: no backend stores "),
    ],
)
def test_what_a_build_decides(
    checkpoint: Make, calibrated: str | None, options: dict[str, Any], summary: str
) -> None:
    path = checkpoint(calibrated, head_dim=64)
    description = builder.describe(BuildOptions(checkpoint=path, **options))
    assert description.kv_cache_summary.startswith(summary)
    fp8 = summary.startswith("FP8")
    manifest = builder.manifest_of(description)["build_config"]["kv_cache"]
    assert (manifest["stored_as"] == "float8_e4m3fn") == fp8
    assert (manifest["why"] is not None) == (summary.startswith(("float32;", "bfloat16;")))
    states = description.networks["target"].states.values()
    scales = Checkpoint.open(path).kv_scales() if fp8 else {}
    assert {s.dtype for s in states} == {manifest["stored_as"]}
    assert [x for s in states for x in (s.k_scale, s.v_scale)] == list(scales.values() or [1.0] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tensorrt"}, "kv_cache fp8: TensorRT's own cache layer takes .* --attention"),
        ({"backend": "tensorrt-rtx"}, "kv_cache fp8: TensorRT's own cache layer takes .* alone; l"),
        (PLUGIN | {"sm": (80,), "activations": "bf16"}, "kv_cache fp8: SM 80 has no e4m3, SM 89 "),
    ],
)
def test_what_cannot_store_it_is_refused(
    checkpoint: Make, options: dict[str, Any], message: str
) -> None:
    path = checkpoint("FP8", head_dim=64)
    with pytest.raises(OptionError, match=message):
        builder.describe(BuildOptions(checkpoint=path, kv_cache="fp8", **options))


def test_latents_are_kept_as_they_are(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path / "glm5", glm5_config(), algorithm="NVFP4", kv_cache="FP8")
    description = builder.describe(BuildOptions(checkpoint=path))
    kept = "float32; calibrated for FP8: latents are kept in float32"
    assert description.kv_cache_summary == kept
    with pytest.raises(OptionError, match=r"kv_cache fp8: model\.layers\.0\..* is a latent"):
        builder.describe(BuildOptions(checkpoint=path, kv_cache="fp8"))


def renamed(path: Path, to: Path, rename: Callable[[str], str]) -> Path:
    """A checkpoint with other names for its KV scales."""
    shutil.copytree(path, to)
    tensors = load_file(path / "model.safetensors")
    scales = [name for name in tensors if name.endswith(("k_scale", "v_scale"))]
    tensors |= {rename(name): tensors.pop(name) for name in scales}
    save_file(tensors, to / "model.safetensors")
    return to


def test_a_scale_of_no_cache_is_an_error(checkpoint: Make, tmp_path: Path) -> None:
    """A cache's scales under names that nothing reads would be 1.0 without a word."""
    path = renamed(checkpoint("FP8"), tmp_path / "odd", lambda n: n.replace("self_attn", "attn"))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.attn\.k_proj\.k_scale is the scale of no"
    ):
        builder.describe(BuildOptions(checkpoint=path))


def test_compressed_tensors_names(checkpoint: Make, tmp_path: Path) -> None:
    path = checkpoint("FP8")
    short = renamed(path, tmp_path / "short", lambda n: re.sub(r"[kv]_proj\.", "", n))
    assert "model.layers.1.self_attn.v_scale" in Checkpoint.open(short).names()
    states = [
        builder.describe(BuildOptions(checkpoint=at)).networks["target"].states
        for at in (path, short)
    ]
    assert states[0] == states[1]
    assert len({s.k_scale for s in states[0].values()} - {1.0}) == 2
