"""GLM-5 networks with attention plugins, evaluated on the CPU, against the reference lowering; see
test_tensorrt_paged_lowering.py."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lowered import evaluators, lower_networks
from network_evaluator import evaluate_together
from op_checks import relative
from paged_pairs import NoWeights, Pair, check_ops, pairs_of, tiny, whole
from planted import plant
from plugin_network import PluginBuilder, plugins
from random_glm5 import glm5_config
from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt import paged_latent
from trtree.build.lowering.tensorrt.compile import BuildMessages
from trtree.build.lowering.tensorrt.library import load_library
from trtree.build.lowering.tensorrt.lower import lower
from trtree.build.lowering.tensorrt.paged import paged_lowering
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError
from trtree.build.network.rope import RopeTable
from trtree.build.options import OptionError
from trtree.build.plan import memory_plan

CONFIG = glm5_config(
    qk_nope_head_dim=48,
    mlp_layer_types=["dense", "dense"],
    max_position_embeddings=512,
    vocab_size=96,
)
# Kernels of a layer that chooses its keys, and of one that shares the choice.
SELECTING = ["latent_append", "index_scores", "index_top_k"]
ATTENDING = ["latent_append", "latent_tree_attention", "latent_combine"]


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """12 of up to 311 visible keys."""
    directory = tmp_path_factory.mktemp("sparse")
    description = tiny(directory, CONFIG, page_size=request.param, max_seq_len=400)
    return pairs_of(description, directory / "reference")["target"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An engine whose requests are never longer than a selection."""
    directory = tmp_path_factory.mktemp("dense")
    description = tiny(directory, CONFIG | {"index_topk": 401}, max_seq_len=400)
    return pairs_of(description, directory / "reference")["target"]


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_every_op_of_a_target(sparse: Pair, kind: str) -> None:
    checked = check_ops(sparse, sparse.batch(kind))
    assert checked >= {
        "concat",
        "head_linear",
        "index_select",
        "latent_attention",
        "layer_norm",
        "rotary_embedding",
        "split",
    }


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_a_whole_target(sparse: Pair, kind: str) -> None:
    got, want = whole(sparse, kind)
    # A row whose selection a rounding changed is another row.
    assert relative(got, want).median() < 2e-3


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_short_engines_choose_nothing(dense: Pair, kind: str) -> None:
    layers = [layer.plugin for layer in dense.lowered.definition.plugin_layers]
    assert layers == ["latent_append", *ATTENDING * 2]
    assert "lengths" not in {binding.name for binding in dense.lowered.inputs}
    assert "output.nan_counts" not in {binding.name for binding in dense.lowered.outputs}
    assert "latent_attention" in check_ops(dense, dense.batch(kind))
    got, want = whole(dense, kind)
    assert relative(got, want).median() < 1e-3


def test_a_whole_target_with_experts(tmp_path: Path) -> None:
    description = tiny(tmp_path, glm5_config(moe_intermediate_size=64, vocab_size=96))
    pair = pairs_of(description, tmp_path / "reference")["target"]
    got, want = whole(pair, "tree", length=100)
    assert relative(got, want).median() < 1e-2


def test_the_step_is_declared_once(sparse: Pair) -> None:
    """Two layers share work items and the choice; lists and ranges of slots have their own."""
    lowered = sparse.lowered
    assert [layer.plugin for layer in lowered.definition.plugin_layers] == [
        *SELECTING,
        *ATTENDING * 2,
    ]
    names = [binding.name for binding in lowered.inputs]
    assert names == [
        "token_ids",
        "positions",
        "slots",
        "packed_mask",
        "output_rows",
        "requests",
        "page_table",
        *("work.0", "work.1", "row_splits.1", "lengths"),
        "model.layers.0.self_attn.indexer.keys.latent",
        "model.layers.0.self_attn.latent.latent",
        "model.layers.1.self_attn.latent.latent",
    ]
    assert [(plan.merged, plan.top_k) for plan in lowered.plans] == [(False, None), (True, 12)]
    keys, scores, choice, latents, first, _, _, second, _ = lowered.definition.plugin_layers
    assert keys.aliases[1].name == "model.layers.0.self_attn.indexer.keys.latent"
    assert scores.inputs[2] is keys.outputs[1]
    assert first.inputs[1] is latents.outputs[1]
    assert first.inputs[4] is second.inputs[4] is choice.outputs[0]
    counts = {binding.name: binding.dims for binding in lowered.outputs}["output.nan_counts"]
    assert counts == ("rows",)


def test_nan_is_counted_by_row(sparse: Pair) -> None:
    """In one key of the third request, which all of its rows see."""
    batch = sparse.batch("tree")
    inputs = batch.ragged_inputs(sparse.lowered)
    page, offset = divmod(17, inputs["model.layers.0.self_attn.latent.latent"].shape[1])
    keys = inputs["model.layers.0.self_attn.indexer.keys.latent"]
    keys[batch.segments[2].pages[page], offset, 3] = torch.nan
    counts = sparse.evaluator.run(inputs)["output.nan_counts"]
    assert counts[: batch.num_rows].tolist() == [0] * 9 + [1] * 3
    assert not counts[batch.num_rows :].any()


