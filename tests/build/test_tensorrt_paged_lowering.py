"""Networks with attention plugins, evaluated on the CPU, against the reference lowering.

TensorRT 11 is not here: ordinary layers are a real TensorRT-RTX network's, plugin layers go
through the Python files of ``tensorrt.plugin`` and are computed from their kernels' contract.
Both sides start from the same pages.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import ROOT, random_checkpoint, sliding_drafter, tiny_config
from lowered import describe, evaluators, lower_networks
from network_evaluator import evaluate_together
from op_checks import relative
from paged_pairs import NoWeights, Pair, check_ops, pairs_of, tiny, whole
from plugin_network import PluginBuilder, plugins
from random_moe import glm4_moe_config
from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt.compile import BuildMessages
from trtree.build.lowering.tensorrt.library import load_library, load_plugins
from trtree.build.lowering.tensorrt.lower import lower
from trtree.build.lowering.tensorrt.paged import paged_lowering
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError
from trtree.build.network.rope import RopeTable
from trtree.build.options import OptionError, read_options
from trtree.build.plan import memory_plan

HEADS_OF_64 = {"head_dim": 64, "vocab_size": 96}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two query heads per KV head; one layer slides."""
    directory = tmp_path_factory.mktemp("windowed")
    config = tiny_config(**HEADS_OF_64, **WINDOWS, max_position_embeddings=512)
    description = tiny(directory, config, page_size=request.param, max_seq_len=400)
    return pairs_of(description, directory / "reference")["target"]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Keys and values of a calibrated checkpoint, every scale another."""
    directory = tmp_path_factory.mktemp("fp8")
    config = tiny_config(**HEADS_OF_64, max_position_embeddings=512)
    checkpoint = directory / "checkpoint"
    random_checkpoint(checkpoint, config, algorithm="W4A16_NVFP4", kv_cache="FP8")
    description = tiny(directory, config, max_seq_len=400, activations="bf16")
    return pairs_of(description, directory / "reference")["target"]


@pytest.fixture(scope="module", params=["full", "sliding"])
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    """The demo; with a drafter whose first layer slides, and is causal inside the block."""
    directory = tmp_path_factory.mktemp("demo")
    options = read_options(ROOT / "configs" / "demo.yaml")
    if request.param == "sliding":
        options = options.with_changes({"drafter": sliding_drafter(directory / "drafter")})
    sizes = {"max_seq_len": 96, "max_tree_budget": 16, "top_k": 5, "kv_tokens": 512}
    description = describe(
        options, backend="tensorrt", attention="plugin", activations="bf16", **sizes
    )
    return pairs_of(description, directory / "reference")


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_every_op_of_a_target(windowed: Pair, kind: str) -> None:
    batch = windowed.batch(kind)
    if kind == "tree":  # the longest prefix is two work items of the layer without a window
        assert len(batch.ragged_inputs(windowed.lowered)["work.1"]) == 3 + 1 + 1
    checked = check_ops(windowed, batch)
    assert checked >= {"linear", "rms_norm", "rotary_embedding", "reshape", "tree_attention"}


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_every_op_over_fp8_kv(fp8: Pair, kind: str) -> None:
    assert {b.dtype for b in fp8.lowered.inputs if b.name.endswith((".k", ".v"))} == {
        "float8_e4m3fn"
    }
    assert "tree_attention" in check_ops(fp8, fp8.batch(kind))


def test_fp8_scales_that_are_ignored_show(fp8: Pair) -> None:
    got, want = whole(fp8, "tree")
    # A key or value beside a tie may be rounded to either side: no network is as near as bf16's.
    assert relative(got, want).median() < 3e-2
    saved = {n: v.clone() for n, v in fp8.evaluator.fixed.items() if "kv_scale" in n}
    assert len(saved) == 4  # of two layers' keys and values
    try:
        for name in saved:
            fp8.evaluator.fixed[name].fill_(1.0)
        got, want = whole(fp8, "tree")
        assert relative(got, want).median() > 0.3
    finally:
        for name, value in saved.items():
            fp8.evaluator.fixed[name].copy_(value)


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_every_op_of_the_drafter(demo: dict[str, Pair], kind: str) -> None:
    context, block = demo["drafter_context"], demo["drafter_block"]
    batch = context.batch(kind, length=70)
    width = int(context.reference.network.tensors["captured"].shape[1])
    generator = torch.Generator().manual_seed(1)
    captured = torch.randn(batch.num_rows, width, generator=generator).bfloat16()
    check_ops(context, batch, captured=captured)
    assert [layer.plugin for layer in context.lowered.definition.plugin_layers] == [
        "tree_kv_append"
    ] * 2

    batch = block.batch(kind, length=70)
    masks = {"packed_mask": torch.full_like(batch.reference_inputs()["packed_mask"], -1)}
    names = {binding.name for binding in block.lowered.inputs}
    if "causal_mask" in names:
        masks["causal_mask"] = batch.reference_inputs()["packed_mask"]
    assert ("causal_mask" in names) == (len(block.lowered.plans) == 2)
    assert "top_k_log_probs" in check_ops(block, batch, **masks)


@pytest.mark.parametrize("kind", ["prefill", "tree"])
def test_a_whole_target(windowed: Pair, kind: str) -> None:
    got, want = whole(windowed, kind)
    assert relative(got, want).median() < 1e-3


def test_a_whole_target_with_experts(tmp_path: Path) -> None:
    """Everything but attention is lowered as in native engines, whatever the family."""
    config = glm4_moe_config(**HEADS_OF_64, moe_intermediate_size=64, attention_bias=False)
    description = tiny(tmp_path, config)
    pair = pairs_of(description, tmp_path / "reference")["target"]
    got, want = whole(pair, "tree", length=100)
    assert relative(got, want).median() < 1e-2


def test_a_whole_target_with_low_rank_factors(tmp_path: Path) -> None:
    """Keys and values are sums of two linears then, experts have their own; inputs in bf16."""
    config = glm4_moe_config(**HEADS_OF_64, moe_intermediate_size=64, attention_bias=False)
    random_checkpoint(tmp_path / "checkpoint", config, algorithm="NVFP4_SVD")
    description = tiny(tmp_path, config, activations="bf16")
    pair = pairs_of(description, tmp_path / "reference")["target"]
    got, want = whole(pair, "tree", length=100)
    assert relative(got, want).median() < 2e-2


def _wrong_mask(inputs: dict[str, torch.Tensor]) -> None:
    inputs["packed_mask"][4, 0] ^= 1


def _wrong_position(inputs: dict[str, torch.Tensor]) -> None:
    inputs["positions"][0, 5] += 1


def _wrong_slot(inputs: dict[str, torch.Tensor]) -> None:
    inputs["slots"][5] -= 1


def _another_requests_pages(inputs: dict[str, torch.Tensor]) -> None:
    inputs["page_table"][0] = inputs["page_table"][2].clone()


def _half_an_item(inputs: dict[str, torch.Tensor]) -> None:
    inputs["work.1"][:, 6] -= 1


@pytest.mark.parametrize(
    "spoil", [_wrong_mask, _wrong_position, _wrong_slot, _another_requests_pages, _half_an_item]
)
def test_wrong_step_inputs_show(windowed: Pair, spoil: Any) -> None:
    got, want = whole(windowed, "tree", spoil)
    assert not relative(got, want).max() <= 2e-2


def test_the_step_is_declared_once(windowed: Pair) -> None:
    """All layers read the same page table and masks; each window has its own work items."""
    lowered = windowed.lowered
    names = [binding.name for binding in lowered.inputs]
    assert names == [
        "token_ids",
        "positions",
        "slots",
        "packed_mask",
        "output_rows",
        "requests",
        "page_table",
        *("work.0", "row_splits.0", "work.1", "row_splits.1"),
        *(f"model.layers.{i}.self_attn.kv.{which}" for i in (0, 1) for which in "kv"),
    ]
    assert [plan.window for plan in lowered.plans] == [5, None]
    layers = lowered.definition.plugin_layers
    assert [layer.plugin for layer in layers] == [
        "tree_kv_append",
        "tree_attention",
        "tree_attention_combine",
    ] * 2
    tables = {layer.inputs[names].name for layer, names in ((layers[0], 7), (layers[3], 7))}
    assert tables == {"page_table"}


def test_kv_is_updated_in_place(windowed: Pair) -> None:
    """Outputs of append alias the caches, and are what attention reads."""
    append, attention, _, *_ = windowed.lowered.definition.plugin_layers
    assert append.aliases[0] is None
    assert [tensor.name for tensor in append.aliases[1:]] == [
        "model.layers.0.self_attn.kv.k",
        "model.layers.0.self_attn.kv.v",
    ]
    assert attention.inputs[1] is append.outputs[1]
    aliased = [b for b in windowed.lowered.outputs if b.alias]
    assert [b.name for b in aliased] == [f"output.{b.alias}" for b in aliased]
    assert len(aliased) == 4


def test_two_ranks_are_one(tmp_path: Path) -> None:
    """Each rank has its heads' pages; partial sums are rounded before they are added."""
    description = tiny(tmp_path, tiny_config(**HEADS_OF_64), tp=2)
    one = pairs_of(dataclasses.replace(description), tmp_path / "reference")["target"]
    batch = one.batch("tree", length=100)
    inputs = batch.ragged_inputs(one.lowered)
    expected = one.evaluator.run(inputs)["output.logits"]
    halves, ranks = [], []
    for rank in range(2):
        lowered = lower_networks(description, rank=rank, ranks=2)
        ranks.append(evaluators(lowered)["target"])
        mine = batch.ragged_inputs(lowered["target"])
        for name, cache in batch.caches.items():
            mine[name] = cache[:, :, rank : rank + 1].clone()
        halves.append(mine)
    parts = [values["output.logits"] for values in evaluate_together(ranks, halves)]
    assert relative(torch.cat(parts, dim=-1)[0], expected[0]).median() < 2e-2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("read elsewhere", "turned_again: plugin attention turns q_rotated for itself alone"),
        ("nothing appended", "attention: plugin attention appends this step's keys and values"),
        ("keys unturned", "attention: plugin attention turns queries and keys alike, or neither"),
        ("neither", None),
    ],
)
def test_graphs_that_append_cannot_turn_are_refused(shape: str, message: str | None) -> None:
    """And without RoPE attention reads the queries as they are, not append's unwritten copy."""
    graph = Graph("target", NoWeights(), dtype="bfloat16")
    rows = graph.rows()
    q, k, v = (graph.input(name, ("rows", 2, 64), "bfloat16") for name in "qkv")
    rope = RopeTable("rope", [1.0, 0.1], 1.0, False)
    q_rotated = graph.rotary_embedding("q_rotated", q, rows.positions, rope)
    state = graph.kv_state(2, 64)
    if shape == "read elsewhere":
        graph.rotary_embedding("turned_again", q_rotated, rows.positions, rope)
    if shape != "nothing appended":
        graph.kv_append(k, v, rows.slots, state)
    graph.output("out", graph.tree_attention(q if shape == "neither" else q_rotated, rows, state))
    sizes = PagedSizes(120, 16, 8, 2, 32, 64, 17, 17, 0)
    trt = load_library("tensorrt-rtx").module
    logger = BuildMessages().logger(trt)
    builder = trt.Builder(logger)
    paged = paged_lowering(sizes, plugins(), graph.network, Shard())
    arguments = (trt, PluginBuilder(builder), graph.network, Encoding(), {}, 64, paged)
    if message:
        with pytest.raises(NetworkError, match=message):
            lower(*arguments)
        return
    append, attention, _ = lower(*arguments).definition.plugin_layers
    assert attention.inputs[0] is append.inputs[0]
    assert "q" in append.inputs[0].name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "tensorrt-rtx"},
            "attention plugin: the network of tensorrt-rtx has no ",
        ),
        ({"sm": (89, 120)}, "sm 89, 120: an engine's plugin kernels are for one SM of 80, 89, 90"),
        ({"sm": (121,)}, "sm 121: an engine's plugin kernels are for one SM of 80, 89, 90"),
        ({"page_size": 256}, "page_size 256: attention plugin takes at most 128"),
    ],
)
def test_what_plugins_cannot_do_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        tiny(tmp_path, tiny_config(**HEADS_OF_64), **changes)


