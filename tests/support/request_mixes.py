"""Small requests for the toy engine, in every mode."""

from hypothesis import strategies as st

from trtree.runtime.executor import (
    CapacitySchedulerPolicy,
    DecodingMode,
    SchedulerConfig,
    SpeculativeConfig,
    TreeKind,
)

PLAIN = SpeculativeConfig(DecodingMode.PLAIN)
CHAIN = SpeculativeConfig(DecodingMode.CHAIN)
NO_EVICT = SchedulerConfig(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)


def tree(budget: int) -> SpeculativeConfig:
    return SpeculativeConfig(DecodingMode.TREE, TreeKind.DYNAMIC, budget)


# Prompts that share beginnings of several lengths.
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
