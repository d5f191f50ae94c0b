"""Engine directories built with TensorRT-RTX on this machine, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT, build_demo, random_checkpoint, tiny_config
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config, qwen3_moe_config
from trtree.build import builder
from trtree.build.bench.synthetic import write_random
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.build.hardware import Hardware
from trtree.build.lowering.tensorrt import inspection, library
from trtree.build.lowering.tensorrt.inspection import BuildLog, Inspection
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions, OptionError, parse_sms, read_options
from trtree.build.plan import memory_plan
from trtree.runtime.engines import load_engine
from trtree.runtime.engines.tensorrt_cuda import check_machine

RTX = "tensorrt-rtx"
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build the demo with these options, once."""
    root = tmp_path_factory.mktemp("tensorrt")
    built: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in built:
            sizes = {"max_seq_len": 128, "max_num_rows": 128, "max_batch_size": 4}
            built[key] = build_demo(root / f"{len(built)}", backend=RTX, **sizes | options)
        return built[key]

    return make


def entries(path: Path) -> dict[str, Any]:
    engines: dict[str, Any] = EngineDir.open(path).manifest["tensorrt"]["engines"]
    return engines


def test_the_demo_for_sm120(build: Build) -> None:
    """W4A4: no weight is widened at run time, and attention is one kernel."""
    path = build()
    manifest = EngineDir.open(path).manifest
    assert manifest["backend"] == RTX
    assert manifest["sm"] == [120]
    assert manifest["mapping"]["world_size"] == 1
    assert manifest["build_config"]["dtype"] == "bfloat16"
    assert manifest["tensorrt"]["version"] == library.load_library(RTX).version
    assert manifest["tensorrt"]["weights"] == "fp4"
    assert set(entries(path)) == {
        "target.rank0.engine",
        "drafter.rank0.engine",
        "drafter_context.rank0.engine",
    }
    for file, entry in entries(path).items():
        assert (path / file).stat().st_size > 500_000
        assert entry["weight_rewrites"] == []
        assert bool(entry["attention_kernels"]) == (entry["network"] != "drafter_context")
        assert entry["activation_bytes"] > 0
        assert entry["layers"] > 50
    verify = entries(path)["target.rank0.engine"]["profiles"][1]
    assert verify["sizes"] == {"batch": [1, 1, 4], "rows": [1, 17, 65], "outputs": [1, 17, 65]}
    assert not list(path.glob("*.weights"))


def test_int8_weights_for_sm89_and_sm120_in_one_file(build: Build) -> None:
    path = build(sm=(89, 120), activations="bf16", drafter=None)
    manifest = EngineDir.open(path).manifest
    assert manifest["sm"] == [89, 120]
    assert manifest["tensorrt"]["weights"] == "int8"
    assert set(entries(path)) == {"target.rank0.engine"}


@pytest.mark.full
def test_a_block_of_one(build: Build) -> None:
    assert "drafter.rank0.engine" in entries(build(block_size=1))


@pytest.mark.full
@pytest.mark.parametrize("max_batch_size", [1, 3])
@pytest.mark.parametrize("max_seq_len", [2, 64, 200])
@pytest.mark.parametrize("budget", [0, 16, 64])
def test_sizes(build: Build, max_batch_size: int, max_seq_len: int, budget: int) -> None:
    """TensorRT has corners: one request, one row, short caches."""
    build(
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        tree_budget=budget,
        max_tree_budget=budget,
    )


