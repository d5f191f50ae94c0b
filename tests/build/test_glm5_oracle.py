"""GLM-5 against transformers' class, in float32: logits, and the selections of every indexer."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import write_target
from random_glm5 import glm5_config, random_glm5, transformers_model
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.lowering import reference
from trtree.build.models import family_of
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions
from trtree.build.source import CheckpointSource
from trtree.plugins.sparse_indexer import reference as index_reference
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.runtime.engines import open_engine

TOLERANCE = 1e-4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "shared": glm5_config(),
    "all-full": glm5_config(indexer_types=["full", "full"]),
    "two-groups-of-layers": glm5_config(
        num_hidden_layers=5, indexer_types=["full", "shared", "shared", "full", "shared"]
    ),
    "by-frequency": glm5_config(
        num_hidden_layers=5, indexer_types=None, index_topk_freq=2, index_skip_topk_offset=1
    ),
    "by-pattern": glm5_config(num_hidden_layers=3, indexer_types=None, index_topk_pattern="FSF"),
    "dense": glm5_config(index_topk=48),
    "dense-for-long": glm5_config(index_topk=64),
    "one-key": glm5_config(index_topk=1),
    "yarn": glm5_config(rope_parameters=YARN),
    "yarn-mscale": glm5_config(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}),
    "linear-mscale": glm5_config(
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 2.0,
            "mscale_all_dim": 1.0,
        }
    ),
    "bias": glm5_config(attention_bias=True),
    "tied": glm5_config(tie_word_embeddings=True),
    "all-dense": glm5_config(first_k_dense_replace=2),
    "mlp-types": glm5_config(first_k_dense_replace=0, mlp_layer_types=["dense", "sparse"]),
    "one-expert-group": glm5_config(n_group=1, topk_group=1, norm_topk_prob=False),
    "odd-sizes": glm5_config(
        qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=40, kv_lora_rank=40, index_n_heads=12
    ),
}


def build(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    checkpoint = write_target(directory / "checkpoint", tensors, config)
    options = BuildOptions(
        checkpoint=checkpoint, output=directory / "engine", backend="reference", page_size=4
    )
    return open_engine(builder.write(builder.describe(options)))[1]


@contextmanager
def our_selections() -> Iterator[dict[str, torch.Tensor]]:
    """The last result of every indexer of the reference lowering, by op."""
    found: dict[str, torch.Tensor] = {}
    select = reference._OPS["index_select"]

    def recording(net: Any, op: Any, x: Any, step: Any) -> Any:
        (found[op.name],) = result = select(net, op, x, step)
        return result

    reference._OPS["index_select"] = recording
    try:
        yield found
    finally:
        reference._OPS["index_select"] = select


def their_selections(model: Any, token_ids: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """Logits [tokens, vocab], and what every indexer chose, [tokens, top-k] positions."""
    found = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, result, name=name: found.__setitem__(name, result[0])
        )
        for name, module in model.named_modules()
        if name.endswith(".indexer")
    ]
    with torch.inference_mode():
        logits = model(token_ids[None]).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, found


def visible_sets(selection: torch.Tensor, first: int) -> list[set[int]]:
    """By row, the chosen positions up to the row's own: transformers fills up with others."""
    return [{int(s) for s in row if 0 <= s <= first + index} for index, row in enumerate(selection)]


@pytest.mark.parametrize("case", CASES)
def test_target_against_transformers(tmp_path: Path, case: str) -> None:
    """A prompt longer than most cases' top-k, then single steps."""
    config = CASES[case]
    tensors = random_glm5(config, dtype=torch.float32)
    engine = build(tmp_path, config, tensors)
    token_ids = torch.randint(0, 80, (48,), generator=torch.Generator().manual_seed(1))
    expected, theirs = their_selections(transformers_model(config, tensors), token_ids)

    pages = list(range(12))
    with our_selections() as ours:
        first = prefill(engine, _core.Sequence(1, 0, 0, pages), token_ids[:44].tolist())
        np.testing.assert_allclose(first, expected[:44], rtol=0, atol=TOLERANCE)
        assert {name.removesuffix(".select") for name in ours} == set(theirs)
        for name, selection in theirs.items():
            mine = ours[f"{name}.select"]
            assert visible_sets(mine, 0) == visible_sets(selection[:44], 0)
            top_k = config["index_topk"]
            assert [len(s) for s in visible_sets(mine, 0)] == [
                min(top_k, seen) for seen in range(1, 45)
            ]
        for position in range(44, 48):  # and one token at a time
            at = _core.Sequence(1, 0, position, pages)
            logits = prefill(engine, at, [int(token_ids[position])])
            np.testing.assert_allclose(logits[0], expected[position], rtol=0, atol=TOLERANCE)
            for name, selection in theirs.items():
                mine = ours[f"{name}.select"]
                assert visible_sets(mine, position) == visible_sets(
                    selection[position : position + 1], position
                )


