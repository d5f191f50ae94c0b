"""DFlash drafters in the speculators library's format."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import DEMO_PROMPTS, DEMO_VOCAB
from speculators_format import DRAFTER_FIELDS, Json, reduced, restate, write_speculators
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint, CheckpointError, read_drafter
from trtree.build.checkpoint.dflash_config import parse
from trtree.build.checkpoint.speculators import QWEN3_DEFAULTS
from trtree.build.engine_dir import EngineDir
from trtree.build.options import read_options
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import Request
from trtree.runtime.session import Session

WHERE = Path("drafter/config.json")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def fields(demo: Path) -> Json:
    loaded: Json = json.loads((demo / "drafter" / "config.json").read_text())
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_speculators, tmp_path / "speculators")


def test_both_formats_describe_one_drafter(fields: Json) -> None:
    theirs, ours = parse(fields, WHERE), parse(restate(fields), WHERE)
    assert ours.target_layer_ids == theirs.target_layer_ids == (1, 2, 3, 4)
    assert (theirs.layer_ids_read_as, ours.layer_ids_read_as) == ("L", "L+1")
    for field in ("block_size", "mask_token_id", "causal"):
        assert getattr(ours, field) == getattr(theirs, field)
    for key, value in theirs.transformer.items():
        if key not in DRAFTER_FIELDS and value is not None:
            assert ours.transformer[key] == value


def test_fields_left_out_are_transformers_defaults() -> None:
    from transformers import Qwen3Config

    assert {key: getattr(Qwen3Config(), key) for key in QWEN3_DEFAULTS} == QWEN3_DEFAULTS
    sizes = {"num_hidden_layers": 2, "rope_theta": 1e6}
    bare = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": sizes,
        "block_size": 8,
        "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [2],
    }
    drafter = parse(bare, WHERE)
    assert drafter.transformer["hidden_size"] == 4096
    assert drafter.transformer["num_hidden_layers"] == 2


@pytest.mark.parametrize(("non_causal", "causal"), [(False, (True, False)), (True, (False, False))])
def test_sliding_layers(fields: Json, non_causal: bool, causal: tuple[bool, ...]) -> None:
    sliding = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
    }
    found = parse(restate(fields | sliding, sliding_window_non_causal=non_causal), WHERE)
    assert found.causal == causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "of type 'eagle3' are not supported yet"),
        ({"speculators_model_type": "dspark"}, "of type 'dspark' are not supported yet"),
        ({"projector_type": "domino"}, "of type 'domino' are not supported yet"),
        ({"draft_vocab_size": DEMO_VOCAB + 1}, f"is not between 1 and .* vocab_size {DEMO_VOCAB}"),
        ({"target_hidden_size": 512}, "target_hidden_size 512 is not the drafter's hidden_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported yet"),
        ({"shift_label": True}, "shift_label True is not supported yet"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object, not 3"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type 'llama' is not supp"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, r"\[0, 2\] is not a list .* count from 1"),
        ({"aux_hidden_state_layer_ids": None}, "None is not a list of layer numbers"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"markov_rank": 4, "speculators_model_type": "dspark"}, "'dspark'"),
    ],
)
def test_what_is_not_supported_is_named(fields: Json, changes: Json, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(restate(fields, **changes), WHERE)


def test_a_layer_the_target_lacks_is_refused(fields: Json, demo: Path) -> None:
    drafter = parse(restate(fields, aux_hidden_state_layer_ids=[1, 2, 7]), WHERE)
    with pytest.raises(CheckpointError, match=r"taps layer 6 \(from 0\), .* num_hidden_layers 6"):
        drafter.check_target(Checkpoint.open(demo / "target_nvfp4").config)


def test_the_layer_trained_against_is_dropped(write: Callable[..., Path]) -> None:
    """One id more than fc has inputs for: the last layer, whose states were the labels."""
    path = write(aux_hidden_state_layer_ids=[2, 3, 4, 5, 6])
    assert read_drafter(Checkpoint.open(path)).target_layer_ids == (1, 2, 3, 4)


def test_it_drafts_what_z_labs_format_drafts(
    write: Callable[..., Path], demo: Path, tmp_path: Path, demo_session: Callable[..., Session]
) -> None:
    embedding = Checkpoint.open(demo / "target_nvfp4").tensor("model.embed_tokens.weight").clone()
    path = write(
        {
            "embed_tokens.weight": embedding,
            "lm_head.weight": embedding.clone(),
            "verifier_norm.weight": torch.ones(256),
            "d2t": torch.zeros(DEMO_VOCAB, dtype=torch.int64),
            "t2d": torch.ones(DEMO_VOCAB, dtype=torch.bool),
        }
    )
    options = read_options(ROOT / "configs" / "demo.yaml")
    options = options.with_changes({"drafter": path, "output": tmp_path / "engine"})
    sessions = [Session(builder.write(builder.describe(options))), demo_session()]
    done = [
        session.complete(
            Request(
                session.tokenizer.encode(DEMO_PROMPTS[0]),
                max_tokens=40,
                speculative=session.speculative_config("tree", 8),
            )
        )
        for session in sessions
    ]
    assert done[0].token_ids == done[1].token_ids
    lengths = [d.statistics.acceptance_length for d in done]
    assert lengths[0] == lengths[1] > 1.5


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_reduced_vocabulary_drafts_the_targets_ids(
    write: Callable[..., Path], demo: Path, tmp_path: Path, backend: str
) -> None:
    """Of every third token, with the target's own rows of the head: the drafts are those of
    the whole vocabulary without the others, renormalized."""
    ids = torch.arange(2, DEMO_VOCAB, 3)
    path = write(reduced(ids), draft_vocab_size=len(ids))
    drafts = []
    for drafter in (path, demo / "drafter"):
        options = read_options(ROOT / "configs" / "demo.yaml").with_changes(
            {"drafter": drafter, "backend": backend, "output": tmp_path / f"{drafter.name}-engine"}
        )
        drafts.append(draft_after(EngineDir.open(builder.write(builder.describe(options))), 64))
    ours, every = drafts
    assert ours.token_ids.shape == every.token_ids.shape
    for row in range(every.token_ids.shape[1]):
        kept = np.isin(every.token_ids[0, row], ids.numpy())
        count = int(kept.sum())
        assert count > 3
        assert np.array_equal(ours.token_ids[0, row, :count], every.token_ids[0, row][kept])
        shift = ours.log_probs[0, row, :count] - every.log_probs[0, row][kept]
        assert np.allclose(shift, shift[0], atol=1e-5) and shift[0] > 0


def test_a_reduced_vocabulary_changes_no_text(
    write: Callable[..., Path], demo: Path, tmp_path: Path, demo_session: Callable[..., Session]
) -> None:
    ids = torch.arange(2, DEMO_VOCAB, 3)
    path = write(reduced(ids), draft_vocab_size=len(ids))
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes(
        {"drafter": path, "output": tmp_path / "engine"}
    )
    session, whole = Session(builder.write(builder.describe(options))), demo_session()
    prompt = session.tokenizer.encode(DEMO_PROMPTS[0])
    plain = whole.complete(Request(prompt, max_tokens=40)).token_ids
    for mode in ("chain", "tree"):
        request = Request(prompt, max_tokens=40, speculative=session.speculative_config(mode, 8))
        done = session.complete(request)
        assert done.token_ids == plain
        assert done.statistics.acceptance_length > 1.2


def draft_after(engine_dir: EngineDir, top_k: int) -> _core.DraftResult:
    """One draft of an engine of its own."""
    engine, tokens = load_engine(engine_dir, num_threads=1), list(range(300, 320))
    at = _core.Sequence(2**40 + 1, 1, 0, list(range(8)))
    prefill(engine, at, tokens)
    at = _core.Sequence(2**40 + 1, 1, len(tokens), list(range(8)))
    return engine.draft([_core.DraftRequest(at, tokens[-1])], top_k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.arange(3)}, r"d2t has shape \[3\], draft_vocab_size is 5"),
        ({"d2t": torch.tensor([4, 3, 2, 1, 0])}, r"expected rising ids of the target's"),
        ({"d2t": torch.full((5,), DEMO_VOCAB)}, "expected rising ids of the target's"),
        ({"t2d": torch.zeros(DEMO_VOCAB, dtype=torch.bool)}, "t2d names other tokens than d2t's 5"),
        ({"d2t": torch.zeros(5)}, "tensor d2t is float32, expected int64 or int32"),
        (
            {"t2d": (torch.arange(DEMO_VOCAB) < 5).long()},
            "tensor t2d is int64, expected bool",
        ),
        (
            {"lm_head.weight": torch.zeros(4, 256)},
            r"lm_head.weight has shape .* implies \[5, 256\]",
        ),
    ],
)
def test_maps_that_contradict_are_refused(
    write: Callable[..., Path], demo: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    path = write(reduced(torch.arange(5), **changes), draft_vocab_size=5)
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes({"drafter": path})
    with pytest.raises(CheckpointError, match=message):
        builder.describe(options)


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight"])
def test_a_reduced_vocabulary_has_a_map_and_a_head(
    write: Callable[..., Path], demo: Path, missing: str
) -> None:
    extra = reduced(torch.arange(5))
    del extra[missing]
    options = read_options(ROOT / "configs" / "demo.yaml")
    options = options.with_changes({"drafter": write(extra, draft_vocab_size=5)})
    with pytest.raises(CheckpointError, match=missing):
        builder.describe(options)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"d2t": torch.arange(DEMO_VOCAB)}, "d2t maps a reduced draft vocabulary"),
        ({"t2d": torch.zeros(DEMO_VOCAB, dtype=torch.bool)}, "t2d maps a reduced draft vocabulary"),
        ({"extra.weight": torch.zeros(2)}, "extra.weight"),
        (
            {"lm_head.weight": torch.zeros(DEMO_VOCAB, 256)},
            "lm_head.weight is not the target's model.emb",
        ),
    ],
)
def test_tensors_that_are_not_copies_are_refused(
    write: Callable[..., Path], extra: dict[str, torch.Tensor], message: str
) -> None:
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes({"drafter": write(extra)})
    with pytest.raises(CheckpointError, match=message):
        builder.describe(options)
