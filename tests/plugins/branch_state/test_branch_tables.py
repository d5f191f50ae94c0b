"""The shared tables: kernels (interpreted) and TensorRT's layers (evaluated) against the
reference, and faults that the tables must see. docs/results.md says what each fault gives."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from branch_implementations import (
    conv_kernels,
    conv_layers,
    conv_plugins,
    delta_kernels,
    delta_layers,
    delta_plugins,
)
from planted import plant
from trtree.build.lowering.tensorrt import branch
from trtree.build.lowering.tensorrt.ops import OPS
from trtree.plugins import branch_tables
from trtree.plugins.causal_conv import cases as conv_table
from trtree.plugins.causal_conv import contract
from trtree.plugins.causal_conv import launch as conv
from trtree.plugins.causal_conv.cases import ConvCase
from trtree.plugins.causal_conv.kernels import conv as conv_kernel
from trtree.plugins.gated_delta_net import cases as delta_table
from trtree.plugins.gated_delta_net import launch as delta
from trtree.plugins.gated_delta_net.cases import DeltaCase
from trtree.plugins.gated_delta_net.kernels import commit as commit_kernel
from trtree.plugins.gated_delta_net.kernels import decay as decay_kernel
from trtree.plugins.gated_delta_net.kernels import delta as delta_kernel
from trtree.runtime.engines import tensorrt_states


@pytest.mark.parametrize("case", delta_table.delta_cases(), ids=lambda case: case.name)
def test_kernels_of_the_rule(case: DeltaCase) -> None:
    delta_table.check(case, delta_kernels)


@pytest.mark.parametrize("case", conv_table.conv_cases(), ids=lambda case: case.name)
def test_kernels_of_the_convolution(case: ConvCase) -> None:
    conv_table.check(case, conv_kernels)


@pytest.mark.parametrize("case", delta_table.delta_cases(), ids=lambda case: case.name)
def test_layers_of_the_rule(case: DeltaCase) -> None:
    delta_table.check(dataclasses.replace(case, dtype=torch.float32), delta_layers)


@pytest.mark.parametrize("case", conv_table.conv_cases(), ids=lambda case: case.name)
def test_layers_of_the_convolution(case: ConvCase) -> None:
    conv_table.check(case, conv_layers)


@pytest.mark.parametrize("case", delta_table.delta_cases(), ids=lambda case: case.name)
def test_plugin_layers_of_the_rule(case: DeltaCase) -> None:
    """The evaluator's reading of the kernels, held to what the kernels are."""
    delta_table.check(case, delta_plugins)


@pytest.mark.parametrize("case", conv_table.conv_cases(), ids=lambda case: case.name)
def test_plugin_layers_of_the_convolution(case: ConvCase) -> None:
    conv_table.check(case, conv_plugins)


def test_powers_of_the_coupling_lose_what_doubling_keeps() -> None:
    """Alike keys, nothing forgotten: entries of (I + A)^-1 are at most 1, and of A^32 10^17."""
    rows, beta = 64, 0.98
    coupling = beta * torch.ones(rows, rows).tril(-1)
    exact = (torch.eye(rows) + coupling).double().inverse()
    factors, power = torch.eye(rows) - coupling, coupling
    for _ in range(5):
        power = power @ power
        factors = factors + power @ factors
    assert float((factors - exact).abs().max()) > 1e3
    place, doubled = torch.arange(rows), torch.eye(rows)
    for level in range(6):
        of, inside = (place >> (level + 1)), (place >> level)
        between = (of[:, None] == of) & (inside[:, None] != inside)
        doubled = doubled - doubled @ (coupling * between) @ doubled
    assert float((doubled - exact).abs().max()) < 1e-5


TREE = DeltaCase((20, 5), "tree", (1, 1, 64, 64), dtype=torch.float32)
# Whose deepest row every other one matters to.
CHAIN = DeltaCase(
    (20, 5), "chain", (1, 1, 64, 64), "nothing forgotten", "alike", dtype=torch.float32
)
WINDOW = ConvCase((20, 5), "tree", 64, 4, torch.float32)


