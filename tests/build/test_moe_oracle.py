"""The families with experts against transformers' classes, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EXCLUDE, write_target
from oracle import check_logits, reference_engine
from random_moe import fused, glm4_moe_config, qwen3_moe_config, random_moe
from trtree.build import builder
from trtree.build.checkpoint import CheckpointError, QuantizationConfig
from trtree.build.checkpoint.write import quantize_state_dict
from trtree.build.models import family_of
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions

CASES = {
    "qwen3": qwen3_moe_config(),
    "qwen3-not-normalized": qwen3_moe_config(norm_topk_prob=False),
    "qwen3-all-sparse-tied": qwen3_moe_config(decoder_sparse_step=1, tie_word_embeddings=True),
    "qwen3-mlp-only-layers": qwen3_moe_config(decoder_sparse_step=1, mlp_only_layers=[1]),
    "qwen3-all-experts": qwen3_moe_config(num_experts=4, num_experts_per_tok=4),
    "qwen3-one-expert": qwen3_moe_config(num_experts_per_tok=1),
    "qwen3-bias": qwen3_moe_config(attention_bias=True),
    "qwen3-window": qwen3_moe_config(use_sliding_window=True, sliding_window=7),
    "glm": glm4_moe_config(),
    "glm-one-group": glm4_moe_config(n_group=1, topk_group=1),
    "glm-all-groups": glm4_moe_config(n_group=2, topk_group=2),
    "glm-not-normalized": glm4_moe_config(norm_topk_prob=False),
    "glm-no-qk-norm": glm4_moe_config(use_qk_norm=False),
    "glm-no-bias": glm4_moe_config(attention_bias=False),
    "glm-quarter-rotary": glm4_moe_config(partial_rotary_factor=0.25),
    "glm-whole-rotary": glm4_moe_config(partial_rotary_factor=1.0),
    "glm-two-shared-all-sparse": glm4_moe_config(n_shared_experts=2, first_k_dense_replace=0),
    "glm-all-dense": glm4_moe_config(first_k_dense_replace=2),
}


def theirs(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' model in float32 with these tensors."""
    import transformers

    name = config["architectures"][0]
    settings = getattr(transformers, name.replace("ForCausalLM", "Config"))(**config)
    model = getattr(transformers, name)(settings).float().eval()
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    missing, unexpected = model.load_state_dict(fused(tensors), strict=False)
    assert (missing, unexpected) == (tied, [])
    if tied:
        model.tie_weights()
    return model


@pytest.mark.parametrize("case", CASES)
def test_target_against_transformers(tmp_path: Path, case: str) -> None:
    config = CASES[case]
    tensors = random_moe(config, dtype=torch.float32)
    check_logits(reference_engine(tmp_path, config, tensors), theirs(config, tensors), chunks=(44,))


def describe(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    quantization: QuantizationConfig | None = None,
) -> Any:
    checkpoint = write_target(directory, tensors, config, quantization)
    options = BuildOptions(checkpoint=checkpoint, output=directory / "engine")
    return builder.describe(options)


def test_the_prediction_layer_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where an exporter left it unquantized without saying so."""
    config = glm4_moe_config()
    tensors = random_moe(config, dtype=torch.bfloat16)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    extra["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    caplog.set_level("INFO")
    quantized = dict(quantize_state_dict(tensors.items(), exclude=EXCLUDE))
    quantization = QuantizationConfig("NVFP4", EXCLUDE)
    described = describe(tmp_path / "mtp", config, quantized | extra, quantization)
    assert not any(".layers.2." in name for name in described.networks["target"].weights)
    assert f"model.layers.2.*: {len(extra)} tensors of a prediction layer" in caplog.text
    with pytest.raises(CheckpointError, match=r"tensors would not be used: model\.layers\.2"):
        describe(tmp_path / "unknown", config | {"num_nextn_predict_layers": 0}, tensors | extra)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            qwen3_moe_config(num_experts_per_tok=9),
            "top_k 9 of 8 candidate experts; correct num_experts_per_tok 9",
        ),
        (qwen3_moe_config(num_experts=0), "num_experts must be a positive integer, not 0"),
        (qwen3_moe_config(mlp_only_layers=[-1]), "mlp_only_layers must be a list"),
        (qwen3_moe_config(mlp_only_layers="1"), "mlp_only_layers must be a list"),
        (qwen3_moe_config(decoder_sparse_step=0), "decoder_sparse_step"),
        (qwen3_moe_config(norm_topk_prob=1), "norm_topk_prob must be true or false, not 1"),
        (qwen3_moe_config(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not"),
        (glm4_moe_config(n_group=3), "8 experts do not divide into 3 groups"),
        (glm4_moe_config(n_group=8), "8 groups of 8 experts hold fewer than two"),
        (glm4_moe_config(topk_group=5), "top_groups 5 of 4 groups"),
        (
            glm4_moe_config(topk_group=1),
            "top_k 3 of 2 candidate experts; correct num_experts_per_tok 3, n_group 4 and "
            "topk_group 1",
        ),
        (glm4_moe_config(routed_scaling_factor=0), "routed_scaling_factor must be a positive"),
        (glm4_moe_config(first_k_dense_replace=-1), "first_k_dense_replace must be a non-neg"),
        (glm4_moe_config(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
        (glm4_moe_config(partial_rotary_factor=0.1), "leaves 1 rotary dimensions"),
        (glm4_moe_config(partial_rotary_factor=1.5), "leaves 24 rotary dimensions"),
    ],
)
def test_what_config_json_cannot_say(config: dict[str, Any], part: str) -> None:
    with pytest.raises(NetworkError) as caught:
        family_of(config).parse(config)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_of_two_kinds_are_refused(tmp_path: Path) -> None:
    config = qwen3_moe_config()
    tensors = random_moe(config, dtype=torch.bfloat16)
    odd = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[odd] = tensors[odd].float()
    with pytest.raises(NetworkError, match=r"experts\.5\.up_proj: the experts .* float32"):
        describe(tmp_path / "mixed", config, tensors)
    tensors[odd] = tensors[odd][:32]
    with pytest.raises(NetworkError, match=r"experts\.5\.up_proj: the checkpoint holds \[32, 64\]"):
        describe(tmp_path / "short", config, tensors)
    del tensors[odd]
    with pytest.raises(CheckpointError, match=r"no tensor .*experts\.5\.up_proj\.weight"):
        describe(tmp_path / "missing", config, tensors)
