"""Convert a large random checkpoint into a CPU engine: rate, against the disk, and memory.

Layers of a model's shapes are repeated until the checkpoint has the size asked for. The
rate is that of the engine's bytes, from the first read to the last byte on the disk; beside
it stands a plain sequential write of as many bytes to the same disk. Everything written is
removed at the end.
"""

import argparse
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtree.build import builder
from trtree.build.bench.memory import PeakMemory
from trtree.build.bench.synthetic import checkpoint_bytes, write_random
from trtree.build.checkpoint import Checkpoint
from trtree.build.options import BuildOptions, OptionError
from trtree.runtime.cli import byte_progress

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PIECE = 1 << 24
_SPARE = 1 << 30  # of the disk, left to others


def size(text: str) -> int:
    """An argparse type: ``30GB``, ``500M`` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 30GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=size, default=size("4GB"), help="of the checkpoint (default: 4GB)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("configs/models/qwen3_8b_nvfp4"),
        metavar="DIR",
        help="folder with config.json and, if quantized, hf_quant_config.json "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="a bf16 checkpoint, quantized on the way"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="where to write (default: /tmp)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    layers, total = _layers(args.model, args.size, args.plain)
    work_in = args.work or Path(tempfile.gettempdir())
    # The checkpoint, the engine, and the file that measures the disk.
    needed = total * 3 + _SPARE
    free = shutil.disk_usage(work_in).free
    if free < needed:
        raise OptionError(
            f"--size {args.size}: needs {needed / 1e9:.1f} GB of {work_in}, {free / 1e9:.1f} GB "
            "are free; give a smaller size, or --work on another disk"
        )
    with tempfile.TemporaryDirectory(dir=work_in) as directory:
        work = Path(directory)
        options = BuildOptions(
            checkpoint=work / "checkpoint",
            output=work / "engine",
            quantize="nvfp4" if args.plain else None,
        )
        with byte_progress("checkpoint", total) as advance:
            write_random(
                work / "checkpoint", args.model, layers=layers, plain=args.plain, progress=advance
            )
        return _measure(options, work, layers)


def _measure(options: BuildOptions, work: Path, layers: int) -> dict[str, Any]:
    checkpoint = Checkpoint.open(options.checkpoint)
    stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    largest = max(checkpoint.info(name).nbytes for name in checkpoint.names())
    description = builder.describe(options)
    engine_bytes = sum(description.weight_bytes(owner) for owner in description.owners())
    _forget(options.checkpoint)
    with byte_progress("engine", engine_bytes) as advance, PeakMemory() as memory:
        started, used = time.perf_counter(), time.process_time()
        builder.write(description, progress=advance)
        for file in options.output.glob("*.bin"):
            _to_disk(file)
        seconds, used = time.perf_counter() - started, time.process_time() - used
    disk_seconds = _sequential_write(work / "disk", engine_bytes)
    return {
        "layers": layers,
        "checkpoint_bytes": stored,
        "engine_bytes": engine_bytes,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "engine_mb_per_s": round(engine_bytes / seconds / 1e6, 1),
        "checkpoint_mb_per_s": round(stored / seconds / 1e6, 1),
        "disk_mb_per_s": round(engine_bytes / disk_seconds / 1e6, 1),
        "of_disk": round(disk_seconds / seconds, 3),
        "largest_tensor_bytes": largest,
        "peak_anonymous_bytes": memory.grown,
    }


def _layers(model: Path, size: int, plain: bool) -> tuple[int, int]:
    """How many layers make a checkpoint of about ``size`` bytes, and its bytes then."""
    one, two = (checkpoint_bytes(model, layers=n, plain=plain) for n in (1, 2))
    layers = max(1, math.ceil((size - one) / (two - one)) + 1)
    return layers, one + (layers - 1) * (two - one)


def _sequential_write(file: Path, count: int) -> float:
    """Seconds to write ``count`` bytes and have them on the disk; the file goes again."""
    piece = os.urandom(_PIECE)  # a disk that compresses must not win
    started = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(count // _PIECE):
            stream.write(piece)
        stream.write(piece[: count % _PIECE])
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return seconds


def _to_disk(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _forget(directory: Path) -> None:
    """Have the checkpoint read from the disk, not from memory, as far as the system allows."""
    _each(directory, os.fsync)
    _each(directory, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def _each(directory: Path, act: Callable[[int], None]) -> None:
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            act(stream.fileno())
