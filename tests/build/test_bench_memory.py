"""Peak memory is that of the block, not of the whole life of the process."""

import gc

import numpy as np

from trtree.build.bench.memory import PeakMemory


def test_what_was_held_inside_counts() -> None:
    gc.collect()  # what other tests left must not be freed while measuring
    before = np.ones(200 << 20, dtype=np.uint8)
    with PeakMemory() as memory:
        inside = np.ones(150 << 20, dtype=np.uint8)
        for _ in range(5):  # long enough to be sampled
            inside += 1
        del inside
    assert 100 << 20 < memory.grown < 200 << 20
    assert len(before)
