"""Loading TensorRT engines on a GPU: deserialization, contexts, CUDA graphs, NCCL.

The only module of the runner that calls CUDA. It has not run on a GPU yet; see
docs/tensorrt.md for what to run first on one.
"""

import importlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines.tensorrt import TensorRTEngine
from trtree.runtime.engines.tensorrt_commits import DeviceCommits
from trtree.runtime.engines.tensorrt_paged import PagedTensorRTEngine

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def load_tensorrt_engine(
    engine: EngineDir, *, rank: int = 0, world_size: int = 1, communicator: Any = None
) -> _core.Engine:
    """Load one rank's engines on the current GPU.

    Args:
        communicator: a capsule with this rank's ncclComm_t; needed with several ranks.

    Raises:
        EngineDirError: no library, no GPU, or an engine for another SM, library version
            or number of ranks.
    """
    backend = engine.manifest["backend"]
    trt = _import(engine)
    if not torch.cuda.is_available():
        raise EngineDirError(
            f"{engine.path}: backend {backend} needs a GPU of SM {_sms(engine)}, and none is "
            "visible; build with --backend cpu to run here"
        )
    major, minor = torch.cuda.get_device_capability()
    check_machine(engine, str(trt.__version__), major * 10 + minor, world_size)
    if world_size > 1 and communicator is None:
        raise EngineDirError(f"{engine.path}: {world_size} ranks need an NCCL communicator")
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    executables = {
        file: CudaExecutable(trt, runtime, engine, file, entry, communicator)
        for file, entry in engine.manifest["tensorrt"]["engines"].items()
        if entry["rank"] == rank
    }
    device = torch.device("cuda")
    if engine.manifest["tensorrt"]["attention"] == "native":
        return TensorRTEngine(engine, executables, device, rank)
    return PagedTensorRTEngine(
        engine,
        executables,
        device,
        DeviceCommits(),
        target_ctas=torch.cuda.get_device_properties(device).multi_processor_count,
        rank=rank,
    )


def check_machine(engine: EngineDir, library_version: str, sm: int, world_size: int) -> None:
    """Refuse an engine that this machine must not load.

    Raises:
        EngineDirError: names what differs, with both values.
    """
    built = engine.manifest["tensorrt"]
    if built["version"] != library_version:
        raise EngineDirError(
            f"{engine.path}: built with {built['library']} {built['version']}, this machine "
            f"has {library_version}; rebuild the engine or install that version"
        )
    if sm not in engine.manifest["sm"]:
        raise EngineDirError(
            f"{engine.path}: built for SM {_sms(engine)}, this GPU is SM {sm}; "
            f"rebuild with --sm {sm}"
        )
    ranks = engine.manifest["mapping"]["world_size"]
    if ranks != world_size:
        raise EngineDirError(
            f"{engine.path}: built for {ranks} ranks, started with {world_size}; "
            f"run mpirun -n {ranks}, or rebuild with --tp {world_size}"
        )


class CudaExecutable:
    """One engine file, and a CUDA graph with its own context per profile, shapes and addresses.

    Inputs are written in place before a run, so a graph captured once reads the new ones.
    A context whose shapes change would pull the ground from under graphs captured from it;
    all share one piece of device memory, as they never run at once.
    """

    def __init__(
        self,
        trt: Any,
        runtime: Any,
        engine: EngineDir,
        file: str,
        entry: Mapping[str, Any],
        communicator: Any,
    ) -> None:
        self._trt = trt
        self._engine = runtime.deserialize_cuda_engine((engine.path / file).read_bytes())
        if self._engine is None:
            raise EngineDirError(f"{engine.path / file}: TensorRT cannot load it; rebuild it")
        self._communicator = communicator
        self._profiles = {p["name"]: index for index, p in enumerate(entry["profiles"])}
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        size = self._engine.device_memory_size_v2
        self._workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._captured: dict[Hashable, tuple[Any, Any]] = {}  # context and graph

    def run(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        key = (profile, *((t.data_ptr(), *t.shape) for t in tensors.values()))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if key in self._captured:
                self._captured[key][1].replay()
            else:
                self._captured[key] = self._capture(profile, tensors)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """Run once, which allocates and compiles what a capture must not, then capture."""
        context = self._context(profile)
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if not name.startswith("output.") and not context.set_input_shape(name, shape):
                raise RuntimeError(f"{name}: TensorRT refuses shape {shape}")
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise RuntimeError(f"{name}: TensorRT refuses its address")
        self._enqueue(context, profile)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._enqueue(context, profile)
        return context, graph

    def _context(self, profile: str) -> Any:
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # TensorRT-RTX swaps its fall-back kernels later by default; a graph keeps them.
            strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        context = self._engine.create_execution_context(config)
        context.set_device_memory(self._workspace.data_ptr(), self._workspace.numel())
        context.set_optimization_profile_async(self._profiles[profile], self._stream.cuda_stream)
        if self._communicator is not None and not context.set_communicator(self._communicator):
            raise RuntimeError("TensorRT refuses the NCCL communicator")
        self._stream.synchronize()
        return context

    def _enqueue(self, context: Any, profile: str) -> None:
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise RuntimeError(f"TensorRT could not run profile {profile}; its log says why")


def _import(engine: EngineDir) -> Any:
    backend = engine.manifest["backend"]
    try:
        return importlib.import_module(_MODULES[backend])
    except ImportError as error:
        raise EngineDirError(
            f"{engine.path}: backend {backend} needs {_MODULES[backend]} ({error}); "
            f"pip install 'trtree[{backend}]'"
        ) from None


def _sms(engine: EngineDir) -> str:
    return ", ".join(map(str, engine.manifest["sm"]))