def on_kernels(name: str) -> Callable[[ModuleType, pytest.MonkeyPatch], None]:
    def run(faulty: ModuleType, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(delta, name, getattr(faulty, name))
        delta_table.check(TREE, delta_kernels)

    return run


def on_conv_kernels(name: str) -> Callable[[ModuleType, pytest.MonkeyPatch], None]:
    def run(faulty: ModuleType, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(conv, name, getattr(faulty, name))
        conv_table.check(WINDOW, conv_kernels)

    return run


def on_inputs(faulty: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branch_tables, "input_table", faulty.input_table)
    conv_table.check(WINDOW, conv_kernels)


def on_layers(case: DeltaCase) -> Callable[[ModuleType, pytest.MonkeyPatch], None]:
    def run(faulty: ModuleType, patch: pytest.MonkeyPatch) -> None:
        patch.setitem(OPS, "gated_delta_net", faulty.gated_delta_net)
        delta_table.check(case, delta_layers)

    return run


def on_commits(run: Any) -> Callable[[ModuleType, pytest.MonkeyPatch], None]:
    def on_states(faulty: ModuleType, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(tensorrt_states, "BranchStates", faulty.BranchStates)
        run()

    return on_states


@dataclass(frozen=True)
class Fault:
    name: str
    module: ModuleType
    old: str
    new: str
    run: Callable[[ModuleType, pytest.MonkeyPatch], None]
    message: str


FAULTS = [
    Fault(
        "sibling instead of parent",
        delta_kernel,
        "seen = sees(packed_mask, row, live, mask_words, start + lane)",
        "seen = lane[:, None] >= lane[None, :]",
        on_kernels("gated_delta_net_kernel"),
        "out",
    ),
    Fault(
        "decay of the wrong row",
        delta_kernel,
        "tl.load(decay + other * heads + head), seen",
        "tl.load(decay + row * heads + head, mask=live, other=0.0), seen",
        on_kernels("gated_delta_net_kernel"),
        "out",
    ),
    Fault(
        "decay along the rows instead of the path",
        decay_kernel,
        "seen = sees(packed_mask, row, live, mask_words, other).to(tl.float32)",
        "seen = tl.where(row[:, None] >= first + other[None, :], 1.0, 0.0)",
        on_kernels("gated_delta_decay_kernel"),
        "out",
    ),
    Fault(
        "commit of a rejected row",
        commit_kernel,
        "first + tl.load(path + start + lane, mask=live, other=0)",
        "first + start + lane",
        on_kernels("gated_delta_commit_kernel"),
        "state",
    ),
    Fault(
        "window through the row before",
        contract,
        "before[table[:, tap + 1]]",
        "table[:, tap + 1] - 1",
        on_inputs,
        "out",
    ),
    Fault(
        "window of a rejected row",
        conv_kernel,
        "tl.load(path + source - (KERNEL - 1), mask=of_step, other=0)",
        "source - (KERNEL - 1)",
        on_conv_kernels("causal_conv_commit_kernel"),
        "window",
    ),
    Fault(
        "layers: decay of the wrong row",
        branch,
        '"SUB", column, row)',
        '"SUB", row, column)',
        on_layers(TREE),
        "out",
    ),
    Fault(
        "layers: rows too deep for the doublings",
        branch,
        "range(doublings(low.max_rows))",
        "range(doublings(low.max_rows) - 2)",
        on_layers(CHAIN),
        "out",
    ),
    Fault(
        "runner: commit of a rejected row",
        tensorrt_states,
        "index = torch.as_tensor(path, device=committed.device)",
        "index = torch.arange(len(path))",
        on_commits(lambda: delta_table.check(TREE, delta_layers)),
        "state",
    ),
    Fault(
        "runner: window of a rejected row",
        tensorrt_states,
        "index = torch.as_tensor(path, device=committed.device)",
        "index = torch.arange(len(path))",
        on_commits(lambda: conv_table.check(WINDOW, conv_layers)),
        "window",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(fault.module, fault.old, fault.new, tmp_path)
    with pytest.raises(AssertionError, match=fault.message) as failure:
        fault.run(faulty, monkeypatch)
    print(f"{fault.name}: {failure.value}")


def test_the_same_cases_pass_without_a_fault() -> None:
    delta_table.check(TREE, delta_kernels)
    delta_table.check(TREE, delta_layers)
    conv_table.check(WINDOW, conv_kernels)
    conv_table.check(WINDOW, conv_layers)