@pytest.mark.parametrize(
    ("config", "algorithm", "ranks"),
    [
        (qwen3_moe_config(decoder_sparse_step=1), "NVFP4", 1),
        (glm4_moe_config(moe_intermediate_size=64), "NVFP4", 2),
        (glm4_moe_config(), "W4A16_NVFP4", 1),
        (qwen3_moe_config(), None, 1),
        (glm4_moe_config(moe_intermediate_size=64), "NVFP4_AWQ", 1),
        (glm4_moe_config(moe_intermediate_size=64), "NVFP4_SVD", 2),
    ],
    ids=["qwen3-w4a4", "glm-w4a4-two-ranks", "glm-w4a16", "qwen3-bf16", "glm-awq", "glm-svd"],
)
def test_experts(tmp_path: Path, config: dict[str, Any], algorithm: str | None, ranks: int) -> None:
    """Experts as batched products: FP4 weights stay FP4 at run time where activations are."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", config, algorithm=algorithm)
    options = BuildOptions(
        checkpoint=checkpoint, output=tmp_path / "engine", backend=RTX, max_seq_len=64, tp=ranks
    )
    path = builder.write(builder.describe(options))
    for entry in entries(path).values():
        assert bool(entry["weight_rewrites"]) == (algorithm == "W4A16_NVFP4")
        assert entry["attention_kernels"]
    assert len(entries(path)) == ranks


@pytest.mark.parametrize(
    ("architecture", "algorithm", "ranks"),
    [
        ("Qwen3NextForCausalLM", None, 1),
        ("Qwen3_5ForCausalLM", "NVFP4", 2),
        ("Qwen3_5MoeForCausalLM", "NVFP4", 1),
    ],
)
def test_hybrids(tmp_path: Path, architecture: str, algorithm: str | None, ranks: int) -> None:
    """State is an input of the engine; what rows add to it is its outputs."""
    checkpoint = random_checkpoint(
        tmp_path / "checkpoint", hybrid_config(architecture), algorithm=algorithm
    )
    options = BuildOptions(
        checkpoint=checkpoint, output=tmp_path / "engine", backend=RTX, max_seq_len=64, tp=ranks
    )
    path = builder.write(builder.describe(options))
    assert len(entries(path)) == ranks
    for entry in entries(path).values():
        assert entry["weight_rewrites"] == []
        assert entry["attention_kernels"]
        assert list(entry["branches"].values()) == ["conv", "recurrent"]
        names = {binding["name"] for binding in entry["inputs"]}
        assert names > {"conv_inputs", *entry["branches"]}
        recurrent = list(entry["branches"])[1]
        kept = {binding["name"] for binding in entry["outputs"] if recurrent in binding["name"]}
        assert kept == {f"output.{recurrent}.{part}" for part in "kug"}


def test_latent_attention(tmp_path: Path) -> None:
    """A GLM-5 whose indexer chooses 12 keys of a cache of 128 slots; W4A4."""
    config = glm5_config(moe_intermediate_size=64)
    checkpoint = random_checkpoint(tmp_path / "checkpoint", config, algorithm="NVFP4")
    options = BuildOptions(
        checkpoint=checkpoint, output=tmp_path / "engine", backend=RTX, max_seq_len=64
    )
    path = builder.write(builder.describe(options))
    (entry,) = entries(path).values()
    assert entry["weight_rewrites"] == []
    caches = [b for b in entry["inputs"] if b["name"].endswith(".latent")]
    assert [b["dims"][-1] for b in caches] == [32, 48, 48]  # the first layer's indexer has keys


@pytest.mark.full
def test_a_layer_of_glm_4_5_air(tmp_path: Path) -> None:
    """One sparse layer at full width: 128 experts of 4096 x 1408, 2.3e9 weights in FP4."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "models" / "glm_4.5_air_nvfp4", model)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 4096}
    (model / "config.json").write_text(json.dumps(config))
    write_random(tmp_path / "checkpoint", model)
    options = BuildOptions(
        checkpoint=tmp_path / "checkpoint",
        output=tmp_path / "engine",
        backend=RTX,
        max_seq_len=1024,
    )
    path = builder.write(builder.describe(options))
    entry = entries(path)["target.rank0.engine"]
    assert entry["weight_rewrites"] == []
    weights = 128 * 3 * 4096 * 1408 * 9 // 16
    assert weights < (path / "target.rank0.engine").stat().st_size < 1.2 * weights


def test_two_ranks(build: Build) -> None:
    path = build(tp=2, drafter=None)
    assert set(entries(path)) == {"target.rank0.engine", "target.rank1.engine"}
    cache = entries(path)["target.rank1.engine"]["inputs"][-1]
    assert cache["dims"][1] == 1  # of two KV heads
    assert EngineDir.open(path).manifest["mapping"] == {"world_size": 2, "tp_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sm": (89,)}, "sm 89: has no FP4, and the checkpoint wants NVFP4 activations"),
        ({"sm": (75,), "activations": "bf16"}, "sm 75: has no bf16"),
        ({"sm": (100,)}, "sm 100: tensorrt-rtx .* cannot build for it; it builds for 75, 80"),
        ({"activations": "float32"}, "activations float32: backend tensorrt-rtx computes in bf16"),
        ({"tree": "static"}, "tree static: calibrating it runs the engine"),
        ({"kv_tokens": 10}, "kv_tokens 10 leave 1 tokens to each of max_batch_size 8 requests"),
        ({"tp": 3}, "KV heads: 2 does not divide among 3 ranks"),
        ({"backend": "reference", "tp": 2}, "tp 2: backend reference runs on one rank"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((OptionError, NetworkError), match=message):
        build_demo(tmp_path / "engine", **{"backend": RTX, **options})
    assert not list(tmp_path.iterdir())


def test_without_the_full_library_or_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OptionError, match=r"^backend tensorrt: .*--backend tensorrt-rtx"):
        library.load_library("tensorrt")
    assert library.gpu_backend() is None


