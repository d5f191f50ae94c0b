"""The CPU engine: loads a plan and its packed weights into the C++ engine."""

import os
from typing import Any, TypeVar

from trtree import _core
from trtree._core import cpu
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines.manifest import capabilities_of

Struct = TypeVar("Struct")


def load_cpu_engine(
    engine: EngineDir, *, num_threads: int | None = None, isa: str = ""
) -> _core.Engine:
    """The engine of a directory with ``backend: cpu``.

    Args:
        num_threads: default: the processors this process may use.
        isa: "portable", "avx2" or "avx512"; default: the best there is.

    Raises:
        ValueError: an instruction set that this CPU does not have.
    """
    speculative = engine.manifest["speculative_config"]
    return cpu.CpuEngine(
        _plan(engine),
        capabilities_of(engine),
        speculative["mask_token_id"] if speculative else 0,
        num_threads or len(os.sched_getaffinity(0)),
        isa,
    )


def _plan(engine: EngineDir) -> cpu.Plan:
    data = engine.plan()
    plan = cpu.Plan()
    plan.directory = str(engine.path)
    plan.networks = {name: _network(network) for name, network in data["networks"].items()}
    plan.weights = [_fill(cpu.PlanWeight(), w, kind=cpu.WeightKind) for w in data["weights"]]
    plan.states = [_fill(cpu.PlanState(), state) for state in data["states"]]
    plan.ropes = [_fill(cpu.PlanRope(), rope) for rope in data["ropes"]]
    return plan


def _network(data: dict[str, Any]) -> cpu.PlanNetwork:
    network = cpu.PlanNetwork()
    network.buffers = [_fill(cpu.PlanBuffer(), buffer) for buffer in data["buffers"]]
    network.tensors = [_fill(cpu.PlanTensor(), tensor) for tensor in data["tensors"]]
    network.ops = [_fill(cpu.PlanOp(), op, kind=cpu.OpKind) for op in data["ops"]]
    for role in ("captured_input", "captured_output", "logits"):
        setattr(network, role, data[role])
    return network


def _fill(struct: Struct, values: dict[str, Any], *, kind: Any = None) -> Struct:
    for name, value in values.items():
        if name == "kind":
            value = kind[value]
        if hasattr(struct, name):
            setattr(struct, name, value)
    return struct
