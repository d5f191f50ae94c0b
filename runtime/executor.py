"""The executor's Python surface. The executor itself is C++ (``runtime/cpp/executor.hpp``)."""

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

__all__ = [
    "BudgetPolicy",
    "CapacitySchedulerPolicy",
    "DecodingMode",
    "Executor",
    "ExecutorConfig",
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


def executor_config(engine: EngineDir) -> ExecutorConfig:
    """The executor's configuration for an engine: its static tree, if it has one."""
    tables = engine.tree_tables()
    return ExecutorConfig(medusa_choices=tables["medusa_choices"] if tables else [])
