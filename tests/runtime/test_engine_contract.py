"""What every engine owes the executor: refusals by name, and a drafter that keeps up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import DEMO, DEMO_VOCAB, build_demo, tiny_config, write_target
from random_target import random_target
from steps import path_to, prefill, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir, EngineDirError, sha256
from trtree.build.options import BuildOptions
from trtree.runtime.engines import load_engine, open_engine

BACKENDS = ["cpu", "reference"]
Demo = Callable[..., Path]


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, demo_engine: Demo) -> _core.Engine:
    return open_engine(demo_engine(backend=request.param))[1]


def at(request_id: int = 7, slot: int = 0, length: int = 0, pages: Any = (0, 1)) -> Any:
    return _core.Sequence(request_id, slot, length, list(pages))


def batch(*sequences: Any, tokens: int = 1) -> _core.RowBatch:
    rows = list(range(-1, tokens - 1))
    return _core.RowBatch([_core.SegmentRequest(s, [5] * tokens, rows, []) for s in sequences])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (batch(at(length=15, pages=[2]), tokens=2), "request 7: 17 KV slots in 1 pages of 16"),
        (batch(at(length=2**31 - 1)), "request 7: 2147483648 KV slots in 2 pages"),
        (batch(at(length=-1)), "request 7: committed length -1"),
        (batch(at(pages=[512])), "request 7: page 512 of 512"),
        (batch(at(pages=[-1])), "request 7: page -1 of 512"),
        (batch(at(slot=8)), "request 7: slot 8 of 8"),
        (batch(at(), at(slot=1)), "request 7: given twice"),
        (batch(at(), at(8)), "request 8: slot 0 is another request's"),
        (batch(at(pages=range(40)), tokens=513), r"513 rows in a step; .* at most 512"),
        (batch(*[at(i, i % 8) for i in range(9)]), r"9 requests in a step; .* at most 8"),
        (
            _core.RowBatch([_core.SegmentRequest(at(), [DEMO_VOCAB], [-1], [])]),
            f"token id {DEMO_VOCAB} is outside the vocabulary of {DEMO_VOCAB}",
        ),
    ],
)
def test_a_step_beyond_the_capabilities(
    engine: _core.Engine, step: _core.RowBatch, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.step(step)


@pytest.mark.parametrize(
    ("requests", "top_k", "message"),
    [
        ([_core.DraftRequest(at(), 5)], 0, "top_k 0; the engine offers 1 to 64"),
        ([_core.DraftRequest(at(), 5)], 65, "top_k 65; the engine offers 1 to 64"),
        ([_core.DraftRequest(at(), -5)], 4, "token id -5"),
        ([_core.DraftRequest(at(length=-5000000), 5)], 4, "committed length -5000000"),
        ([_core.DraftRequest(at(length=25), 5)], 4, "33 KV slots in 2 pages of 16"),
        ([_core.DraftRequest(at(i, 0), 5) for i in range(9)], 4, "9 requests in a drafter pass"),
    ],
)
def test_a_draft_beyond_the_capabilities(
    engine: _core.Engine, requests: list[Any], top_k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.draft(requests, top_k)


def test_a_commit_has_to_be_a_path_of_the_step(engine: _core.Engine) -> None:
    engine.step(_core.RowBatch([_core.SegmentRequest(at(), [5, 6, 7], [-1, 0, 0], [])]))
    for rows in ([0, 1, 2], [0, 3], [1], [0, -1]):
        with pytest.raises(ValueError, match=r"request 7: .* is no path of the step's 3 rows"):
            engine.commit([_core.Commit(at(), rows)])
    with pytest.raises(ValueError, match="request 8: commit without rows"):
        engine.commit([_core.Commit(at(8), [0])])
    with pytest.raises(ValueError, match="request 7: commit of another sequence"):
        engine.commit([_core.Commit(at(length=1), [0])])
    with pytest.raises(ValueError, match="request 7: given twice"):
        engine.commit([_core.Commit(at(), [0]), _core.Commit(at(), [0, 1])])
    engine.commit([_core.Commit(at(), [0, 2])])
    with pytest.raises(ValueError, match="commit without a step"):
        engine.commit([_core.Commit(at(), [0, 2])])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_drafter_follows_an_accepted_path(
    tmp_path: Path, demo_engine: Demo, backend: str, causal: bool
) -> None:
    """Drafts after a tree's path are those after the same tokens decoded one by one."""
    options: dict[str, Any] = {"backend": backend, "activations": "bf16"}
    if causal:
        options["drafter"] = shutil.copytree(DEMO / "drafter", tmp_path / "drafter")
        config = json.loads((options["drafter"] / "config.json").read_text())
        (options["drafter"] / "config.json").write_text(json.dumps({**config, "is_causal": True}))
        _, engine = open_engine(build_demo(tmp_path / "engine", **options))
    else:
        _, engine = open_engine(demo_engine(**options))
    prompt = list(range(300, 340))
    tokens, parents = [9, 10, 11, 12, 13, 14], [-1, 0, 0, 2, 2, 4]
    path = path_to(5, parents)
    drafts = []
    for plain, pages in ((False, range(8)), (True, range(8, 16))):
        prefill(engine, at(pages=pages), prompt)
        length = len(prompt)
        if plain:
            for row in path:
                prefill(engine, at(length=length, pages=pages), [tokens[row]])
                length += 1
        else:
            run_rows(engine, [(at(length=length, pages=pages), tokens, parents)])
            engine.commit([_core.Commit(at(length=length, pages=pages), path)])
            length += len(path)
        draft = engine.draft([_core.DraftRequest(at(length=length, pages=pages), 77)], 8)
        drafts.append((draft.log_probs.copy(), draft.token_ids.copy()))
    (tree, tree_ids), (alone, alone_ids) = drafts
    assert (tree_ids == alone_ids).all()
    np.testing.assert_allclose(tree, alone, rtol=0, atol=0 if backend == "cpu" else 1e-6)


