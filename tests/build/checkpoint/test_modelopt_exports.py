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
from trtree.build.lowering import reference_weights
from trtree.build.lowering.reference import StepContext
from trtree.build.lowering.weights import plan_weights
from trtree.build.modelopt_cpu import on_cpu
from trtree.build.network.graph import Graph
from trtree.build.source import CheckpointSource
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


def test_awq_scales_inputs_that_no_norm_could_take(export: Export, mtq: Any) -> None:
    vectors: dict[str, torch.Tensor] = {}

    def prepare(model: Any) -> None:
        for name, module in model.named_modules():
            quantizer = getattr(module, "input_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                vectors[name] = quantizer.pre_quant_scale.clone()

    checkpoint = export("Qwen3", on_cpu(mtq.NVFP4_AWQ_LITE_CFG), prepare=prepare)
    check(checkpoint, [*ATTENTION, *MLP], "NVFP4_AWQ")
    scaled = [m for m in [*ATTENTION, *MLP] if checkpoint.linear_info(m).has_pre_quant_scale]
    assert scaled == [ATTENTION[3]]  # the others' vectors went into norms and up_proj
    stored = checkpoint.tensor(f"{ATTENTION[3]}.pre_quant_scale")
    assert len(stored.unique()) > 1
    assert torch.equal(stored, vectors[ATTENTION[3]])


def test_svdquant(export: Export, mtq: Any, tmp_path: Path) -> None:
    """Linears that read the same share vector and first factor; a linear alone gives what
    ModelOpt's own module does, of the same rounded inputs."""
    alone = (ATTENTION[3], MLP[2])
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(model: Any) -> None:
        for index, name in enumerate(alone):
            module = copy.deepcopy(model.get_submodule(name)).float()
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(9, module.in_features, generator=generator)
            with torch.inference_mode():
                expected[name] = x, module(x)

    config = on_cpu(mtq.NVFP4_SVDQUANT_DEFAULT_CFG, rank=8)
    checkpoint = export("Qwen3", config, prepare=prepare)
    check(checkpoint, [*ATTENTION, *MLP], "NVFP4_SVD")
    for shared in (ATTENTION[:3], MLP[:2]):
        assert len({checkpoint.input_digest(module) for module in shared}) == 1
        assert len({checkpoint.factor_digest(module) for module in shared}) == 1
        checkpoint.linear(shared)
    for module in alone:
        info = checkpoint.linear_info(module)
        assert (info.rank, info.has_pre_quant_scale) == (8, True)
        x, wanted = expected[module]
        got = by_the_reference(checkpoint, module, x, tmp_path / module)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    checkpoint.check_coverage({n.rpartition(".")[0] for n in checkpoint.names()})


def test_svdquant_may_skip_modules(export: Export, mtq: Any) -> None:
    """ModelOpt says that they are NVFP4_SVD too."""
    config = on_cpu(mtq.NVFP4_SVDQUANT_DEFAULT_CFG, rank=8)
    config["algorithm"] |= {"skip_layers": ["*down_proj"]}
    checkpoint = export("Qwen3", config)
    check(checkpoint, [*ATTENTION, *MLP[:2]], "NVFP4_SVD")
    check(checkpoint, MLP[2:], "NVFP4")


def by_the_reference(
    checkpoint: Checkpoint, module: str, x: torch.Tensor, file: Path
) -> torch.Tensor:
    """x through a network of one linear."""
    g = Graph("target", CheckpointSource(checkpoint))
    rows = g.input("x", ("rows", x.shape[1]), "float32")
    g.output("y", g.linear(module, rows, checkpoint.linear_info(module).out_features))
    plan = plan_weights([g.network])
    reference_weights.write_weights(file, "target", plan, checkpoint, lambda _: None)
    loaded = reference_weights.load_networks({"target": g.network}, {"target": file})
    return loaded["target"].run({"x": x}, StepContext({}, []))["y"]


def test_w4a8_reads_as_weights_alone(export: Export, mtq: Any) -> None:
    """Its codes are scaled to become FP8, but are the same product."""
    checkpoint = export("Qwen3", on_cpu(mtq.W4A8_NVFP4_FP8_CFG, inputs=False))
    check(checkpoint, [*ATTENTION, *MLP], "W4A8_NVFP4_FP8")
    assert checkpoint.linear_info(MLP[0]).kind == "nvfp4"
    source = CheckpointSource(checkpoint)
    assert source.describe(MLP[0], "target", (96, 64)).activations == "bf16"
