"""The CPU engine: loads a plan and its packed weights into the C++ engine."""

import os
from typing import Any, TypeVar

from trtree import _core
from trtree._core import cpu
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines.manifest import capabilities_of, check_kv_cache, check_ranks

Struct = TypeVar("Struct")


def load_cpu_engine(
    engine: EngineDir,
    *,
    num_threads: int | None = None,
    isa: str = "",
    collectives: cpu.Collectives | None = None,
) -> _core.Engine:
    """The engine of a directory with ``backend: cpu``, or a rank's part of it.

    Args:
        num_threads: default: the processors this process may use.
        isa: "portable", "avx2" or "avx512"; default: the best there is.
        collectives: of the ranks, where the engine has several.

    Raises:
        ValueError: an instruction set that this CPU does not have.
        EngineDirError: an engine of another number of ranks.
    """
    rank, size = (collectives.rank, collectives.size) if collectives else (0, 1)
    check_ranks(engine, size)
    speculative = engine.manifest["speculative_config"]
    return cpu.CpuEngine(
        _plan(engine, rank),
        capabilities_of(engine),
        speculative["mask_token_id"] if speculative else 0,
        num_threads or len(os.sched_getaffinity(0)),
        isa,
        collectives,
    )


def _plan(engine: EngineDir, rank: int) -> cpu.Plan:
    data = engine.plan(rank)
    _check_keys(
        data, "plan", {"rank", "ranks", "networks", "weights", "states", "ropes", "routings"}
    )

    def is_kv(state: cpu.PlanState) -> bool:
        return state.kind == cpu.StateKind.kv and not state.drafter

    plan = cpu.Plan()
    plan.directory = str(engine.path)
    plan.rank, plan.ranks = data["rank"], data["ranks"]
    plan.networks = {name: _network(network) for name, network in data["networks"].items()}
    plan.weights = [_fill(cpu.PlanWeight(), w, kind=cpu.WeightKind) for w in data["weights"]]
    plan.states = [_fill(cpu.PlanState(), s, kind=cpu.StateKind) for s in data["states"]]
    check_kv_cache(engine, (s.dtype for s in plan.states if is_kv(s)))
    plan.ropes = [_fill(cpu.PlanRope(), rope) for rope in data["ropes"]]
    plan.routings = [_fill(cpu.PlanRouting(), routing) for routing in data["routings"]]
    return plan


def _network(data: dict[str, Any]) -> cpu.PlanNetwork:
    roles = ("captured_input", "captured_output", "logits")
    _check_keys(data, "network", {"buffers", "tensors", "ops", *roles})
    network = cpu.PlanNetwork()
    network.buffers = [_fill(cpu.PlanBuffer(), buffer) for buffer in data["buffers"]]
    network.tensors = [_fill(cpu.PlanTensor(), tensor) for tensor in data["tensors"]]
    network.ops = [_fill(cpu.PlanOp(), op, kind=cpu.OpKind) for op in data["ops"]]
    for role in roles:
        setattr(network, role, data[role])
    return network


def _fill(struct: Struct, values: dict[str, Any], *, kind: Any = None) -> Struct:
    """Set every field of a plan struct.

    Raises:
        EngineDirError: a field is missing, unknown, or of another type.
    """
    _check_keys(
        values, type(struct).__name__, {name for name in dir(struct) if not name.startswith("_")}
    )
    for name, value in values.items():
        try:
            setattr(struct, name, kind[value] if name == "kind" else value)
        except (KeyError, TypeError) as error:
            raise EngineDirError(f"plan.json: {name} is {value!r} ({error})") from None
    return struct


def _check_keys(values: Any, what: str, expected: set[str]) -> None:
    """Another version of trtree may have written others."""
    found = set(values) if isinstance(values, dict) else {str(values)}
    if found != expected:
        raise EngineDirError(
            f"plan.json: {what} has {sorted(found - expected)} too many and lacks "
            f"{sorted(expected - found)}; rebuild the engine"
        )
