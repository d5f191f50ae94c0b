"""Compiles a kernel ahead of time, for any SM and without a GPU, to PTX and cubin.

Results are cached by content: the key is a hash of the kernel's source (helpers included),
its types and constants, the tile, the SM, and the versions of Triton and ptxas.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from trtree.plugins.tree_attention.tiles import SHARED_LIMIT


class KernelCompileError(RuntimeError):
    """A kernel did not compile, or would not run on its SM."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel with everything that is fixed at compile time.

    types: Triton's names by argument, such as "*bf16" or "i32"; constants: the rest.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    head_dim: int | None = None  # for the report; None: no attention kernel


@dataclass(frozen=True)
class Resources:
    """What one CTA takes. registers: per thread; spills: bytes stored and loaded per thread."""

    registers: int
    shared_bytes: int
    spills: int
    num_warps: int


@dataclass(frozen=True)
class CompiledKernel:
    """ptx and cubin take exactly the arguments of ``KernelSpec.types``, in that order."""

    entry: str
    ptx: str
    cubin: bytes
    resources: Resources


def default_cache() -> Path:
    """$TRTREE_KERNEL_CACHE, else trtree/kernels in the user's cache folder."""
    if path := os.environ.get("TRTREE_KERNEL_CACHE"):
        return Path(path)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trtree" / "kernels"


def compile_kernel(spec: KernelSpec, sm: int, cache: Path | None = None) -> CompiledKernel:
    """Raises KernelCompileError, also where shared memory is beyond the SM's limit: neither
    Triton nor ptxas looks at that, the launch would fail."""
    if not isinstance(spec.kernel, JITFunction):
        raise KernelCompileError(
            "kernels are interpreted in this process; unset TRITON_INTERPRET to compile them"
        )
    if sm not in SHARED_LIMIT:
        raise KernelCompileError(f"SM {sm} is not supported; known: {tuple(SHARED_LIMIT)}")
    folder = (cache or default_cache()) / _key(spec, sm)
    if not folder.exists():
        _store(folder, _compile(spec, sm))
    compiled = _read(folder)
    if compiled.resources.shared_bytes > SHARED_LIMIT[sm]:
        raise KernelCompileError(
            f"{spec.name} on SM {sm} takes {compiled.resources.shared_bytes} bytes of shared "
            f"memory, the SM has {SHARED_LIMIT[sm]}; use smaller tiles or fewer stages than "
            f"{dict(spec.constants)}, {spec.num_stages} stages"
        )
    return compiled


def _key(spec: KernelSpec, sm: int) -> str:
    content = (
        triton.__version__,
        get_ptxas(sm).version,
        spec.kernel.cache_key,
        sorted(spec.types.items()),
        sorted((name, str(value)) for name, value in spec.constants.items()),
        spec.num_warps,
        spec.num_stages,
        sm,
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _compile(spec: KernelSpec, sm: int) -> CompiledKernel:
    names = spec.kernel.arg_names
    unknown = set(names) ^ (set(spec.types) | set(spec.constants))
    if unknown:
        raise KernelCompileError(f"{spec.name}: arguments given twice or not at all: {unknown}")
    # Every buffer of TensorRT's and torch's is aligned; Triton vectorizes only if told.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if spec.types.get(name, "").startswith("*")
    }
    source = ASTSource(
        spec.kernel,
        {name: spec.types.get(name, "constexpr") for name in names},
        dict(spec.constants),
        aligned,
    )
    options = {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": True,
    }
    # Line tables would put this machine's paths into the engine.
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        try:
            result = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        except Exception as error:  # Triton raises whatever its passes raise
            raise KernelCompileError(f"{spec.name} on SM {sm}: {error}") from error
    metadata = result.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise KernelCompileError(f"{spec.name} on SM {sm} wants scratch memory at launch")
    ptx = _without_scratch_arguments(result.asm["ptx"], spec)
    cubin, registers, spills = _assemble(ptx, sm)
    resources = Resources(registers, metadata.shared, spills, metadata.num_warps)
    return CompiledKernel(metadata.name, ptx, cubin, resources)


def _without_scratch_arguments(ptx: str, spec: KernelSpec) -> str:
    """Drop the two pointers that Triton's own launcher passes behind the kernel's arguments.

    Another launcher, such as TensorRT's, knows nothing of them and would let the driver
    read two arguments past the end of its list.
    """
    entry = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    arguments = entry.group(1).split(",")
    extra = arguments[len(spec.types) :]
    names = [argument.split()[-1] for argument in extra]
    rest = ptx[entry.end() :]
    used = [name for name in names if re.search(rf"\b{name}\b", rest)]
    if len(extra) != 2 or used:
        raise KernelCompileError(
            f"{spec.name}: Triton {triton.__version__} passes {len(extra)} arguments of its own "
            f"(known: 2), of which the kernel reads {used} (known: none)"
        )
    kept = ",".join(arguments[: len(spec.types)])
    return ptx[: entry.start(1)] + kept + "\n" + ptx[entry.end(1) :]


def _assemble(ptx: str, sm: int) -> tuple[bytes, int, int]:
    """ptxas -> (cubin, registers per thread, spilled bytes per thread)."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [
            get_ptxas(sm).path,
            "-v",
            "--regAllocOptLevel=2",  # as Triton calls it
            f"--gpu-name={sm_arch_from_capability(sm)}",
            str(source),
            "-o",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelCompileError(f"ptxas: {done.stderr}")
        registers = _figure(r"Used (\d+) registers", done.stderr)
        spills = _figure(r"(\d+) bytes spill stores", done.stderr) + _figure(
            r"(\d+) bytes spill loads", done.stderr
        )
        return target.read_bytes(), registers, spills


def _figure(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise KernelCompileError(f"ptxas reports no {pattern!r}: {log}")
    return int(found.group(1))


def _store(folder: Path, compiled: CompiledKernel) -> None:
    """Written beside and renamed: another process sees all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch, "kernel")
        part.mkdir()
        Path(part, "kernel.ptx").write_text(compiled.ptx)
        Path(part, "kernel.cubin").write_bytes(compiled.cubin)
        facts = {"entry": compiled.entry, "resources": asdict(compiled.resources)}
        Path(part, "kernel.json").write_text(json.dumps(facts))
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else: another process was faster, with the same content
                raise


def _read(folder: Path) -> CompiledKernel:
    facts = json.loads(Path(folder, "kernel.json").read_text())
    return CompiledKernel(
        facts["entry"],
        Path(folder, "kernel.ptx").read_text(),
        Path(folder, "kernel.cubin").read_bytes(),
        Resources(**facts["resources"]),
    )