def _wrong_mask(inputs: dict[str, torch.Tensor]) -> None:
    inputs["packed_mask"][4, 0] ^= 1


def _wrong_position(inputs: dict[str, torch.Tensor]) -> None:
    inputs["positions"][0, 5] += 1


def _wrong_length(inputs: dict[str, torch.Tensor]) -> None:
    inputs["lengths"][:8] -= 8


def _another_requests_pages(inputs: dict[str, torch.Tensor]) -> None:
    inputs["page_table"][0] = inputs["page_table"][2].clone()


def _half_a_list(inputs: dict[str, torch.Tensor]) -> None:
    inputs["work.1"][:, 6] //= 2


@pytest.mark.parametrize(
    "spoil", [_wrong_mask, _wrong_position, _wrong_length, _another_requests_pages, _half_a_list]
)
def test_wrong_step_inputs_show(sparse: Pair, spoil: Any) -> None:
    got, want = whole(sparse, "tree", spoil)
    assert not relative(got, want).max() <= 2e-2


def test_two_ranks_are_one(tmp_path: Path) -> None:
    """Latents and keys are whole on both; heads are divided."""
    description = tiny(tmp_path, CONFIG, tp=2)
    one = pairs_of(dataclasses.replace(description), tmp_path / "reference")["target"]
    batch = one.batch("tree", length=100)
    expected = one.evaluator.run(batch.ragged_inputs(one.lowered))["output.logits"]
    halves, ranks = [], []
    for rank in range(2):
        lowered = lower_networks(description, rank=rank, ranks=2)
        ranks.append(evaluators(lowered)["target"])
        halves.append(batch.ragged_inputs(lowered["target"]))
    parts = [values["output.logits"] for values in evaluate_together(ranks, halves)]
    assert relative(torch.cat(parts, dim=-1)[0], expected[0]).median() < 2e-2


FAULTS = {
    "turned from the front": ("rotary_start=x.start", "rotary_start=0"),
    "the other pairs": ("interleaved=x.interleaved", "interleaved=False"),
    "unturned queries": ('return added["q_out"]', "return q.tensor"),
    "all that is seen": ("selected=plan.top_k is not None", "selected=False"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(paged_latent, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(paged_latent, "OPS", faulty.OPS)
    pair = pairs_of(tiny(tmp_path, CONFIG), tmp_path / "reference")["target"]
    with pytest.raises((AssertionError, IndexError)):
        check_ops(pair, pair.batch("tree", length=100))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("nothing appended", "attention: plugin attention appends this step's vectors first"),
        ("keys unturned", "attention: plugin attention turns queries and latents alike"),
        ("elsewhere", "attention: plugin attention turns queries and latents alike"),
        ("two parts", "q: plugin attention turns one part of a head alone"),
        ("nobody reads", "state: plugin attention appends what an op reads, and none does"),
    ],
)
def test_graphs_that_append_cannot_turn_are_refused(shape: str, message: str) -> None:
    graph = Graph("target", NoWeights(), dtype="bfloat16")
    rows = graph.rows()
    latent = graph.input("latent", ("rows", 32), "bfloat16")
    key = graph.input("key", ("rows", 1, 16), "bfloat16")
    plain, other = (graph.input(n, ("rows", 2, 16), "bfloat16") for n in ("plain", "other"))
    rope = RopeTable("rope", [1.0] * 8, 1.0, True)
    turned = graph.rotary_embedding("turned", other, rows.positions, rope)
    if shape == "two parts":
        plain = graph.rotary_embedding("plain_turned", plain, rows.positions, rope)
    parts = [turned, plain, plain] if shape == "elsewhere" else [plain, plain, turned]
    q = graph.concat("q", parts)
    if shape != "keys unturned":
        key = graph.rotary_embedding("key_turned", key, rows.positions, rope)
    state = graph.latent_state("state", 48)
    cached = graph.concat("cached", [latent, graph.merge_heads("merged", key)])
    if shape != "nothing appended":
        graph.latent_append("append", cached, rows.slots, state)
    read = state if shape != "nobody reads" else graph.latent_state("other", 48)
    if shape == "nobody reads":
        graph.latent_append("append_other", cached, rows.slots, read)
    out = graph.latent_attention("attention", q, rows, read, None, value_dim=32, scale=1.0)
    graph.output("out", out)
    sizes = PagedSizes(120, 16, 8, 2, 32, 64, 17, 17, 0)
    trt = load_library("tensorrt-rtx").module
    logger = BuildMessages().logger(trt)
    builder = trt.Builder(logger)
    paged = paged_lowering(sizes, plugins(), graph.network, Shard())
    with pytest.raises(NetworkError, match=message):
        lower(trt, PluginBuilder(builder), graph.network, Encoding(), {}, 64, paged)


def test_vectors_of_odd_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"latent has vectors of 49, and its commit kernel moves"):
        tiny(tmp_path, glm5_config(kv_lora_rank=33))


def test_a_plan_counts_pages_and_scores(tmp_path: Path) -> None:
    """Per token two latents of 48 numbers and one key of 32, in bf16; 63 pages of 16."""
    description = tiny(tmp_path, CONFIG)
    rows = dict(memory_plan(description))
    assert rows["KV, 1008 tokens in pages of 16"] == f"{1008 * 256 / 1024} KiB"
