"""Peak memory is that of the block, not of the whole life of the process."""

import numpy as np

from trtree.build.bench.memory import PeakMemory


def test_what_was_held_inside_counts() -> None:
    before = np.ones(30 << 20, dtype=np.uint8)
    with PeakMemory() as memory:
        inside = np.ones(50 << 20, dtype=np.uint8)
        for _ in range(20):  # long enough to be sampled
            inside += 1
        del inside
    assert 45 << 20 < memory.grown < 70 << 20
    assert len(before)
