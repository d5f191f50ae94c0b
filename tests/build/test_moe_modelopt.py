"""ModelOpt's own exports of targets with experts, read and run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dequantized import dequantized, dequantized_by_modelopt
from engines import write_tokenizer
from oracle import check_w4a4_export
from random_moe import fused, glm4_moe_config, qwen3_moe_config, random_moe
from trtree.build.checkpoint import Checkpoint
from trtree.build.checkpoint.headers import scaled_for_one_expert
from trtree.build.modelopt_cpu import on_cpu
from trtree.plugins.nvfp4_linear import format as nvfp4

Prepare = Callable[[Any], None]

CONFIGS = {
    "qwen3": qwen3_moe_config(moe_intermediate_size=64),
    "glm": glm4_moe_config(moe_intermediate_size=64),
}


def model_of(config: dict[str, Any]) -> Any:
    """transformers' model with random weights, to be filled or quantized."""
    import transformers

    name = config["architectures"][0]
    settings = getattr(transformers, name.replace("ForCausalLM", "Config"))(**config)
    return getattr(transformers, name)(settings).eval()


class ListedExperts(torch.nn.ModuleList):
    """Experts as modules of their own, as transformers had them before it fused them: ModelOpt
    exports AWQ of those alone."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, mlp in enumerate(self):
            rows, slot = (index == expert).nonzero(as_tuple=True)
            if len(rows):
                y.index_add_(0, rows, mlp(x[rows]) * weights[rows, slot, None].to(x.dtype))
        return y


def list_experts(model: Any) -> None:
    for layer in model.model.layers:
        fused_experts = getattr(layer.mlp, "experts", None)
        if fused_experts is None:
            continue
        dense = type(model.model.layers[0].mlp)  # the first layer is
        listed = []
        for gate_up, down in zip(fused_experts.gate_up_proj, fused_experts.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            mlp = dense(model.config, intermediate_size=len(gate))
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            mlp.load_state_dict({f"{name}.weight": w for name, w in weights.items()})
            listed.append(mlp.to(gate.dtype))
        layer.mlp.experts = ListedExperts(listed)


def export(
    config: dict[str, Any],
    directory: Path,
    algorithm: str = "NVFP4_DEFAULT_CFG",
    before: Prepare = lambda _: None,
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.nn import QuantModuleRegistry

    model = model_of(config).to(torch.bfloat16)
    tensors = fused(random_moe(config, dtype=torch.bfloat16))
    model.load_state_dict(tensors, strict=False)
    before(model)
    blocks = {type(layer.mlp) for layer in model.model.layers}
    token_ids = torch.randint(0, 80, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mtq.quantize(model, on_cpu(getattr(mtq, algorithm)), lambda m: m(token_ids))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(directory))
    # What ModelOpt took for a list of experts once, it would in later models too.
    for block in blocks:
        if block in QuantModuleRegistry:
            QuantModuleRegistry.unregister(block)
    write_tokenizer(directory, config["vocab_size"])


@pytest.mark.parametrize(
    "algorithm", ["NVFP4_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG"]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_an_export_is_read_and_run(tmp_path: Path, family: str, algorithm: str) -> None:
    """Its weights alone against transformers with the same weights expanded; then as it is."""
    directory = tmp_path / "checkpoint"
    plain = algorithm == "NVFP4_DEFAULT_CFG"
    export(CONFIGS[family], directory, algorithm, (lambda _: None) if plain else list_experts)
    checkpoint = Checkpoint.open(directory)
    if "AWQ" in algorithm:
        check_vectors(checkpoint, family)
    expected = "model.layers.1.mlp" if family == "glm" and "AWQ" in algorithm else None
    assert scaled_for_one_expert(checkpoint.names(), checkpoint.quantization) == expected
    for name in checkpoint.names():
        if ".experts." in name and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            weight = checkpoint.linear([module]).weight
            assert isinstance(weight, nvfp4.QuantizedTensor)
            assert torch.equal(
                nvfp4.dequantize(weight), dequantized_by_modelopt(checkpoint, module)
            )
    theirs = model_of(CONFIGS[family]).float()
    missing, unexpected = theirs.load_state_dict(fused(dequantized(checkpoint)), strict=False)
    assert (missing, unexpected) == ([], [])
    check_w4a4_export(directory, theirs, tmp_path)


def check_vectors(checkpoint: Checkpoint, family: str) -> None:
    """An expert's gate and up share a vector. Qwen3's are averaged over the experts, and those
    of down_proj go into up_proj; GLM's experts keep their own."""
    at = "model.layers.1.mlp.experts"

    def vector(expert: int, which: str) -> Tensor:
        return checkpoint.tensor(f"{at}.{expert}.{which}_proj.pre_quant_scale")

    for expert in range(8):
        assert torch.equal(vector(expert, "gate"), vector(expert, "up"))
    shared = torch.equal(vector(0, "up"), vector(1, "up"))
    assert shared == (family == "qwen3")
    assert (f"{at}.0.down_proj.pre_quant_scale" in checkpoint) == (family == "glm")
    if family == "glm":
        assert not torch.equal(vector(0, "down"), vector(1, "down"))
