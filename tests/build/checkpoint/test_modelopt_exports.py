"""Whole checkpoints that ModelOpt wrote, read back: every algorithm that is supported.

Dequantized weights equal what ModelOpt's own classes make of the stored tensors, to the
last bit; the KV cache's scales are what its quantizers calibrated.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dequantized import dequantized_by_modelopt
from trtree.build.checkpoint import Checkpoint
from trtree.plugins.nvfp4_linear import format as nvfp4

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Glm4Moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS},
}
ATTENTION = [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
MLP = [f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")]
EXPERT = [f"model.layers.1.mlp.experts.3.{x}_proj" for x in ("gate", "up", "down")]

Export = Callable[..., Checkpoint]


@contextmanager
def quietly() -> Iterator[None]:
    """ModelOpt tells much on the way."""
    import contextlib
    import io
    import warnings

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def mtq() -> Any:
    """Imported late, as it takes seconds."""
    import modelopt.torch.quantization as mtq

    return mtq


@pytest.fixture(scope="module")
def export(mtq: Any, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Quantize a tiny random model with ModelOpt, export and open it."""

    def export(
        name: str, config: Any, *, prepare: Callable[[Any], None] = lambda _: None
    ) -> Checkpoint:
        import transformers
        from modelopt.torch.export import export_hf_checkpoint

        torch.manual_seed(0)
        family = getattr(transformers, f"{name}ForCausalLM")
        made = family(getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])).bfloat16()
        made.config.architectures = [family.__name__]
        directory = tmp_path_factory.mktemp(name) / "export"
        tokens = torch.arange(32).reshape(2, 16)
        with quietly():
            model = mtq.quantize(made, config, lambda m: m(tokens))
            prepare(model)
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(directory))
        return Checkpoint.open(directory)

    return export


def dequantized(checkpoint: Checkpoint, modules: list[str]) -> torch.Tensor:
    weight = checkpoint.linear(modules).weight
    return nvfp4.dequantize(weight) if isinstance(weight, nvfp4.QuantizedTensor) else weight


def check(checkpoint: Checkpoint, modules: list[str], algorithm: str) -> None:
    for module in modules:
        assert checkpoint.linear_info(module).algorithm == algorithm
        ours = dequantized(checkpoint, [module])
        assert ours.count_nonzero() > 0
        assert torch.equal(ours, dequantized_by_modelopt(checkpoint, module)), module


@pytest.mark.parametrize("family", MODELS)
def test_nvfp4(export: Export, mtq: Any, family: str) -> None:
    checkpoint = export(family, mtq.NVFP4_DEFAULT_CFG)
    check(checkpoint, ATTENTION, "NVFP4")
    check(checkpoint, MLP if family == "Qwen3" else EXPERT, "NVFP4")
    assert checkpoint.linear_info("lm_head").kind == "dense"
    if family != "Qwen3":
        assert checkpoint.linear_info("model.layers.1.mlp.gate").kind == "dense"
    fused = dequantized(checkpoint, ATTENTION[:3])
    assert torch.equal(fused, torch.cat([dequantized(checkpoint, [m]) for m in ATTENTION[:3]]))


def test_weights_alone(export: Export, mtq: Any) -> None:
    checkpoint = export("Qwen3", mtq.W4A16_NVFP4_CFG)
    check(checkpoint, [*ATTENTION, *MLP], "W4A16_NVFP4")
    assert checkpoint.linear(MLP[:2]).input_scale is None


def test_fp8_is_widened(export: Export, mtq: Any) -> None:
    checkpoint = export("Qwen3", mtq.FP8_DEFAULT_CFG)
    check(checkpoint, [*ATTENTION, *MLP], "FP8")
    loaded = checkpoint.linear(MLP[:2])
    assert loaded.kind == checkpoint.linear_info(MLP[0]).kind == "dense"
    assert isinstance(loaded.weight, torch.Tensor) and loaded.weight.dtype == torch.float32


def test_fp8_per_channel(export: Export, mtq: Any) -> None:
    checkpoint = export("Qwen3", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG)
    module = MLP[0]
    assert checkpoint.linear_info(module).algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    scale = checkpoint.tensor(f"{module}.weight_scale")
    assert scale.numel() == 96
    expected = checkpoint.tensor(f"{module}.weight").float() * scale.reshape(-1, 1)
    assert torch.equal(dequantized(checkpoint, [module]), expected)


def test_algorithms_may_be_mixed(export: Export, mtq: Any) -> None:
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    config["quant_cfg"] += [
        {
            "quantizer_name": f"*self_attn*{which}_quantizer",
            "cfg": {"num_bits": (4, 3), "axis": None, "block_sizes": None},
        }
        for which in ("weight", "input")
    ]
    checkpoint = export("Qwen3", config)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.algorithm == "MIXED_PRECISION"
    check(checkpoint, ATTENTION, "FP8")
    check(checkpoint, MLP, "NVFP4")
    assert checkpoint.linear_info("lm_head").algorithm is None


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_kv_cache_scales(export: Export, mtq: Any, algorithm: str) -> None:
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    with quietly():
        config = mtq.update_quant_cfg_with_kv_cache_quant(
            config, getattr(mtq, f"{algorithm}_KV_CFG")["quant_cfg"]
        )
    amax: dict[str, float] = {}

    def collect(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")):
                parent, which = name[: -len(".k_bmm_quantizer")], name[-len("k_bmm_quantizer")]
                amax[f"{parent}.{which}_proj.{which}_scale"] = float(module.amax)

    checkpoint = export("Qwen3", config, prepare=collect)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.kv_cache == algorithm
    scales = checkpoint.kv_scales()
    assert len(scales) == 4 and scales.keys() == amax.keys()
    assert all(scale == pytest.approx(amax[name] / 448) for name, scale in scales.items())
    checkpoint.check_coverage(
        {n.rpartition(".")[0] for n in checkpoint.names() if not n.endswith(("k_scale", "v_scale"))}
    )


def test_awq_scales_inputs_that_no_norm_could_take(export: Export, mtq: Any, demo: Path) -> None:
    """AWQ's own search needs a GPU; the vectors it would leave are set by hand."""
    vectors: dict[str, torch.Tensor] = {}

    def prepare(model: Any) -> None:
        torch.manual_seed(1)
        for name, module in model.named_modules():
            quantizer = getattr(module, "input_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                vectors[name] = (1 + torch.rand(module.weight.shape[1])).bfloat16()
                quantizer.pre_quant_scale = vectors[name]

    checkpoint = export("Qwen3", mtq.NVFP4_DEFAULT_CFG, prepare=prepare)
    check(checkpoint, [*ATTENTION, *MLP], "NVFP4_AWQ")
    scaled = [m for m in [*ATTENTION, *MLP] if checkpoint.linear_info(m).has_pre_quant_scale]
    assert scaled == [ATTENTION[3]]  # the others' vectors went into norms and up_proj
    stored = checkpoint.tensor(f"{ATTENTION[3]}.pre_quant_scale")
    assert torch.equal(stored, vectors[ATTENTION[3]])
