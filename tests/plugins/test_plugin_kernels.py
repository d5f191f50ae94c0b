"""Whole lowered networks, layer by layer: every plugin layer's kernel, interpreted with the
arguments, grid and integers that TensorRT would be told, against the evaluator's contract."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluated_layers import attention as evaluated
from interpreted_plugins import run_interpreted
from paged_pairs import pairs_of, tiny
from plugin_layers import plugin_layer
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from trtree.plugins.registry import PLUGINS

PLUGIN = {plugin.name: plugin for plugin in PLUGINS}
CONFIGS = {
    "glm5": glm5_config(vocab_size=96, mlp_layer_types=["dense", "dense"]),
    "hybrid": hybrid_config(
        "Qwen3_5ForCausalLM",
        vocab_size=96,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
}
# Relative to the largest number of an output: sums in float32, and one rounding.
ERRORS = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("family", CONFIGS)
def test_kernels_run_as_they_are_declared(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def both(name: str, attribute: str, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies = [x.clone() for x in operands]
        wanted = plugin_layer(name, attribute, operands)
        for got, want in zip(run_interpreted(PLUGIN[name], attribute, copies), wanted, strict=True):
            compare(name, got, want.to(got.dtype))
        seen.append(name)
        return wanted

    monkeypatch.setattr(evaluated, "plugin_layer", both)
    pair = pairs_of(tiny(tmp_path, CONFIGS[family]), tmp_path / "reference")["target"]
    pair.evaluator.run(pair.batch("tree", length=20).ragged_inputs(pair.lowered))
    assert seen == [layer.plugin for layer in pair.lowered.definition.plugin_layers]


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a grid without query heads": (
        "glm5",
        "latent_append",
        {"grid": lambda trtp, x, of: (trtp.cdiv(x["x"].shape_expr[0], 4), 1)},
    ),
    "integers in another order": (
        "glm5",
        "latent_tree_attention",
        {"scalars": lambda x, of: tuple(x[n].shape_expr[1] for n in ("packed_mask",) * 2 + ("q",))},
    ),
    "strides of other tensors": (
        "hybrid",
        "gated_delta_net",
        {"scalars": lambda x, of: (64, 128, 256, 4, x["packed_mask"].shape_expr[1])},
    ),
    "one block of rows": ("hybrid", "causal_conv", {"grid": lambda trtp, x, of: (1, 8)}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_declaration_shows(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, name, change = WRONG[fault]
    monkeypatch.setitem(PLUGIN, name, dataclasses.replace(PLUGIN[name], **change))
    with pytest.raises(AssertionError, match=name):
        test_kernels_run_as_they_are_declared(family, tmp_path, monkeypatch)


def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, name
    if not got.is_floating_point():
        assert torch.equal(got, want), name
        return
    written = ~want.isnan()  # as far as the contract says
    assert not got[written].isnan().any(), name
    finite = want.isfinite()
    assert torch.equal(got[written & ~finite], want[written & ~finite]), name
    exact = want[finite].double()
    apart = (got[finite].double() - exact).abs()
    assert apart.max() <= ERRORS[got.dtype] * exact.abs().max(), (name, float(apart.max()))