def test_causal_drafters_agree_and_differ_from_bidirectional_ones(
    tmp_path: Path, demo_engine: Demo
) -> None:
    drafter = shutil.copytree(DEMO / "drafter", tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "is_causal": True}))
    results = []
    for path in (
        build_demo(tmp_path / "cpu", backend="cpu", activations="bf16", drafter=drafter),
        build_demo(tmp_path / "ref", backend="reference", activations="bf16", drafter=drafter),
        demo_engine(backend="cpu", activations="bf16"),
    ):
        _, engine = open_engine(path)
        prefill(engine, at(pages=range(8)), list(range(100, 140)))
        draft = engine.draft([_core.DraftRequest(at(length=40, pages=range(8)), 7)], 4)
        results.append(draft.log_probs.copy())
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-2)
    assert np.abs(results[0] - results[2]).max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflowing_logits_are_an_error(tmp_path: Path, backend: str) -> None:
    """Pitfall 27: the logits of an overflowed norm are NaN, and the row is named."""
    config = tiny_config()
    tensors = random_target(config, dtype=torch.float32)
    tensors["model.norm.weight"] = torch.full((64,), 3e38)
    checkpoint = write_target(tmp_path / "checkpoint", tensors, config)
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "engine", backend=backend)
    _, engine = open_engine(builder.write(builder.describe(options)))
    request = _core.SegmentRequest(at(), [1, 2], [-1, 0], [0, 1])
    with pytest.raises((FloatingPointError, RuntimeError), match="NaN in the logits of output row"):
        engine.step(_core.RowBatch([request]))


def edited_plan(demo: Path, tmp_path: Path, edit: Callable[[Any], None]) -> EngineDir:
    """An engine whose plan.json was edited, hash and all."""
    path = Path(shutil.copytree(demo, tmp_path / "edited"))
    plan = json.loads((path / "plan.json").read_text())
    edit(plan)
    (path / "plan.json").write_text(json.dumps(plan))
    manifest = json.loads((path / "config.json").read_text())
    file = path / "plan.json"
    manifest["files"]["plan.json"] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (path / "config.json").write_text(json.dumps(manifest))
    return EngineDir.open(path)


def rename_scale(plan: Any) -> None:
    for op in plan["networks"]["target"]["ops"]:
        op["x_scale"] = op.pop("scale")


def without_ranks(plan: Any) -> None:
    """As it was before plans knew ranks."""
    del plan["rank"], plan["ranks"]


def without_logits(plan: Any) -> None:
    del plan["networks"]["target"]["logits"]


def far_operand(plan: Any) -> None:
    plan["networks"]["target"]["ops"][2]["inputs"] = [9999]


def wide_stride(plan: Any) -> None:
    plan["networks"]["target"]["tensors"][3]["stride"] = 10**6


def negative_offset(plan: Any) -> None:
    plan["weights"][1]["offset"] = -(10**9)


def other_weight(plan: Any) -> None:
    ops = plan["networks"]["target"]["ops"]
    linears = [op for op in ops if op["kind"] == "linear"]
    linears[0]["weight"], linears[1]["weight"] = linears[1]["weight"], linears[0]["weight"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (rename_scale, r"PlanOp has \['x_scale'\] too many and lacks \['scale'\]"),
        (without_ranks, r"plan has \[\] too many and lacks \['rank', 'ranks'\]; rebuild"),
        (without_logits, r"network has \[\] too many and lacks \['logits'\]"),
        (far_operand, "tensor 9999 of"),
        (wide_stride, "target: tensor 3"),
        (negative_offset, "offset -1000000000"),
        (other_weight, r"weight \[.*\] between widths"),
    ],
)
def test_a_plan_is_checked_before_it_runs(
    demo_engine: Demo, tmp_path: Path, edit: Callable[[Any], None], message: str
) -> None:
    engine = edited_plan(demo_engine(backend="cpu"), tmp_path, edit)
    with pytest.raises((ValueError, EngineDirError), match=message):
        load_engine(engine)


def test_k_is_reduced_in_eight_segments_of_whole_blocks(demo_engine: Demo) -> None:
    plan = EngineDir.open(demo_engine(backend="cpu")).plan()
    for weight in plan["weights"]:
        if weight["kind"] != "vector":
            blocks = weight["in_features"] // 16
            assert weight["segments"] == [i * blocks // 8 for i in range(9)]
