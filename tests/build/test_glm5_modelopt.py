"""ModelOpt's own export of a GLM-5 target: read to the last bit, and run."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dequantized import dequantized, dequantized_by_modelopt
from engines import random_checkpoint, write_tokenizer
from random_glm5 import glm5_config, random_glm5, transformers_model
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.runtime.engines import open_engine

CONFIG = glm5_config(
    moe_intermediate_size=64, num_hidden_layers=3, indexer_types=["full", "shared", "full"]
)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    directory = tmp_path_factory.mktemp("glm5") / "checkpoint"
    tensors = random_glm5(CONFIG, dtype=torch.bfloat16)
    model = transformers_model(CONFIG, tensors).to(torch.bfloat16)
    token_ids = torch.randint(0, 80, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), lambda m: m(token_ids))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(directory))
    write_tokenizer(directory, CONFIG["vocab_size"])
    return directory


@pytest.fixture(scope="module")
def build(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("engines")

    def built(backend: str, activations: Any = None) -> Path:
        output = root / f"{backend}.{activations}"
        options = BuildOptions(
            checkpoint=export, output=output, backend=backend, activations=activations
        )
        return builder.write(builder.describe(options))

    return built


def test_every_quantized_module_is_stored_to_the_last_bit(export: Path, build: Any) -> None:
    """kv_b_proj dequantized, whole in both of its uses; the others in their own codes."""
    checkpoint = Checkpoint.open(export)
    engine = EngineDir.open(build("reference"))
    stored = load_file(engine.path / "target.rank0.safetensors")
    compared = set()
    for weight in engine.networks()["target"].weights.values():
        for index, module in enumerate(weight.modules):
            if f"{module}.weight_scale" not in checkpoint:
                continue
            parts = {
                part: stored.get(f"{weight.name}.{part}")
                for part in ("codes", "block_scale", "global_scale", "weight")
            }
            per_expert = len(weight.modules) // (weight.experts or 1)
            if weight.experts:
                parts = {k: t if t is None else t[index // per_expert] for k, t in parts.items()}
            ours = parts["weight"]
            if ours is None:
                ours = nvfp4.dequantize(
                    nvfp4.QuantizedTensor(
                        parts["codes"], parts["block_scale"], parts["global_scale"]
                    )
                )
            start = sum(weight.out_sizes[index - index % per_expert : index])
            rows = slice(start, start + weight.out_sizes[index])
            assert torch.equal(ours[rows], dequantized_by_modelopt(checkpoint, module)), module
            compared.add(module)
    named = {n.removesuffix(".weight_scale") for n in checkpoint.names() if ".weight_scale" in n}
    assert compared == {n.removesuffix(".weight_scale_2") for n in named}
    attention = "model.layers.0.self_attn."
    assert {f"{attention}kv_b_proj", f"{attention}indexer.wq_b", f"{attention}indexer.wk"} <= (
        compared
    )


def test_the_export_is_run(export: Path, build: Any) -> None:
    """Its weights alone against transformers with the same weights expanded; then as it is."""
    theirs = transformers_model(CONFIG, dequantized(Checkpoint.open(export)))
    token_ids = torch.randint(0, 80, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(token_ids[None]).logits[0].numpy()

    def logits(path: Path) -> np.ndarray:
        _, engine = open_engine(path)
        return prefill(engine, _core.Sequence(1, 0, 0, list(range(3))), token_ids.tolist())

    exact = logits(build("reference", "float32"))
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-4)
    w4a16 = logits(build("cpu", "bf16"))
    difference = np.linalg.norm(w4a16 - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0 < np.median(difference) < 3e-2
    # With four-bit activations the indexer chooses other keys: compared op by op elsewhere.
    assert np.isfinite(logits(build("cpu"))).all()


def test_scaled_inputs_and_factors(tmp_path: Path) -> None:
    """kv_b_proj's become part of it; the others' are ops of their own."""
    directory = random_checkpoint(tmp_path / "checkpoint", CONFIG, algorithm="NVFP4_SVD")
    theirs = transformers_model(CONFIG, dequantized(Checkpoint.open(directory)))
    token_ids = torch.randint(0, 80, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(token_ids[None]).logits[0].numpy()
    options = BuildOptions(
        checkpoint=directory,
        output=tmp_path / "engine",
        backend="reference",
        activations="float32",
    )
    _, engine = open_engine(builder.write(builder.describe(options)))
    logits = prefill(engine, _core.Sequence(1, 0, 0, list(range(3))), token_ids.tolist())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
