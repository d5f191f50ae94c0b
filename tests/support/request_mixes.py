"""Small requests in every mode."""

import random

from hypothesis import strategies as st

from trtree.runtime.executor import (
    CapacitySchedulerPolicy,
    DecodingMode,
    Request,
    SamplingConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TreeKind,
)

PLAIN = SpeculativeConfig(DecodingMode.PLAIN)
CHAIN = SpeculativeConfig(DecodingMode.CHAIN)
NO_EVICT = SchedulerConfig(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)


def tree(budget: int, kind: TreeKind = TreeKind.DYNAMIC) -> SpeculativeConfig:
    return SpeculativeConfig(DecodingMode.TREE, kind, budget)


# For the toy engine: prompts that share beginnings of several lengths.
prompts = st.builds(
    lambda shared, own: [i % 5 for i in range(shared)] + own,
    st.integers(0, 40),
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
)
specs = st.lists(
    st.tuples(prompts, st.integers(1, 24), st.sampled_from([PLAIN, CHAIN, tree(3), tree(16)])),
    min_size=1,
    max_size=12,
)


def mixed_requests(count: int, rng: random.Random, *, vocab: int) -> list[Request]:
    """Trees, chains and plain decoding, greedy and sampled; two in three begin alike."""
    shared = [rng.randrange(vocab) for _ in range(20)]
    modes = [tree(64), CHAIN, PLAIN, tree(16)]
    requests = []
    for index in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.randint(1, 18))]
        sampling = SamplingConfig(temperature=0.8, seed=index) if index % 5 == 4 else None
        request = Request(
            (shared if index % 3 else []) + own,
            max_tokens=rng.randint(16, 28),
            speculative=modes[index % 4],
            sampling=sampling or SamplingConfig(),
        )
        requests.append(request)
    return requests
