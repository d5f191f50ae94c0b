"""The executor's Python surface. The executor itself is C++ (``runtime/cpp/executor.hpp``)."""

from typing import Protocol

from trtree._core import (
    BudgetPolicy,
    CapacitySchedulerPolicy,
    DecodingMode,
    Executor,
    ExecutorConfig,
    ExecutorStatistics,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    QueueFullError,
    Request,
    RequestStatistics,
    Response,
    RoundRecord,
    SamplingConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TokenLogProbs,
    TreeKind,
)
from trtree.build.engine_dir import EngineDir
from trtree.runtime.step_costs import load_costs

__all__ = [
    "BudgetPolicy",
    "CapacitySchedulerPolicy",
    "DecodingMode",
    "Executor",
    "ExecutorConfig",
    "ExecutorLike",
    "ExecutorStatistics",
    "FinishReason",
    "KvCacheConfig",
    "OutputConfig",
    "QueueFullError",
    "Request",
    "RequestStatistics",
    "Response",
    "RoundRecord",
    "SamplingConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "TokenLogProbs",
    "TreeKind",
    "executor_config",
]


class ExecutorLike(Protocol):
    """An executor: in this process, or another replica's."""

    def enqueue_request(self, request: Request) -> int: ...
    def await_responses(self, timeout_seconds: float = 0.0) -> list[Response]: ...
    def cancel_request(self, request_id: int) -> None: ...
    def shutdown(self) -> None: ...
    def take_rounds(self) -> list[RoundRecord]: ...
    def latest_statistics(self) -> ExecutorStatistics: ...


def executor_config(engine: EngineDir, num_threads: int | None = None) -> ExecutorConfig:
    """The executor's configuration for an engine: its static tree, if it has one, and what
    its passes cost on this machine with that many threads, if that was measured.

    Raises:
        EngineDirError: the calibration is damaged.
    """
    tables = engine.tree_tables()
    costs = load_costs(engine, num_threads)
    return ExecutorConfig(
        medusa_choices=tables["medusa_choices"] if tables else [],
        cost_model=costs.model() if costs else None,
    )