def test_head_sizes_without_kernels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"self_attn.kv has heads of 16, its kernels take 64, "):
        tiny(tmp_path, tiny_config())


def test_a_library_without_plugins_is_refused() -> None:
    with pytest.raises(OptionError, match=r"attention plugin: No module named 'tensorrt_rtx"):
        load_plugins(load_library("tensorrt-rtx"))


def test_a_blocks_outputs_do_not_follow_the_budget() -> None:
    """Two requests of blocks of 8, which verify one row each."""
    description = describe(
        read_options(ROOT / "configs" / "demo.yaml"),
        backend="tensorrt",
        attention="plugin",
        activations="bf16",
        tree_budget=0,
        max_tree_budget=0,
        max_batch_size=2,
    )
    sizes, networks = description.engine_sizes, description.networks
    most = {
        name: sizes.profiles(networks[name], Shard())[0].sizes["outputs"][2]
        for name in ("target", "drafter_block")
    }
    assert most == {"target": 512, "drafter_block": 14}


def test_a_plan_counts_pages(tmp_path: Path) -> None:
    """Per token 2 layers of keys and values, 2 heads of 64 in bf16: 1 KiB; 63 pages of 16."""
    description = tiny(tmp_path, tiny_config(**HEADS_OF_64))
    rows = dict(memory_plan(description))
    assert rows["KV, 1008 tokens in pages of 16"] == "1008.0 KiB"
    sizes = description.engine_sizes
    assert isinstance(sizes, PagedSizes)
    (profile,) = sizes.profiles(description.networks["target"], Shard())
    assert profile.sizes["rows"] == (1, 1, 128)
    assert sizes.table_width == -(-(256 + 1) // 16)
