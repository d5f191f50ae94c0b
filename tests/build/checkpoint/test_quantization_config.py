"""ModelOpt's two configuration files: what they say, and where they are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtree.build.checkpoint import CheckpointError, QuantizationConfig
from trtree.build.checkpoint.quantization import SIDECAR, read_quantization

Json = dict[str, Any]
NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def sidecar(algorithm: str | None = "NVFP4", **fields: Any) -> Json:
    body = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
    return {"producer": {"name": "modelopt"}, "quantization": {**body, **fields}}


def inline(algorithm: str | None = "NVFP4", **fields: Any) -> Json:
    group = {"weights": NUMBERS, "input_activations": NUMBERS, "targets": ["Linear"]}
    if algorithm == "W4A16_NVFP4":
        del group["input_activations"]
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        **fields,
    }


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., QuantizationConfig | None]:
    def read(side: Json | None = None, within: Json | None = None) -> QuantizationConfig | None:
        if side is not None:
            (tmp_path / SIDECAR).write_text(json.dumps(side))
        return read_quantization(tmp_path, {"quantization_config": within} if within else {})

    return read


Read = Callable[..., QuantizationConfig | None]


@pytest.mark.parametrize(
    ("algorithm", "activations"), [("NVFP4", "nvfp4"), ("W4A16_NVFP4", "bf16")]
)
@pytest.mark.parametrize("places", ["side", "within", "both"])
def test_either_file_is_enough(read: Read, places: str, algorithm: str, activations: str) -> None:
    quantization = read(
        None if places == "within" else sidecar(algorithm, exclude_modules=["b", "a*"]),
        None if places == "side" else inline(algorithm, ignore=["a*", "b"]),
    )
    assert quantization is not None
    assert quantization.algorithm == algorithm
    assert quantization.activations_of("model.module") == activations
    assert quantization.exclusions == ("a*", "b")


def test_no_configuration_and_no_algorithm_mean_a_plain_checkpoint(read: Read) -> None:
    assert read() is None
    assert read(sidecar(None)) is None


def test_a_drafter_export_repeats_the_sidecar_in_config_json(read: Read) -> None:
    both = read(sidecar(exclude_modules=["fc"]), sidecar(exclude_modules=["fc"]))
    assert both is not None and both.exclusions == ("fc",)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (None, None),
        ("NVFP4", "NVFP4"),
        ("FP8", "FP8"),
        ({"dynamic": False, "num_bits": 8, "type": "float"}, "FP8"),
    ],
)
def test_the_kv_cache_scheme_is_a_name_or_a_description(
    read: Read, scheme: Any, name: str | None
) -> None:
    quantization = read(sidecar(kv_cache_quant_algo=name), inline(kv_cache_scheme=scheme))
    assert quantization is not None and quantization.kv_cache == name


def test_a_field_in_one_file_only_is_no_disagreement(read: Read) -> None:
    groups = {"g": {"weights": {}, "input_activations": NUMBERS}}
    quantization = read(
        sidecar(kv_cache_quant_algo="FP8", group_size=None), inline(config_groups=groups)
    )
    assert quantization is not None and quantization.kv_cache == "FP8"


@pytest.mark.parametrize(
    ("side", "within", "message"),
    [
        (sidecar("NVFP4"), inline("W4A16_NVFP4"), "quant_algo 'NVFP4', .* says 'W4A16_NVFP4'"),
        (sidecar(), inline(None), "says quant_algo 'NVFP4', .* says None"),
        (
            sidecar(kv_cache_quant_algo="FP8"),
            inline(kv_cache_scheme="NVFP4"),
            "says kv_cache 'FP8', .* says 'NVFP4'",
        ),
        (sidecar(group_size=32), inline(), "says group_size 32, .* says 16"),
        (
            sidecar(exclude_modules=["lm_head", "a"]),
            inline(ignore=["lm_head", "b"]),
            r"hf_quant_config.json alone excludes \['a'\], .*config alone \['b'\]",
        ),
        (None, inline("W4A16_NVFP4") | {"quant_algo": "NVFP4"}, "input_activations None contradic"),
        (None, inline() | {"quant_algo": "W4A16_NVFP4"}, "contradict quant_algo 'W4A16_NVFP4'"),
    ],
)
def test_disagreements_name_both_values(
    read: Read, side: Json | None, within: Json, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(side, within)
    assert "correct" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "algorithm",
    ["FP8_PB_WO", "W4A8_AWQ", "W4A16_AWQ", "MXFP8"],
)
def test_known_algorithms_are_refused_by_name(read: Read, algorithm: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=f"{SIDECAR}: .*'{algorithm}' is not supported yet; supported: NVFP4, W4A16_NVFP4",
    ):
        read(sidecar(algorithm, group_size=None))


@pytest.mark.parametrize(
    ("side", "within", "message"),
    [
        (sidecar("NVFP5"), None, "'NVFP5' is unknown; supported: NVFP4"),
        (sidecar(group_size=32), None, "group_size 32 is not supported for NVFP4; only 16"),
        (sidecar(group_size="16"), None, "group_size must be an integer, not '16'"),
        (sidecar(quant_algo=4), None, "quant_algo must be a name or null, not 4"),
        ({"quantization": 1}, None, "has no `quantization` object"),
        (sidecar("MIXED_PRECISION"), None, "MIXED_PRECISION without quantized_layers"),
        (
            sidecar("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}}),
            None,
            "algorithm 'W4A8_AWQ' is not supported yet",
        ),
        (
            sidecar(
                "MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4", "group_size": 32}}
            ),
            None,
            "quantized_layers.a: group_size 32 is not supported",
        ),
        (sidecar("MIXED_PRECISION", quantized_layers={"a": {}}), None, "a names no quant_algo"),
        (sidecar("MIXED_PRECISION", quantized_layers=["a"]), None, "must be an object of objects"),
        (sidecar(kv_cache_quant_algo="INT8"), None, "KV-cache quantization 'INT8' is not supp"),
        (None, {"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not supported"),
        (None, {"bits": 4}, "quant_method None is not supported"),
        (None, [1], "must be an object"),
        (
            None,
            inline(config_groups={"group_0": {"weights": 128}}),
            "config_groups.group_0.weights must be an object, not 128",
        ),
        (None, inline(config_groups=[1]), "config_groups must be an object of objects"),
        (None, inline(kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme .* is not known"),
        (sidecar(exclude_modules="lm_head"), None, "must be a list of module names"),
        (sidecar(exclude_modules=[""]), None, "must be a list of module names"),
        (
            sidecar(exclude_modules=["model.layers.0."]),
            None,
            r"'model.layers.0.' ends in a dot .* write 'model.layers.0' or 'model.layers.0.\*'",
        ),
        (sidecar(exclude_modules=["re:.*gate"]), None, "is a regular expression"),
    ],
)
def test_what_is_unknown_is_refused(
    read: Read, side: Json | None, within: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(side, within)


def test_mixed_precision_names_an_algorithm_per_module(read: Read) -> None:
    layers = {"a.q": {"quant_algo": "FP8"}, "a.gate": {"quant_algo": "NVFP4", "group_size": 16}}
    quantization = read(
        sidecar("MIXED_PRECISION", quantized_layers=layers, exclude_modules=["head"]),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "ignore": ["head"],
            "config_groups": {"g0": {"weights": {"group_size": 16}}, "g1": {"weights": {}}},
        },
    )
    assert quantization is not None
    found = {m: quantization.algorithm_of(m) for m in ("a.q", "a.gate", "a.up", "head")}
    assert found == {"a.q": "FP8", "a.gate": "NVFP4", "a.up": None, "head": None}
    assert quantization.activations_of("a.gate") == "nvfp4"
    assert quantization.activations_of("a.q") is None


def test_mixed_precision_must_agree_in_both_files(read: Read) -> None:
    with pytest.raises(CheckpointError, match=r"quantized_layers differ in \['a'\]"):
        read(
            sidecar("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}}),
            inline("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4"}}),
        )


def test_several_group_sizes_are_refused(read: Read) -> None:
    other = {"weights": {**NUMBERS, "group_size": 32}, "input_activations": NUMBERS}
    with pytest.raises(CheckpointError, match="several group sizes"):
        read(None, inline(config_groups={"a": inline()["config_groups"]["group_0"], "b": other}))


@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "lm_head2", False),
        ("lm_head", "model.lm_head", False),
        ("model.layers.1*", "model.layers.1.mlp.gate", True),
        ("model.layers.1*", "model.layers.12.mlp.gate", True),
        ("model.layers.1.*", "model.layers.1.mlp.gate", True),
        ("model.layers.1.*", "model.layers.1", True),
        ("model.layers.1.*", "model.layers.12.mlp.gate", False),
        ("*.mlp.gate", "model.layers.1.mlp.gate", True),
        ("*.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("*shared*.*", "model.shared_experts.up_proj", True),
        ("model.layers.1", "model-layers.1", False),
        ("*", "anything.at.all", True),
        ("m.experts", "m.experts.3.up_proj", True),
        ("m.experts.gate_up_proj", "m.experts.3.up_proj", True),
        ("m.experts.gate_up_proj", "m.experts.3.down_proj", False),
    ],
)
def test_exclusion_patterns(pattern: str, module: str, excluded: bool) -> None:
    quantization = QuantizationConfig("NVFP4", ("unrelated", pattern))
    assert quantization.is_excluded(module) is excluded


def test_nothing_is_excluded_by_default() -> None:
    assert not QuantizationConfig("NVFP4").is_excluded("")
