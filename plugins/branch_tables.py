"""What a step brings to the kernels of state that branches, made once for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trtree.plugins.branch_state import StateSegment
from trtree.plugins.causal_conv.contract import input_table

# The fields of a request; the last says that nothing is committed: its state is zero.
FIRST_ROW, NUM_ROWS, SLOT, FRESH = range(4)
REQUEST_FIELDS = 4


@dataclass(frozen=True)
class BranchTables:
    """int32. requests [n, REQUEST_FIELDS]. owners [rows]: the request of each row. conv_inputs
    [rows, kernel]: ``input_table`` of each request, one after another."""

    requests: torch.Tensor
    owners: torch.Tensor
    conv_inputs: torch.Tensor
    most_rows: int  # of a request

    @classmethod
    def of(cls, segments: Sequence[StateSegment], kernel: int) -> "BranchTables":
        fields = [[s.first_row, s.num_rows, s.slot, int(s.fresh)] for s in segments]
        owners = [index for index, s in enumerate(segments) for _ in range(s.num_rows)]
        inputs = [torch.from_numpy(input_table(s.parents, kernel)) for s in segments]
        return cls(
            torch.tensor(fields, dtype=torch.int32),
            torch.tensor(owners, dtype=torch.int32),
            torch.cat(inputs),
            max(s.num_rows for s in segments),
        )

    def elsewhere(self, chosen: Sequence[int], slots: Sequence[int]) -> "BranchTables":
        """The ``chosen`` requests alone, in other slots; rows are as they were."""
        requests = self.requests[list(chosen)]
        requests[:, SLOT] = torch.tensor(list(slots), dtype=torch.int32, device=requests.device)
        return replace(self, requests=requests)

    def to(self, device: torch.device) -> "BranchTables":
        requests, owners, inputs = (
            table.to(device) for table in (self.requests, self.owners, self.conv_inputs)
        )
        return BranchTables(requests, owners, inputs, self.most_rows)


def path_table(
    paths: Sequence[Sequence[int] | NDArray[np.int32]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted rows of each request -> int32 [n, most], and how many of them count [n]."""
    most = max(1, *map(len, paths))
    padded = [[*path, *[0] * (most - len(path))] for path in paths]
    counts = [len(path) for path in paths]
    accepted = torch.tensor(padded, dtype=torch.int32, device=device)
    return accepted, torch.tensor(counts, dtype=torch.int32, device=device)