def test_the_full_library_builds_for_the_gpu_that_is_there() -> None:
    rtx = library.load_library(RTX)
    full = library.Library("tensorrt", rtx.module, None)
    library.check_sms(full, (100,), present=100)
    with pytest.raises(OptionError, match=r"sm 120: tensorrt .* it builds for 100"):
        library.check_sms(full, (100, 120), present=100)


@pytest.mark.parametrize("value", ["abc", "", [120, "x"]])
def test_sms_are_numbers(value: Any) -> None:
    with pytest.raises(OptionError, match="sm must be numbers such as 120 or 89,120"):
        parse_sms(value)
    assert parse_sms("120,89") == parse_sms([89, 120]) == (89, 120)


def test_tensorrt_says_what_it_cannot_compile(tmp_path: Path) -> None:
    """Through us: one line with TensorRT's own reason, and nothing left behind."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", tiny_config(head_dim=18))
    options = BuildOptions(
        checkpoint=checkpoint, output=tmp_path / "engine", backend=RTX, max_seq_len=64
    )
    with pytest.raises(NetworkError, match=r"target: TensorRT cannot build for SM 120: ."):
        builder.write(builder.describe(options))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# Loading


@pytest.mark.parametrize(
    ("version", "sm", "ranks", "message"),
    [
        (None, 89, 1, "built for SM 120, this GPU is SM 89; rebuild with --sm 89"),
        ("1.0", 120, 1, "built with tensorrt-rtx .*, this machine has 1.0"),
        (None, 120, 8, "built for 1 ranks, started with 8"),
    ],
)
def test_engines_of_other_machines(
    build: Build, version: str | None, sm: int, ranks: int, message: str
) -> None:
    engine = EngineDir.open(build())
    ours = engine.manifest["tensorrt"]["version"]
    check_machine(engine, ours, 120, 1)
    with pytest.raises(EngineDirError, match=message):
        check_machine(engine, version or ours, sm, ranks)


@pytest.mark.skipif(library.has_gpu(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line(build: Build) -> None:
    with pytest.raises(EngineDirError, match="needs a GPU of SM 120, and none is visible"):
        load_engine(EngineDir.open(build()))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(_truncate, "bytes, the manifest says"), (_flip, "SHA-256"), (Path.unlink, "missing")],
)
def test_damaged_engines(build: Build, tmp_path: Path, damage: Any, message: str) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(build(), copy)
    damage(copy / "target.rank0.engine")
    with pytest.raises(EngineDirError, match=rf"target.rank0.engine: .*{message}") as error:
        EngineDir.open(copy)
    assert len(str(error.value).splitlines()) == 1


# Inspection and plans


def test_a_widened_weight_is_found_in_the_plan(build: Build, tmp_path: Path) -> None:
    """W4A16 has to widen weights; asked to be fused, such a plan is refused."""
    checkpoint = random_checkpoint(tmp_path / "c", tiny_config(), algorithm="W4A16_NVFP4")
    options = BuildOptions(
        checkpoint=checkpoint, output=tmp_path / "engine", backend=RTX, max_seq_len=64
    )
    path = builder.write(builder.describe(options))
    found = inspection.inspect_engine(path / "target.rank0.engine", 1, [])
    assert found.rewrites == tuple(entries(path)["target.rank0.engine"]["weight_rewrites"])
    assert found.rewrites
    with pytest.raises(NetworkError, match="rewrites quantized weights to bf16 at every run"):
        found.check("target", fused_weights=True, attention=True)
    found.check("target", fused_weights=False, attention=True)


def test_attention_that_is_not_fused_is_refused() -> None:
    bare = Inspection(1, 1, BuildLog(), ("__myl_Softmax",))
    bare.check("drafter_context", fused_weights=True, attention=False)
    with pytest.raises(NetworkError, match="no fused attention kernel"):
        bare.check("target", fused_weights=True, attention=True)


def test_memory_is_read_from_the_log() -> None:
    notes = [f"Total Activation Memory: {n} bytes" for n in (5, 9, 7)]
    assert BuildLog.of([*notes, "Total Weights Memory: 11 bytes"]) == BuildLog(9, 11)


def plan(model: str, **changes: Any) -> dict[str, str]:
    options = BuildOptions(
        checkpoint=ROOT / "configs" / "models" / model,
        backend=RTX,
        **{"kv_tokens": 65536} | changes,
    )
    hardware = Hardware.read(ROOT / "configs" / "hardware" / "rtx_pro_6000.yaml")
    return dict(memory_plan(builder.plan(options), hardware))


def test_plans_of_real_models() -> None:
    """Qwen3-32B: 31.2e9 quantized weights of 4.5 bits and twice 0.778e9 of 16 are 20.66e9
    bytes; 64 layers of 8 heads of 128 are 256 KiB of KV per token."""
    one = plan("qwen3_32b_nvfp4")
    assert one["target weights"] == "19.25 GiB"
    assert one["KV, 8 requests of 8256 slots"] == "16.12 GiB"
    assert float(one["left"].split()[0]) > 50
    two = plan("qwen3_32b_nvfp4", tp=2)
    assert two["KV, 8 requests of 8256 slots"] == "8.06 GiB"
    assert plan("qwen3_32b_nvfp4", kv_tokens=2**20, max_batch_size=32)["left"].startswith("none: ")


def test_plans_of_models_with_experts() -> None:
    """Qwen3-235B-A22B: 94 layers of 71.3e6 weights in attention and 128 experts of 18.9e6, of
    4.5 bits, 94 routers of 0.52e6 in float32 and twice 0.62e9 in bf16 are 134.2e9 bytes."""
    whole = plan("qwen3_235b_a22b_nvfp4", max_batch_size=1)
    assert whole["target weights"] == "124.98 GiB"
    assert whole["left"].startswith("none: ")
    assert whole["experts per layer, 1 row"] == (
        "8 of 128 needed, all are read: 16.0 times as much"
    )
    quarter = plan("qwen3_235b_a22b_nvfp4", max_batch_size=1, tp=4)
    assert quarter["target weights"] == "32.26 GiB"
    assert float(quarter["left"].split()[0]) > 40
    # On 8 ranks each of the 4 KV heads is held twice.
    eighth = plan("qwen3_235b_a22b_nvfp4", max_batch_size=1, tp=8)
    assert eighth["target weights"] == "16.83 GiB"
    (kv,) = (name for name in eighth if name.startswith("KV"))
    assert eighth[kv] == quarter[kv]


def test_widths_that_do_not_divide_evenly() -> None:
    """GLM-4.5-Air's first MLP is 684 blocks wide, of which 8 ranks hold 85 or 86."""
    networks = builder.plan(
        BuildOptions(checkpoint=ROOT / "configs" / "models" / "glm_4.5_air_nvfp4", tp=8)
    )
    widths = [
        networks.rank(rank).weights.stored["target:model.layers.0.mlp.down_proj"].shape[1]
        for rank in range(8)
    ]
    assert sum(widths) == 10944
    assert {width // 16 for width in widths} == {85, 86}


@pytest.mark.parametrize(
    ("model", "billions"),
    # In total, and without the prediction layer, which takes 2.2e9 of GLM-4.5-Air's 110e9.
    [("qwen3_30b_a3b", 30.5), ("glm_4.5_air", 106.9), ("glm_4.6", 352.8), ("glm_4.7", 352.8)],
)
def test_weights_of_published_models(model: str, billions: float) -> None:
    options = BuildOptions(checkpoint=ROOT / "configs" / "models" / f"{model}_nvfp4")
    weights = builder.plan(options).weights.stored.values()
    assert sum(math.prod(w.shape) for w in weights) / 1e9 == pytest.approx(billions, rel=0.005)


def test_hardware_files(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text("name: small\nsm: 89\nmemory_gb: 24\ngpus: 1\n")
    small = Hardware.read(file)
    with pytest.raises(OptionError, match="sm 120: small is SM 89; pass --sm 89"):
        small.check((120,), 1)
    with pytest.raises(OptionError, match="tp 2: the machine has 1 small"):
        small.check((89,), 2)
    file.write_text("name: small\nsm: 89\n")
    with pytest.raises(OptionError, match="expected the keys gpus, memory_gb, name, sm"):
        Hardware.read(file)
    file.write_text("name: small\nsm: 89\nmemory_gb: -1\ngpus: 1\n")
    with pytest.raises(OptionError, match="memory_gb must be a positive number, not -1"):
        Hardware.read(file)


def test_the_manifest_says_what_was_built(build: Build) -> None:
    manifest = json.loads((build() / "config.json").read_text())
    target = manifest["tensorrt"]["engines"]["target.rank0.engine"]
    names = [binding["name"] for binding in target["inputs"]]
    assert names[:5] == [
        "token_ids",
        "positions",
        "committed_lengths",
        "tree_mask",
        "output_rows",
    ]
    assert target["outputs"][0]["name"] == "output.captured"
    assert read_options(ROOT / "configs" / "demo.yaml").sm == (120,)
