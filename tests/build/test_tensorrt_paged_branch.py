"""Hybrid networks with attention plugins, evaluated on the CPU, against the reference lowering; see
test_tensorrt_paged_lowering.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from op_checks import relative
from paged_pairs import Pair, check_ops, pairs_of, tiny, whole
from planted import plant
from random_hybrid import hybrid_config
from trtree.build.lowering.tensorrt import paged_branch
from trtree.build.options import OptionError
from trtree.build.plan import memory_plan

SIZES = {
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
RECURRENT = ["causal_conv", "gated_delta_decay", "gated_delta_net"]
ATTENDING = ["tree_kv_append", "tree_attention", "tree_attention_combine"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A recurrent layer, then one that attends."""
    directory = tmp_path_factory.mktemp("hybrid")
    description = tiny(directory, hybrid_config("Qwen3_5ForCausalLM", **SIZES), max_seq_len=400)
    return pairs_of(description, directory / "reference")["target"]


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_every_op_of_a_target(hybrid: Pair, kind: str) -> None:
    checked = check_ops(hybrid, hybrid.batch(kind))
    assert checked >= {"causal_conv", "gated_delta_net", "sigmoid_mul", "split", "tree_attention"}


def test_every_op_over_fp8_kv(tmp_path: Path) -> None:
    """The layer that attends; state that branches is kept as it was."""
    config = hybrid_config("Qwen3_5ForCausalLM", **SIZES)
    description = tiny(tmp_path, config, max_seq_len=400, kv_cache="fp8")
    pair = pairs_of(description, tmp_path / "reference")["target"]
    kept = {
        b.name.rpartition("attn.")[2]: b.dtype for b in pair.lowered.inputs if "attn." in b.name
    }
    fp8 = "float8_e4m3fn"
    assert kept == {"conv": "bfloat16", "recurrent": "float32", "kv.k": fp8, "kv.v": fp8}
    assert "tree_attention" in check_ops(pair, pair.batch("tree"))


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_a_whole_target(hybrid: Pair, kind: str) -> None:
    got, want = whole(hybrid, kind)
    assert relative(got, want).median() < 2e-3


@pytest.mark.parametrize("family", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_whole_targets_with_experts(family: str, tmp_path: Path) -> None:
    pair = pairs_of(tiny(tmp_path, hybrid_config(family, **SIZES)), tmp_path / "ref")["target"]
    got, want = whole(pair, "tree", length=100)
    assert relative(got, want).median() < 1e-2


def test_the_step_is_declared_once(hybrid: Pair) -> None:
    lowered = hybrid.lowered
    layers = [layer.plugin for layer in lowered.definition.plugin_layers]
    assert layers == [*RECURRENT, *ATTENDING]
    conv, decay, rule, *_ = lowered.definition.plugin_layers
    assert conv.inputs[5] is decay.inputs[3] is rule.inputs[6]
    assert conv.inputs[5].name == "branch_requests"
    assert rule.inputs[7].name == "model.layers.0.linear_attn.recurrent"
    assert rule.aliases == conv.aliases[:1] * 2 == [None, None]  # read, never written
    inputs = {binding.name: binding.dims for binding in lowered.inputs}
    assert inputs["branch_requests"] == (8, 4)
    assert inputs["conv_inputs"] == ("rows", 4)
    assert inputs["model.layers.0.linear_attn.recurrent"] == (8, 4, 64, 128)
    outputs = {binding.name: (binding.dtype, binding.dims) for binding in lowered.outputs}
    start = "output.model.layers.0.linear_attn"
    assert outputs[f"{start}.conv.x"] == ("bfloat16", ("rows", 2 * 2 * 64 + 4 * 128))
    assert outputs[f"{start}.recurrent.k"] == ("bfloat16", ("rows", 2, 64))
    assert outputs[f"{start}.recurrent.u"] == ("float32", ("rows", 4, 128))
    assert outputs[f"{start}.recurrent.g"] == ("float32", ("rows", 4))


def _wrong_mask(inputs: dict[str, torch.Tensor]) -> None:
    inputs["packed_mask"][4, 0] ^= 1


def _another_slot(inputs: dict[str, torch.Tensor]) -> None:
    inputs["branch_requests"][0, 2] -= 1


def _not_fresh(inputs: dict[str, torch.Tensor]) -> None:
    inputs["branch_requests"][1, 3] = 0


def _siblings_inputs(inputs: dict[str, torch.Tensor]) -> None:
    inputs["conv_inputs"][2, 2] += 1


@pytest.mark.parametrize("spoil", [_wrong_mask, _another_slot, _not_fresh, _siblings_inputs])
def test_wrong_step_inputs_show(hybrid: Pair, spoil: Any) -> None:
    got, want = whole(hybrid, "tree", spoil)
    assert not relative(got, want).max() <= 2e-2


FAULTS = {
    "queries for keys": ('"k": k,', '"k": q,'),
    "heads in one group": ("group=heads // key_heads", "group=heads"),
    "the gate of the other": ('emit.shuffle("a", a,', 'emit.shuffle("a", b,'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(paged_branch, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(paged_branch, "OPS", faulty.OPS)
    config = hybrid_config("Qwen3_5ForCausalLM", **SIZES)
    pair = pairs_of(tiny(tmp_path, config), tmp_path / "reference")["target"]
    with pytest.raises((AssertionError, RuntimeError)):
        check_ops(pair, pair.batch("tree", length=100))


def test_a_plan_counts_pages_and_states(tmp_path: Path) -> None:
    """One layer of KV: 2 heads of 64 in bf16, 512 bytes a token; 8 slots of 4 states of 64 x 128
    in float32, and of 3 inputs of 768 channels."""
    rows = dict(memory_plan(tiny(tmp_path, hybrid_config("Qwen3_5ForCausalLM", **SIZES))))
    assert rows["KV, 1008 tokens in pages of 16"] == f"{1008 / 2} KiB"
    per_slot = 4 * 64 * 128 * 4 + 3 * 768 * 2
    (state,) = (text for name, text in rows.items() if name.startswith("recurrent state, 8 x"))
    assert state == f"{8 * per_slot / 2**20:.2f} MiB"
    (kept,) = (text for name, text in rows.items() if name.startswith("snapshots of it, 16 x"))
    assert kept == f"{16 * per_slot / 2**20:.2f} MiB"


def test_snapshots_want_pages(tmp_path: Path) -> None:
    """Native engines share nothing between prompts."""
    native = {"attention": "native", "backend": "tensorrt-rtx", "state_snapshots": 4}
    with pytest.raises(OptionError, match="state_snapshots 4: engines of backend tensorrt-rtx wi"):
        tiny(tmp_path, hybrid_config("Qwen3_5ForCausalLM", **SIZES), **native)
