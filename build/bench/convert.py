"""Convert a large random checkpoint into a CPU engine: rate, against the disk, and memory.

Layers of a model's shapes are repeated until the checkpoint has the size asked for. The
rate is that of the engine's bytes, from the first read to the last byte on the disk. Beside
it stand a plain copy of the engine's bytes, read from the disk and written to it as dd does
(16 MiB at a time, and fsync), and a plain sequential write of as many. With --kill-at the
conversion is killed half-way, say, and resumed: both parts are timed, and what was written
twice is counted. Everything written is removed at the end.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from trtree.build import builder
from trtree.build.bench.memory import PeakMemory
from trtree.build.bench.synthetic import checkpoint_bytes, write_random
from trtree.build.checkpoint import Checkpoint
from trtree.build.options import BuildOptions, OptionError
from trtree.runtime.cli import byte_progress

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PIECE = 1 << 24
_SPARE = 2 << 30  # of the disk, left to others


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
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that the engine is divided among (default: 1)"
    )
    parser.add_argument(
        "--kill-at",
        type=_fraction,
        metavar="F",
        help="kill the conversion once this much of it is done (0.5: half), and resume it",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="where to write (default: /tmp)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    layers, total = _layers(args.model, args.size, args.plain)
    work_in = args.work or Path(tempfile.gettempdir())
    # The checkpoint, the engine, and in the former's place files that measure the disk.
    needed = total * 2 + _SPARE
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
            tp=args.tp,
        )
        with byte_progress("checkpoint", total) as advance:
            write_random(
                work / "checkpoint", args.model, layers=layers, plain=args.plain, progress=advance
            )
        return _measure(options, work, layers, args.kill_at)


def _measure(
    options: BuildOptions, work: Path, layers: int, kill_at: float | None
) -> dict[str, Any]:
    checkpoint = Checkpoint.open(options.checkpoint)
    stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    largest = max(checkpoint.info(name).nbytes for name in checkpoint.names())
    description = builder.describe(options)
    rank_bytes = sum(description.weight_bytes(owner) for owner in description.owners())
    expected = rank_bytes * options.tp  # but for padding
    del description, checkpoint
    for file in options.checkpoint.glob("*.safetensors"):
        _forget(file)
    killed: dict[str, Any] = {}
    kept = 0
    if kill_at:
        first = _convert(options, expected, kill_at)
        kept, discarded = _left_by_a_kill(options)
        killed = {
            "killed_after_seconds": round(first.seconds, 1),
            "kept_bytes": kept,
            "discarded_bytes": discarded,
            "peak_anonymous_bytes_before_the_kill": first.peak,
        }
    done = _convert(options, expected)
    shutil.rmtree(options.checkpoint)
    engine_bytes, copy_seconds = _copy(sorted(options.output.glob("*.bin")), work / "copy")
    disk_seconds = _sequential_write(work / "disk", engine_bytes)
    rate, disk_rate = (engine_bytes - kept) / done.seconds, engine_bytes / disk_seconds
    copy_rate = engine_bytes / copy_seconds
    return {
        "layers": layers,
        "checkpoint_bytes": stored,
        "engine_bytes": engine_bytes,
        "seconds": round(done.seconds, 1),
        "cpu_seconds": round(done.cpu_seconds, 1),
        "engine_mb_per_s": round(rate / 1e6, 1),
        "disk_mb_per_s": round(disk_rate / 1e6, 1),
        "of_disk": round(rate / disk_rate, 3),
        "copy_mb_per_s": round(copy_rate / 1e6, 1),
        "of_copy": round(rate / copy_rate, 3),
        "largest_tensor_bytes": largest,
        "peak_anonymous_bytes": done.peak,
        "written_bytes": engine_bytes - kept,
    } | killed


class _Conversion(NamedTuple):
    """From the first weight to the last byte on the disk, or to its end by a signal; peak: of
    anonymous memory, above what a process has before it reads a weight."""

    seconds: float
    cpu_seconds: float
    peak: int


def _convert(options: BuildOptions, engine_bytes: int, kill_at: float = 1.0) -> _Conversion:
    """Convert in a process of its own, so that its memory is its own; below 1, ``kill_at`` is
    the part of the engine after which that is killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_converting, args=(options, theirs))
    child.start()
    theirs.close()
    assert child.pid is not None
    done, cpu_seconds = 0, 0.0
    what = "engine" if kill_at == 1 else "engine, to be killed"
    try:
        ours.recv()  # it has read the headers
        with (
            byte_progress(what, int(kill_at * engine_bytes)) as advance,
            PeakMemory(child.pid) as memory,
        ):
            ours.send(None)
            started = time.perf_counter()
            while kill_at == 1 or done < kill_at * engine_bytes:
                told = ours.recv()
                if isinstance(told, float):
                    cpu_seconds = told
                    break
                done += told
                advance(told)
            seconds = time.perf_counter() - started
    except EOFError:
        raise RuntimeError("the conversion ended early; its error stands above") from None
    finally:
        if kill_at < 1:
            child.kill()
        else:
            ours.close()
        child.join()
    return _Conversion(seconds, cpu_seconds, memory.grown)


def _converting(options: BuildOptions, parent: Connection) -> None:
    """In the child: tells the bytes of each weight, and at the end its CPU seconds."""
    description = builder.describe(options)
    parent.send(0)
    parent.recv()
    used = time.process_time()
    builder.write(description, progress=parent.send)
    for file in options.output.glob("*.bin"):
        _to_disk(file)
    parent.send(time.process_time() - used)


def _left_by_a_kill(options: BuildOptions) -> tuple[int, int]:
    """Bytes of finished weights, from which the next conversion goes on, and of others, which
    it writes again."""
    kept = written = 0
    for journal in options.output.parent.glob(f".{options.output.name}.*.partial/*.journal"):
        records = journal.read_text().splitlines()
        kept += json.loads(records[-1])["end"] if records else 0
        written += journal.with_suffix("").stat().st_size
    return kept, written - kept


def _fraction(text: str) -> float:
    """An argparse type: a number between 0 and 1."""
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _layers(model: Path, size: int, plain: bool) -> tuple[int, int]:
    """How many layers make a checkpoint of about ``size`` bytes, and its bytes then."""
    one, two = (checkpoint_bytes(model, layers=n, plain=plain) for n in (1, 2))
    layers = max(1, math.ceil((size - one) / (two - one)) + 1)
    return layers, one + (layers - 1) * (two - one)


def _copy(files: list[Path], to: Path) -> tuple[int, float]:
    """Copy the files into one, from the disk to the disk; its bytes and the seconds. Like dd,
    it reads a piece, then writes it."""
    for file in files:
        _forget(file)
    copied, piece = 0, bytearray(_PIECE)
    started = time.perf_counter()
    with to.open("wb", buffering=0) as target:
        for file in files:
            with file.open("rb", buffering=0) as source:
                while count := source.readinto(piece):
                    copied += target.write(memoryview(piece)[:count])
        os.fsync(target.fileno())
    seconds = time.perf_counter() - started
    to.unlink()
    return copied, seconds


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


def _forget(file: Path) -> None:
    """Have it read from the disk, not from memory, as far as the system allows."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
