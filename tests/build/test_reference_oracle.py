"""The reference lowering against the published implementations, in float32.

transformers' Qwen3ForCausalLM for targets, z-lab's DFlashDraftModel for the drafter.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import DEMO, DEMO_VOCAB, tiny_config
from oracle import TOLERANCE, check_logits, reference_engine
from steps import prefill
from trtree import _core
from trtree.build.checkpoint import Checkpoint
from trtree.runtime.bench.against_dflash import load_dequantized
from trtree.runtime.engines import open_engine


def load_transformers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' model in float32 with these tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype")}
    model = Qwen3ForCausalLM(Qwen3Config(**fields)).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert (missing, unexpected) == (tied, [])
    if tied:
        model.tie_weights()
    return model


def random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Float32 tensors of a Qwen3 target, norms off 1 so that a missing one shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tensors = dict(Qwen3ForCausalLM(Qwen3Config(**config)).state_dict())
    for name, tensor in tensors.items():
        noise = torch.randn_like(tensor)
        tensors[name] = 1 + 0.2 * noise if tensor.ndim == 1 else 0.15 * noise
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return tensors


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"attention_bias": True},
        rope(rope_type="linear", factor=4.0),
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "use_sliding_window": True,
        },
        {"max_window_layers": 1, "sliding_window": 7, "use_sliding_window": True},
        {"max_window_layers": 0, "sliding_window": None, "use_sliding_window": True},
    ],
    ids=[
        "untied",
        "tied",
        "one-kv-head",
        "wide-heads",
        "bias",
        "linear",
        "llama3",
        "yarn",
        "window",
        "window-without-layer-types",
        "no-window-without-layer-types",
    ],
)
def test_target_against_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    tensors = random_tensors(config)
    check_logits(reference_engine(tmp_path, config, tensors), load_transformers(config, tensors))


@pytest.fixture(scope="module")
def dequantized_demo() -> Any:
    """transformers' model of the demo target, NVFP4 weights dequantized."""
    return load_dequantized(Checkpoint.open(DEMO / "target_nvfp4"))


def test_drafter_against_the_published_package(demo_engine: Any, dequantized_demo: Any) -> None:
    """Context in three parts, then a block: log-probs equal z-lab's within 1e-4."""
    from dflash.model import DFlashDraftModel, extract_context_feature

    theirs = DFlashDraftModel.from_pretrained(DEMO / "drafter", dtype=torch.float32).eval()
    _, engine = open_engine(demo_engine(backend="reference", activations="float32"))
    token_ids = torch.randint(0, DEMO_VOCAB, (41,), generator=torch.Generator().manual_seed(2))
    config = json.loads((DEMO / "drafter" / "config.json").read_text())
    block, mask = config["block_size"], config["dflash_config"]["mask_token_id"]
    bonus = 77
    with torch.inference_mode():
        output = dequantized_demo(token_ids[None], output_hidden_states=True)
        captured = extract_context_feature(output.hidden_states, theirs.target_layer_ids)
        embedding = dequantized_demo.get_input_embeddings()
        hidden = theirs(
            target_hidden=captured,
            noise_embedding=embedding(torch.tensor([[bonus] + [mask] * (block - 1)])),
            position_ids=torch.arange(41 + block)[None],
        )
        logits = dequantized_demo.lm_head(hidden[0, 1:])
    expected = logits.log_softmax(-1).numpy()

    pages = list(range(4))
    for first, last in ((0, 30), (30, 31), (31, 41)):
        at = _core.Sequence(1, 0, first, pages)
        prefill(engine, at, token_ids[first:last].tolist())
    at = _core.Sequence(1, 0, 41, pages)
    draft = engine.draft([_core.DraftRequest(at, bonus)], 64)
    got, ids = draft.log_probs[0], draft.token_ids[0]
    np.testing.assert_allclose(
        got, np.take_along_axis(expected, ids.astype(np.int64), -1), rtol=0, atol=TOLERANCE
    )
    best = -np.sort(-expected, axis=-1)[:, :64]
    np.testing.assert_allclose(got, best, rtol=0, atol=TOLERANCE)


def test_captured_layers_are_the_published_ones(demo_engine: Any, dequantized_demo: Any) -> None:
    """Pitfall 2: per-layer RMS of captured states, so that an id off by one shows."""
    _, engine = open_engine(demo_engine(backend="reference", activations="float32"))
    token_ids = torch.randint(0, DEMO_VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    network = engine.networks["target"]
    captured: dict[str, torch.Tensor] = {}
    original = network.run

    def observe(inputs: Any, context: Any) -> Any:
        return captured.setdefault("out", original(inputs, context))

    network.run = observe  # type: ignore[method-assign]
    try:
        prefill(engine, _core.Sequence(1, 0, 0, [0, 1]), token_ids.tolist())
    finally:
        del network.run
    with torch.inference_mode():
        states = dequantized_demo(token_ids[None], output_hidden_states=True).hidden_states
    config = json.loads((DEMO / "drafter" / "config.json").read_text())
    layers = config["dflash_config"]["target_layer_ids"]
    parts = captured["out"]["captured"].chunk(len(layers), dim=-1)
    for layer, part in zip(layers, parts, strict=True):
        np.testing.assert_allclose(part, states[layer + 1][0], rtol=0, atol=TOLERANCE)
