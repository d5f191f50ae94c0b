"""What ranks send each other arrives as it was."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trtree import _core
from trtree._core import distributed
from trtree.build.engine_dir import EngineDir
from trtree.runtime.distributed.layout import JobError, Layout
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import Executor, ExecutorConfig, Request, SpeculativeConfig


@pytest.fixture(scope="module")
def engine(demo_engine: Callable[..., Path]) -> _core.Engine:
    """Not a session's: two executors over one engine would write to each other's pages."""
    return load_cpu_engine(EngineDir.open(demo_engine()), num_threads=1)


def fields(thing: object) -> dict[str, object]:
    return {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_")}


def test_statistics_and_round_records_can_be_sent(
    engine: _core.Engine,
) -> None:
    executor = Executor(engine, ExecutorConfig(record_rounds=True))
    executor.enqueue_request(Request([5, 17, 300, 9], 8, speculative=SpeculativeConfig()))
    while executor.await_responses():
        pass
    statistics = executor.latest_statistics()
    assert fields(statistics)["target_forwards"] != 0
    assert fields(pickle.loads(pickle.dumps(statistics))) == fields(statistics)
    rounds = executor.take_rounds()
    assert any(record.token_ids and record.step_seconds for record in rounds)
    for record in rounds:
        assert fields(pickle.loads(pickle.dumps(record))) == fields(record)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ([], "1 words wanted, 0 left"),
        ([9], "call 9 is not known"),
        ([1, 1, 5, 0, 0, 0, -1], "-1 words wanted"),
        ([1, 0, 7], "1 words too many"),
        ([3, 8, 2**30], "words wanted"),
    ],
)
def test_a_message_cut_short_is_refused(
    engine: _core.Engine, message: list[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        distributed.make_call(engine, np.array(message, np.int32))


def test_layouts() -> None:
    layout = Layout.of("e", 2, 6, None, None)
    assert layout == Layout(tp=2, dp=3)
    assert [layout.replica(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.leader(replica) for replica in range(3)] == [0, 2, 4]
    with pytest.raises(JobError, match="5 ranks; tp 2 x dp 2 are 4"):
        Layout.of("e", 2, 5, None, None)
