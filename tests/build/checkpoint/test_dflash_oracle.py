"""z-lab's ``dflash`` package as the oracle for how a drafter's configuration is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from trtree.build.checkpoint import CheckpointError
from trtree.build.checkpoint.dflash_config import default_target_layer_ids, parse


@pytest.fixture(scope="module")
def model() -> Any:
    """z-lab's model code; imported late, as it takes seconds."""
    from dflash import model

    return model


def test_default_layers(model: Any) -> None:
    for target_layers in range(1, 100):
        for draft_layers in range(1, 12):
            assert default_target_layer_ids(
                target_layers, draft_layers
            ) == model.build_target_layer_ids(target_layers, draft_layers)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"is_causal": True},
        {"num_target_layers": 36, "dflash_config": {"mask_token_id": 7}},
        {
            "block_size": None,
            "dflash_config": {"mask_token_id": 0, "block_size": 5, "target_layer_ids": [2]},
        },
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [3, 1]}},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 512,
            "is_causal": False,
        },
    ],
)
def test_what_the_model_is_built_with(model: Any, demo: Path, change: dict[str, Any]) -> None:
    fields = {**json.loads((demo / "drafter" / "config.json").read_text()), **change}
    fields = {key: value for key, value in fields.items() if value is not None}
    drafter = parse(fields, Path("config.json"))
    # Hugging Face turns windows off unless this is set; a file may leave it out.
    theirs = model.DFlashDraftModel(
        model.Qwen3Config(**{**fields, "use_sliding_window": True, "max_position_embeddings": 64})
    )
    assert drafter.block_size == theirs.block_size
    assert drafter.mask_token_id == theirs.mask_token_id
    assert list(drafter.target_layer_ids) == list(theirs.target_layer_ids)
    attention = [layer.self_attn for layer in theirs.layers]
    assert list(drafter.causal) == [a.is_causal for a in attention]
    windows = [
        drafter.transformer["sliding_window"] if kind == "sliding_attention" else None
        for kind in drafter.transformer["layer_types"]
    ]
    assert windows == [a.sliding_window for a in attention]


def test_dflash2_is_what_z_lab_calls_it(model: Any, demo: Path) -> None:
    """Its model reads the very keys by which the variant is recognised."""
    fields = json.loads((demo / "drafter" / "config.json").read_text())
    extra = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 2}
    fields["dflash_config"] |= extra
    assert model.DFlash2DraftModel(model.Qwen3Config(**fields)).candidate_selector.top_k == 2
    for key in ("conv_kernel_size", "selector_rank", "selector_top_k"):
        only = {**fields, "dflash_config": {"mask_token_id": 1, key: extra[key]}}
        with pytest.raises(CheckpointError, match=rf"DFlash2 drafters \(key {key}\)"):
            parse(only, Path("config.json"))
