"""Quantizing a plain checkpoint while building."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import DEMO_PROMPTS, random_checkpoint, tiny_config, write_target
from random_moe import qwen3_moe_config, random_moe
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.runtime.executor import Request
from trtree.runtime.session import Session


def test_a_plain_pair_is_quantized_on_request(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_checkpoint(tmp_path / "plain", tiny_config(tie_word_embeddings=True))
    arguments = ("--checkpoint", tmp_path / "plain", "--quantize", "nvfp4")
    assert run(*arguments, "--output", "made") == 0
    manifest = EngineDir.open(tmp_path / "made").manifest
    assert manifest["build_config"]["activations"] == "bf16"
    assert manifest["build_config"]["quantization"] == {
        "target": {
            "algorithm": "W4A16_NVFP4",
            "by": "builder",
            "kv_cache": None,
            "linears": {"W4A16_NVFP4": 14, "bfloat16": 1},
        }
    }
    built = [line for line in capsys.readouterr().out.splitlines() if "weights" in line]
    assert run(*arguments, "--plan") == 0
    planned = capsys.readouterr().out
    assert built and all(line.strip() in planned for line in built)
    assert run("--checkpoint", tmp_path / "plain", "--plan") == 0
    assert not any(line.strip() in capsys.readouterr().out for line in built)


def test_a_quantized_drafter_proposes_nearly_as_well(
    demo_session: Callable[..., Session],
) -> None:
    lengths, tokens = [], []
    for options in ({}, {"quantize_drafter": "nvfp4"}):
        session = demo_session(**options)
        request = Request(
            session.tokenizer.encode(DEMO_PROMPTS[0]),
            max_tokens=96,
            speculative=session.speculative_config("tree", 16),
        )
        done = session.complete(request)
        tokens.append(done.token_ids)
        lengths.append(done.statistics.acceptance_length)
    assert tokens[0] == tokens[1]
    assert lengths[1] > 0.85 * lengths[0] > 2


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_a_checkpoint_is_not_quantized_twice(refused: Callable[..., str], plan: list[str]) -> None:
    line = refused("--quantize", "nvfp4", *plan)
    assert "target_nvfp4: is quantized already (NVFP4)" in line


# What a checkpoint may hold beside NVFP4


def plain(session: Session, prompt: list[int], max_tokens: int) -> list[int]:
    """Tokens of plain decoding."""
    speculative = session.speculative_config("plain")
    request = Request(prompt, max_tokens=max_tokens, speculative=speculative)
    return session.complete(request).token_ids


def test_a_mixed_checkpoint_says_what_became_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FP8 attention is widened; KV is kept in FP8, with scales of 1.0 where it has none."""
    path = random_checkpoint(tmp_path / "mixed", tiny_config(), algorithm="NVFP4")
    layers = {}
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        if ".self_attn." in module:
            layers[module] = {"quant_algo": "FP8"}
            shape = (len(tensors[name]), 2 * tensors[name].shape[1])
            del tensors[f"{module}.weight_scale_2"]
            tensors[name] = torch.randn(shape).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.tensor(0.02)
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.25)
    save_file(tensors, path / "model.safetensors")
    body = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    sidecar = {"quantization": body | {"quantized_layers": layers}}
    (path / "hf_quant_config.json").write_text(json.dumps(sidecar))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))

    options = BuildOptions(checkpoint=path, output=tmp_path / "engine")
    builder.write(builder.describe(options))
    built = EngineDir.open(tmp_path / "engine").manifest["build_config"]
    record = built["quantization"]["target"]
    assert record["algorithm"] == "MIXED_PRECISION"
    assert record["linears"] == {"FP8": 8, "NVFP4": 6, "bfloat16": 2}
    assert record["kv_cache"] == "FP8"
    assert built["kv_cache"] == {
        "option": "auto",
        "calibrated_for": "FP8",
        "stored_as": "float8_e4m3fn",
        "why": None,
        "scales": {"model.layers.1.self_attn.k_proj.k_scale": 0.25},
    }
    assert "target: 8 FP8 linears are widened" in caplog.text
    outputs = [
        plain(Session(engine), [1, 2, 3], 12)
        for engine in (
            tmp_path / "engine",
            builder.write(
                builder.describe(
                    options.with_changes({"backend": "reference", "output": tmp_path / "oracle"})
                )
            ),
        )
    ]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 12


