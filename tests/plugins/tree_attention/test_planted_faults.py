"""Faults that were met elsewhere, planted one at a time: the checks must fail.

docs/results.md lists what each of them says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from planted import plant
from trtree.plugins.tree_attention import cases, launch
from trtree.plugins.tree_attention.cases import AttentionCase
from trtree.plugins.tree_attention.device_checks import (
    check_append,
    check_attention,
    check_commit,
)
from trtree.plugins.tree_attention.kernels import append, attention, combine, commit, softmax
from trtree.plugins.tree_attention.tiles import attention_tile

CPU = torch.device("cpu")
CASE = AttentionCase(
    rows=40,
    context=100,
    page_size=16,
    group=2,
    requests=2,
    head_dim=64,
    dtype=torch.bfloat16,
    fp8_kv=False,
    window=None,
    kv_heads=1,
)
# Two ranges of keys per tile.
LONG = replace(CASE, rows=5, context=400)
# Paths of more rows than a commit program moves at a time.
DEEP = replace(CASE, rows=200, context=3)
WINDOWED = replace(CASE, rows=30, context=100, window=3)


def run_append(case: AttentionCase) -> None:
    check_append(cases.make_inputs(case), CPU, rows_per_program=32)


def run_attention(case: AttentionCase) -> None:
    inputs = cases.make_inputs(case)
    # The reference's cache: the fault is in attention alone.
    q, cache = check_append(inputs, CPU, rows_per_program=32)
    tile = attention_tile(120, case.head_dim, case.rows, case.group)
    check_attention(case, inputs, q, cache, tile, CPU, target_ctas=8, weight_error=4e-6)


def run_commit(case: AttentionCase) -> None:
    check_commit(case, cases.make_inputs(case), CPU)


@dataclass(frozen=True)
class Fault:
    name: str
    module: ModuleType
    old: str
    new: str
    case: AttentionCase
    message: str


FAULTS = [
    Fault("mask one bit off", softmax, ">> bit[None, :]", ">> (bit[None, :] ^ 1)", CASE, "att"),
    Fault(
        "mask one row off", attention, "row.to(tl.int64) * mask", "(row + 1) * mask", CASE, "att"
    ),
    Fault("one mask word per row", softmax, "first_bit // 32", "first_bit * 0", CASE, "att"),
    Fault(
        "prefix one token longer",
        attention,
        "tl.load(field + PREFIX)",
        "(tl.load(field + PREFIX) + 1)",
        CASE,
        "att",
    ),
    Fault(
        "prefix one token shorter",
        attention,
        "tl.load(field + PREFIX)",
        "(tl.load(field + PREFIX) - 1)",
        CASE,
        "att",
    ),
    Fault("sums not shrunk", softmax, "total = total * keep", "total = total", LONG, "att"),
    Fault(
        "window by slot",
        attention,
        "tl.load(own, mask=inside & in_tree, other=0)",
        "slot",
        WINDOWED,
        "att",
    ),
    Fault(
        "RoPE by slot", append, "tl.load(positions + row", "tl.load(slots + row", CASE, "turned q"
    ),
    Fault(
        "append through another request's page table",
        append,
        "request * table_width",
        "0 * table_width",
        CASE,
        "k cache",
    ),
    Fault(
        "attention through another request's page table",
        attention,
        "tl.load(field + REQUEST)",
        "(tl.load(field + REQUEST) * 0)",
        CASE,
        "att",
    ),
    Fault(
        "commit through another request's page table",
        commit,
        "page_table + request * table_width",
        "page_table + 0 * request",
        CASE,
        "layer 0 k",
    ),
    Fault(
        "commit of one batch only", commit, "range(0, count,", "range(0, BLOCK_R,", DEEP, "layer 0"
    ),
    Fault(
        "splits weighed alike",
        combine,
        "tl.exp2(part_lse - new_top[None, :])",
        "tl.where(inside, 1.0, 0.0)",
        LONG,
        "att",
    ),
]
# What to take from a faulty module, who uses it, and the checks.
RUNS: dict[ModuleType, tuple[tuple[str, ...], ModuleType, Callable[[AttentionCase], None]]] = {
    append: (("tree_kv_append_kernel",), launch, run_append),
    attention: (("tree_attention_kernel",), launch, run_attention),
    combine: (("tree_attention_combine_kernel",), launch, run_attention),
    commit: (("tree_kv_commit_kernel",), launch, run_commit),
    softmax: (("accumulate", "tail_begin", "tail_visible"), attention, run_attention),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, user, run = RUNS[fault.module]
    faulty = plant(fault.module, fault.old, fault.new, tmp_path)
    for name in names:
        monkeypatch.setattr(user, name, getattr(faulty, name))
    with pytest.raises(AssertionError, match=fault.message) as failure:
        run(fault.case)
    print(f"{fault.name}: {failure.value}")


@pytest.mark.parametrize("case", [CASE, LONG, WINDOWED], ids=lambda case: case.name)
def test_the_same_cases_pass_without_a_fault(case: AttentionCase) -> None:
    run_attention(case)
    run_commit(case)
