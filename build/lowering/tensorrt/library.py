"""Which TensorRT library builds an engine, and what it and its GPUs can do.

``tensorrt`` (11.x) and ``tensorrt_rtx`` have one Python API; only the import name, the
SMs they target and whether a build needs a GPU differ.
"""

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtree.build.options import OptionError

# SMs with FP4 tensor cores; the others hold NVFP4 weights as INT8.
FP4_SMS = frozenset({100, 103, 120, 121})

# Earlier ones have no bf16.
FIRST_BF16_SM = 80

_RTX_HINT = (
    "pass --backend tensorrt-rtx, which builds with no GPU (pip install 'trtree[tensorrt-rtx]')"
)


@dataclass(frozen=True)
class Library:
    """module: the imported package. sms: what it can build for; None: whatever GPU is there."""

    backend: str
    module: Any
    sms: frozenset[int] | None

    @property
    def version(self) -> str:
        return str(self.module.__version__)


def load_library(backend: str) -> Library:
    """Import the library of ``--backend tensorrt`` or ``tensorrt-rtx``.

    Raises:
        OptionError: it is not installed, or needs a GPU that is not there.
    """
    name = backend.replace("-", "_")
    try:
        module = importlib.import_module(name)
        if not hasattr(module, "Builder"):
            raise ImportError("the package there holds no library")
    except (ImportError, OSError) as error:
        hint = "pip install 'trtree[tensorrt-rtx]'" if backend == "tensorrt-rtx" else _RTX_HINT
        raise OptionError(f"backend {backend}: cannot import {name} ({error}); {hint}") from None
    if backend == "tensorrt" and not has_gpu():
        raise OptionError(f"backend tensorrt: no GPU found, and it needs one to build; {_RTX_HINT}")
    sms = _buildable_sms(module) if backend == "tensorrt-rtx" else None
    return Library(backend, module, sms)


def gpu_backend() -> str | None:
    """``tensorrt`` where it imports and sees a GPU: the default backend there."""
    if not has_gpu():
        return None
    try:
        load_library("tensorrt")
    except OptionError:
        return None
    return "tensorrt"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible to this process, without initialising CUDA."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def check_sms(library: Library, sms: Sequence[int], present: int | None = None) -> None:
    """Refuse SMs that the library cannot build for.

    Args:
        present: the SM of the GPU that is there; ``tensorrt`` builds for no other.

    Raises:
        OptionError: names the SM and those that are possible.
    """
    if not sms:
        raise OptionError("sm is empty; name at least one, such as --sm 120")
    if min(sms) < FIRST_BF16_SM:
        raise OptionError(f"sm {min(sms)}: has no bf16, which the networks compute in")
    possible = library.sms if library.sms is not None else frozenset([present])
    for sm in sms:
        if sm not in possible:
            known = ", ".join(map(str, sorted(filter(None, possible)))) or "the GPU that is there"
            raise OptionError(
                f"sm {sm}: {library.backend} {library.version} cannot build for it; "
                f"it builds for {known}"
            )


def present_sm() -> int | None:
    """The SM of the first GPU, if torch sees one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


@functools.cache
def load_plugins(library: Library) -> Any:
    """The library's plugin module, with this project's attention plugins registered.

    Raises:
        OptionError: there is none, or no Triton to compile their kernels with.
    """
    try:
        plugins = importlib.import_module(f"{library.module.__name__}.plugin")
        from trtree.plugins.registry import register_plugins
    except ImportError as error:
        raise OptionError(
            f"attention plugin: {error}; pip install 'trtree[gpu,{library.backend}]', or pass "
            "--attention native"
        ) from None
    register_plugins(library.module, plugins)
    return plugins


def weights_in_fp4(sms: Sequence[int]) -> bool:
    """Whether one engine for all these SMs can hold FP4: those without it take INT8."""
    return all(sm in FP4_SMS for sm in sms)


def _buildable_sms(module: Any) -> frozenset[int]:
    names = module.ComputeCapability.__members__
    return frozenset(int(name[2:]) for name in names if name.startswith("SM"))