def test_the_kv_caches_type_is_an_option(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows in the plan and in the summary, and the warning where scales are left unused."""
    random_checkpoint(tmp_path / "fp8", tiny_config(), algorithm="NVFP4", kv_cache="FP8")
    checkpoint = ("--checkpoint", tmp_path / "fp8")

    def shown(*arguments: object) -> dict[str, str]:
        assert run(*checkpoint, *arguments) == 0
        lines = [line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()]
        return {line[0]: line[1].strip() for line in lines if len(line) == 2}

    # Two layers' keys and values of two heads of 16 numbers.
    assert shown("--plan")["a token's KV"] == "0.1 KiB"
    assert shown("--plan", "--kv-cache", "float")["a token's KV"] == "0.5 KiB"
    built = shown("--output", "made")
    assert built["type of KV"] == "FP8 (e4m3), 4 scales of the checkpoint"
    assert built["a token's KV"] == "0.1 KiB"
    assert "KV cache calibrated for" in shown("--inspect", tmp_path / "fp8")
    (tmp_path / "options.yaml").write_text(f"checkpoint: {tmp_path / 'fp8'}\nkv_cache: float\n")
    widened = shown("--config", "options.yaml", "--output", "wide")
    assert widened["type of KV"].startswith("float32; calibrated for FP8: kv_cache is")


def test_an_unknown_type_of_kv_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("kv_cache: int8\n")
    line = refused("--config", "options.yaml")
    assert "kv_cache must be one of auto, fp8, float, not 'int8'" in line


@pytest.fixture
def awq(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "awq", tiny_config(), algorithm="NVFP4_AWQ")


def test_awq_inputs_are_scaled_first(awq: Path, tmp_path: Path) -> None:
    """Without rounding of inputs, scaling them is scaling the weight's columns."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    checkpoint = Checkpoint.open(awq)
    state = {}
    for name in checkpoint.names():
        module, _, part = name.rpartition(".")
        if part != "weight":
            continue
        if checkpoint.info(name).dtype != torch.uint8:
            state[name] = checkpoint.tensor(name).float()
            continue
        weight = checkpoint.linear([module]).weight
        assert isinstance(weight, nvfp4.QuantizedTensor)
        state[name] = nvfp4.dequantize(weight)
        if f"{module}.pre_quant_scale" in checkpoint:
            state[name] *= checkpoint.tensor(f"{module}.pre_quant_scale").float()
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_config())).float()
    model.load_state_dict(state)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].argmax(dim=-1).tolist()

    options = BuildOptions(
        checkpoint=awq, output=tmp_path / "exact", backend="reference", activations="float32"
    )
    session = Session(builder.write(builder.describe(options)))
    ours = [plain(session, tokens[: i + 1], 1)[0] for i in range(len(tokens))]
    assert ours == expected


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_awq_on_the_cpu_engine(awq: Path, tmp_path: Path, activations: str) -> None:
    outputs = []
    for backend in ("cpu", "reference"):
        options = BuildOptions(
            checkpoint=awq,
            output=tmp_path / backend,
            backend=backend,
            activations=activations,  # type: ignore[arg-type]
        )
        session = Session(builder.write(builder.describe(options)))
        assert "scale" in {op.kind for op in session.engine_dir.networks()["target"].ops}
        outputs.append(plain(session, [3, 1, 4, 1, 5], 4))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("quantize", ["nvfp4", None])
def test_both_forms_of_experts_build_one_engine(tmp_path: Path, quantize: str | None) -> None:
    """One tensor per expert, or one per layer; plain, and quantized on the way."""
    config = qwen3_moe_config()
    single = random_moe(config, dtype=torch.bfloat16)
    fused = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    at = "model.layers.1.mlp.experts"
    parts = {
        which: torch.stack([single[f"{at}.{i}.{which}_proj.weight"] for i in range(8)])
        for which in ("gate", "up", "down")
    }
    fused[f"{at}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
    fused[f"{at}.down_proj"] = parts["down"]
    files, records = [], []
    for name, tensors in (("single", single), ("fused", fused)):
        path = write_target(tmp_path / name, tensors, config)
        options = BuildOptions(
            checkpoint=path,
            output=tmp_path / f"engine-{name}",
            quantize=quantize,  # type: ignore[arg-type]
        )
        manifest = EngineDir.open(builder.write(builder.describe(options))).manifest
        files.append(manifest["files"]["target.rank0.bin"])
        records.append(manifest["build_config"]["quantization"]["target"])
    assert files[0] == files[1]
    assert records[0] == records[1]
    if quantize:  # 4 + 3 of the dense layer, 4 + 3 * 8 of the sparse one; router, embedding, head
        assert records[0]["linears"] == {"W4A16_NVFP4": 35, "bfloat16": 3}
        plain(Session(tmp_path / "engine-fused"), [1, 2, 3], 4)
