"""What every implementation of the convolution is given besides its operands."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def input_table(parents: Sequence[int] | NDArray[np.int32], kernel: int) -> NDArray[np.int32]:
    """Where the inputs of each of one request's rows lie, oldest first; the last is the row's own.

    Args:
        parents: [rows], -1 for a row that continues the committed window.

    Returns:
        int32 [rows, kernel]: entries below kernel - 1 are of the committed window, entry
        kernel - 1 + j is row j. Made once per step, for all layers.
    """
    rows, window = np.asarray(parents, dtype=np.int32), kernel - 1
    before = np.concatenate([np.arange(-1, window - 1, dtype=np.int32), window + rows])
    # A row without a parent comes after the newest of the window: window + (-1).
    table = np.empty((len(rows), kernel), dtype=np.int32)
    table[:, -1] = window + np.arange(len(rows))
    for tap in reversed(range(window)):
        table[:, tap] = before[table[:, tap + 1]]
    return table