@pytest.mark.parametrize("budget", [0, 1, 31, 33, 128])
@pytest.mark.parametrize("prefix", [0, 5, 30])
def test_tree_rows_choose_and_answer_as_their_paths_alone(
    tmp_path: Path, prefix: int, budget: int
) -> None:
    """Below and above the top-k of 12; selections as positions on the path."""
    config = glm5_config(num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    engine = build(tmp_path, config, random_glm5(config, dtype=torch.float32))
    rng = random.Random(budget)
    prompt = [rng.randrange(80) for _ in range(prefix)]
    tokens, parents = random_tree(rng, budget, 80)
    pages = list(range(48))
    at = _core.Sequence(1, 0, prefix, pages)
    if prompt:
        prefill(engine, _core.Sequence(1, 0, 0, pages), prompt)
    with our_selections() as ours:
        (logits,) = run_rows(engine, [(at, tokens, parents)])
        together = dict(ours)
        for row in rng.sample(range(len(tokens)), min(4, len(tokens))):
            path = path_to(row, parents)
            (alone,) = run_rows(
                engine, [(at, [tokens[r] for r in path], list(range(-1, len(path) - 1)))]
            )
            np.testing.assert_allclose(logits[row], alone[-1], rtol=0, atol=1e-5)
            slots = [*range(prefix), *(prefix + r for r in path)]
            for name, selection in ours.items():
                chosen = [slots[s] for s in selection[-1].tolist() if s >= 0]
                assert together[name][row][: len(chosen)].tolist() == chosen
                assert (together[name][row][len(chosen) :] == -1).all()


def test_a_planted_mask_behind_the_choice_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings that take other keys' places before attention hides them: a chain is still
    right, a tree is not."""
    config = glm5_config()
    engine = build(tmp_path, config, random_glm5(config, dtype=torch.float32))
    prompt, pages = list(range(30)), list(range(16))
    at = _core.Sequence(1, 0, 30, pages)

    def last_row(tokens: list[int], parents: list[int]) -> np.ndarray:
        prefill(engine, _core.Sequence(1, 0, 0, pages), prompt)
        return run_rows(engine, [(at, tokens, parents)])[0][-1]

    def see_all_before(packed_mask: torch.Tensor, segment: AttentionSegment) -> torch.Tensor:
        shape = (segment.num_rows, segment.prefix_length + segment.num_rows)
        return torch.ones(shape, dtype=torch.bool).tril(segment.prefix_length)

    siblings, parents = [11, *range(40, 60), 12], [-1, *[0] * 21]
    right = last_row([11, 12], [-1, 0])
    np.testing.assert_allclose(last_row(siblings, parents), right, rtol=0, atol=1e-5)
    monkeypatch.setattr(index_reference, "visible", see_all_before)
    np.testing.assert_allclose(last_row([11, 12], [-1, 0]), right, rtol=0, atol=1e-5)
    off = np.abs(last_row(siblings, parents) - right).max()
    print(
        f"the last of the siblings is off by {off:.2g}, of logits that spread by {right.std():.2g}"
    )
    assert off > 1e-2


def test_captured_states_are_the_published_ones(tmp_path: Path) -> None:
    config = glm5_config()
    tensors = random_glm5(config, dtype=torch.float32)
    checkpoint = write_target(tmp_path / "checkpoint", tensors, config)
    source = CheckpointSource.open(BuildOptions(checkpoint=checkpoint, output=tmp_path / "e"))
    graph = Graph("target", source)
    family = family_of(config)
    family.build(graph, family.parse(config), (0, 1))
    assert graph.network.tensors[graph.network.outputs["captured"]].shape == ("rows", 128)
    inputs = {op.name: op.inputs for op in graph.network.ops}
    assert inputs["captured"] == ("model.layers.0.mlp_residual", "model.layers.1.mlp_residual")


def test_the_prediction_layer_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = glm5_config()
    tensors = random_glm5(config, dtype=torch.bfloat16)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.1." in name
    }
    extra["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    caplog.set_level("INFO")
    checkpoint = write_target(tmp_path / "mtp", tensors | extra, config)
    builder.describe(BuildOptions(checkpoint=checkpoint, output=tmp_path / "engine"))
    assert f"model.layers.2.*: {len(extra)} tensors of a prediction layer" in caplog.text
    unsaid = config | {"num_nextn_predict_layers": 0}
    checkpoint = write_target(tmp_path / "unknown", tensors | extra, unsaid)
    with pytest.raises(CheckpointError, match=r"tensors would not be used: model\.layers\.2"):
        builder.describe(BuildOptions(checkpoint=checkpoint, output=tmp_path / "engine"))


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (glm5_config(q_lora_rank=None), "q_lora_rank is missing"),
        (glm5_config(kv_lora_rank=0), "kv_lora_rank must be a positive integer, not 0"),
        (glm5_config(index_head_dim=8), "index_head_dim 8 is smaller than qk_rope_head_dim 16"),
        (glm5_config(index_topk=0), "index_topk must be a positive integer"),
        (glm5_config(indexer_types=["shared", "full"]), "the first full, not ['shared', 'full']"),
        (glm5_config(indexer_types=["full"]), "indexer_types must name 2 layers"),
        (glm5_config(indexer_types=["full", ["full"]]), "each full or shared"),
        (glm5_config(indexer_types=None, index_topk_pattern="FX"), "not 'FX'"),
        (glm5_config(mlp_layer_types=["sparse", "dense"]), "dense ones before sparse"),
        (glm5_config(mlp_layer_types=["dense"]), "mlp_layer_types must name 2 layers"),
        (glm5_config(indexer_rope_interleave=False), "indexer_rope_interleave False is not"),
        (glm5_config(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
        (glm5_config(num_experts_per_tok=9), "top_k 9 of"),
        (
            glm5_config(rope_parameters={"rope_type": "linear", "mscale_all_dim": 1}),
            "factor must be a positive number",
        ),
    ],
)
def test_what_config_json_cannot_say(config: dict[str, Any], part: str) -> None:
    with pytest.raises(NetworkError) as caught:
        family_of(config).parse(config)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
