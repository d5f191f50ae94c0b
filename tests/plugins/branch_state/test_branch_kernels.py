"""The kernels of state that branches, interpreted, against the reference on the shared tables."""

from collections.abc import Sequence

import pytest
import torch

from trtree.plugins.branch_cases import masks
from trtree.plugins.branch_device import BranchTables, path_table
from trtree.plugins.causal_conv import cases as conv_table
from trtree.plugins.causal_conv import launch as conv
from trtree.plugins.causal_conv.cases import ConvCase, ConvCaseInputs
from trtree.plugins.gated_delta_net import cases as delta_table
from trtree.plugins.gated_delta_net import launch as delta
from trtree.plugins.gated_delta_net.cases import DeltaCase, DeltaCaseInputs

CPU = torch.device("cpu")
KERNEL = 4  # of tables whose convolution nobody looks at


def run_delta(inputs: DeltaCaseInputs) -> tuple[torch.Tensor, delta_table.Committer]:
    tables = BranchTables.of(inputs.segments, KERNEL)
    state = inputs.committed.clone()
    # A model's q, k and v are parts of one row.
    parts = [x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)]
    together = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
    q, k, v = (
        part.unflatten(1, x.shape[1:])
        for part, x in zip(together, (inputs.q, inputs.k, inputs.v), strict=True)
    )
    out, rows = delta.gated_delta_net(
        q, k, v, inputs.a, inputs.b, inputs.gates, state, tables, masks(inputs.segments)
    )
    assert torch.equal(state, inputs.committed)  # read only until commit

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        delta.commit(moved, rows, tables, *path_table(paths, CPU))
        return moved

    return out, commit


def run_conv(inputs: ConvCaseInputs) -> tuple[torch.Tensor, conv_table.Committer]:
    tables = BranchTables.of(inputs.segments, inputs.weight.shape[1])
    window = inputs.committed.clone()
    out = conv.causal_conv(inputs.x, inputs.weight, window, tables, rows_per_program=64)
    assert torch.equal(window, inputs.committed)

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        conv.commit(moved, inputs.x, tables, *path_table(paths, CPU))
        return moved

    return out, commit


@pytest.mark.parametrize("case", delta_table.delta_cases(), ids=lambda case: case.name)
def test_the_rule_on_the_shared_table(case: DeltaCase) -> None:
    delta_table.check(case, run_delta)


@pytest.mark.parametrize("case", conv_table.conv_cases(), ids=lambda case: case.name)
def test_the_convolution_on_the_shared_table(case: ConvCase) -> None:
    conv_table.check(case, run_conv)
