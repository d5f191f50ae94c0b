"""Faults planted in the kernels one at a time: the checks must fail. docs/results.md lists what
each of them says."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from planted import plant
from trtree.plugins.mla_attention import launch
from trtree.plugins.mla_attention.cases import LatentCase, make_inputs
from trtree.plugins.mla_attention.device_checks import (
    check_append,
    check_attention,
    check_select,
)
from trtree.plugins.mla_attention.kernels import append, attention
from trtree.plugins.mla_attention.tiles import LatentTile
from trtree.plugins.sparse_indexer import launch as indexer
from trtree.plugins.sparse_indexer.kernels import scores, top_k
from trtree.plugins.sparse_indexer.tiles import IndexTile
from trtree.plugins.tree_attention.kernels import softmax

CPU = torch.device("cpu")
CASE = LatentCase(rows=36, context=40, heads=2, index_heads=2, top_k=8, dtype=torch.float16)
FEW = replace(CASE, rows=4)


@dataclass(frozen=True)
class Fault:
    name: str
    module: ModuleType
    old: str
    new: str
    case: LatentCase
    message: str


FAULTS = [
    Fault("mask one bit off", softmax, ">> bit[None, :]", ">> (bit[None, :] ^ 1)", CASE, "lat"),
    Fault("one mask word", softmax, "first_bit // 32", "first_bit * 0", CASE, "lat"),
    Fault(
        "prefix one longer",
        attention,
        "tl.load(field + PREFIX)",
        "(tl.load(field + PREFIX) + 1)",
        CASE,
        "lat",
    ),
    Fault(
        "the selection ignored",
        attention,
        "other=-1)\n            inside",
        "other=-1)\n"
        "            slot = tl.where(slot < 0, slot, start + column)\n            inside",
        FEW,
        "latent attention",
    ),
    Fault(
        "attention through another request's page table",
        attention,
        "tl.load(field + REQUEST)",
        "(tl.load(field + REQUEST) * 0)",
        FEW,
        "lat",
    ),
    Fault(
        "the rotated part left out",
        attention,
        'tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")',
        "scores",
        FEW,
        "lat",
    ),
    Fault(
        "append through another request's page table",
        append,
        "request * table_width",
        "0 * table_width",
        FEW,
        "latent cache",
    ),
    Fault("RoPE by slot", append, "tl.load(positions + row", "tl.load(slots + row", CASE, "turned"),
    Fault(
        "scores of another request's keys",
        scores,
        "tl.load(field + REQUEST)",
        "(tl.load(field + REQUEST) * 0)",
        FEW,
        "index scores",
    ),
    Fault("siblings scored", scores, "tree_row & 31", "tree_row & 15", CASE, "index scores"),
    Fault("no relu", scores, "products < 0.0", "products < -1e9", FEW, "index scores"),
    Fault("ties to nobody", top_k, "before < need", "before < need - 1", FEW, "selection"),
    Fault("every tie taken", top_k, "before < need", "before >= 0", FEW, "selection"),
]
# Who uses a faulty module, and what to take from it.
KERNELS = {
    append: (launch, ("latent_append_kernel",)),
    attention: (launch, ("latent_tree_attention_kernel",)),
    softmax: (attention, ("accumulate", "tail_begin", "tail_visible")),
    scores: (indexer, ("index_scores_kernel",)),
    top_k: (indexer, ("index_top_k_kernel",)),
}


def run(case: LatentCase, module: ModuleType | None) -> None:
    """All checks, or those of one kernel."""
    inputs = make_inputs(case)
    q, cache = check_append(case, inputs, CPU, rows_per_program=64)
    if module is append:
        return
    selection = check_select(
        case, inputs, IndexTile(8, 64, 4, 2), CPU, target_ctas=1, block=128, score_error=1e-6
    )
    if module in (scores, top_k):
        return
    for chosen in (None, selection):
        tile = LatentTile(16, 2, 64, 4, 2)
        check_attention(case, inputs, q, cache, chosen, tile, CPU, target_ctas=1, weight_error=4e-6)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, names = KERNELS[fault.module]
    faulty = plant(fault.module, fault.old, fault.new, tmp_path)
    for name in names:
        monkeypatch.setattr(where, name, getattr(faulty, name))
    with pytest.raises(AssertionError, match=fault.message) as failure:
        run(fault.case, fault.module)
    print(f"{fault.name}: {failure.value}")


@pytest.mark.parametrize("case", [CASE, FEW], ids=["tree", "few"])
def test_the_same_cases_pass_without_a_fault(case: LatentCase) -> None:
    run(case, None)
