"""Loading TensorRT engines on a GPU: deserialization, contexts, CUDA graphs, NCCL.

The only module of the runner that calls CUDA. It has not run on a GPU yet; see
docs/tensorrt.md for what to run first on one.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines.tensorrt import TensorRTEngine

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def load_tensorrt_engine(
    engine: EngineDir, *, rank: int = 0, world_size: int = 1, communicator: Any = None
) -> TensorRTEngine:
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
    return TensorRTEngine(engine, executables, torch.device("cuda"), rank)


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
    """One engine file: a context per profile, and a CUDA graph per set of addresses.

    Inputs are written in place before a run, so a graph captured once reads the new ones.
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
        loaded = runtime.deserialize_cuda_engine((engine.path / file).read_bytes())
        if loaded is None:
            raise EngineDirError(f"{engine.path / file}: TensorRT cannot load it; rebuild it")
        self._engine = loaded
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._contexts = {
            profile["name"]: self._context(index, communicator)
            for index, profile in enumerate(entry["profiles"])
        }
        self._graphs: dict[Sequence[Any], Any] = {}

    def run(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        key = (profile, *((t.data_ptr(), *t.shape) for t in tensors.values()))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if key in self._graphs:
                self._graphs[key].replay()
            else:
                self._bind(profile, tensors)
                self._enqueue(profile)  # allocates and compiles what a capture must not
                self._stream.synchronize()
                self._graphs[key] = self._capture(profile)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _context(self, profile: int, communicator: Any) -> Any:
        context = self._engine.create_execution_context()
        context.set_optimization_profile_async(profile, self._stream.cuda_stream)
        if communicator is not None:
            context.set_communicator(communicator)
        self._stream.synchronize()
        return context

    def _bind(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        context = self._contexts[profile]
        outputs = {name for name in tensors if name.startswith("output.")}
        for name, tensor in tensors.items():
            if name not in outputs and not context.set_input_shape(name, tuple(tensor.shape)):
                raise RuntimeError(f"{name}: TensorRT refuses shape {tuple(tensor.shape)}")
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise RuntimeError(f"{name}: TensorRT refuses its address")

    def _enqueue(self, profile: str) -> None:
        if not self._contexts[profile].execute_async_v3(self._stream.cuda_stream):
            raise RuntimeError(f"TensorRT could not run profile {profile}; its log says why")

    def _capture(self, profile: str) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._enqueue(profile)
        return graph


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
