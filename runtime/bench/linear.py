"""Linears on the CPU: time of a decoding step's linears, next to what no kernel can beat.

For each model, kind and number of rows: milliseconds for one step's linears one after
the other (preparing the activations included), the rate at which packed weights were
read, and the two floors, measured right before: reading as many bytes with the widest
loads, and the instructions of the dot products alone, from registers. `of_floor` is the
larger floor over the time: 1 is as fast as the machine was at that moment, which
matters where other work shares its memory. Big models are measured on a few layers and
scaled. Weights are random.

Figures are medians over the repeats, `best_ms` the least time.
"""

import argparse
import mmap
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core
from trtree.plugins import dense_linear, nvfp4_linear
from trtree.runtime.cli import positive, threads

Bytes = npt.NDArray[np.uint8]
Timer = Callable[[int], float]  # rows -> seconds

# Enough not to fit any cache.
_MEASURED_BYTES = 240e6


@dataclass(frozen=True)
class ModelShape:
    layers: int
    hidden: int
    q: int
    kv: int
    ffn: int
    vocab: int

    def layer(self) -> list[tuple[int, int, bool]]:
        """(O, K, reads the same input as the one before) of a layer's linears."""
        return [
            (self.q, self.hidden, False),
            (self.kv, self.hidden, True),
            (self.kv, self.hidden, True),
            (self.hidden, self.q, False),
            (self.ffn, self.hidden, False),
            (self.ffn, self.hidden, True),
            (self.hidden, self.ffn, False),
        ]


MODELS = {
    "qwen3-0.6b": ModelShape(28, 1024, 2048, 1024, 3072, 151936),
    "qwen3-8b": ModelShape(36, 4096, 4096, 1024, 12288, 151936),
}


@dataclass(frozen=True)
class Case:
    """One line of the report: `weight_bytes` and `blocks` (of 16 columns x 16 of K) are
    what is measured, times `scale` the whole model's."""

    name: str
    kind: "_core.linear_bench.BlockKind"
    time: Timer
    weight_bytes: int
    blocks: int
    scale: float


def random_bytes(size: int, huge_pages: bool) -> Bytes:
    """Any of them is a valid code and a valid block scale."""
    memory = mmap.mmap(-1, size)
    if huge_pages:
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)
    pattern = np.random.default_rng(0).integers(0, 0x78, 1 << 20, dtype=np.uint8)
    for start in range(0, size, len(pattern)):
        data[start : start + len(pattern)] = pattern[: size - start]
    return data


def _linear_cases(
    name: str, shape: ModelShape, parallel: _core.Parallel, args: argparse.Namespace
) -> list[Case]:
    layer = shape.layer()
    sizes = [nvfp4_linear.packed_size(o, k) for o, k, _ in layer]
    measured = max(1, min(shape.layers, round(_MEASURED_BYTES / sum(sizes))))
    data = random_bytes(measured * sum(sizes), args.huge_pages)
    starts = np.cumsum([0, *sizes * measured])
    linears = [
        (data[start : start + size], *linear)
        for start, size, linear in zip(starts, sizes * measured, layer * measured, strict=False)
    ]

    def timer(bf16: bool) -> Timer:
        return lambda rows: float(
            _core.linear_bench.time_step(linears, rows, bf16, parallel, args.isa)
        )

    blocks = measured * sum(-(-o // 16) * (k // 16) for o, k, _ in layer)
    kinds = _core.linear_bench.BlockKind
    return [
        Case(f"{name} {kind}", block, timer(bf16), data.size, blocks, shape.layers / measured)
        for kind, block, bf16 in [("w4a4", kinds.W4A4, False), ("w4a16", kinds.W4A16, True)]
    ]


def _lm_head_case(
    name: str, shape: ModelShape, parallel: _core.Parallel, args: argparse.Namespace
) -> Case:
    columns = min(shape.vocab, round(_MEASURED_BYTES / shape.hidden / 2))
    size = dense_linear.packed_size(columns, shape.hidden, torch.bfloat16)
    data = random_bytes(size, args.huge_pages)

    def time(rows: int) -> float:
        seconds: float = _core.linear_bench.time_dense(
            data, "bfloat16", columns, shape.hidden, rows, parallel, args.isa
        )
        return seconds

    blocks = -(-columns // 16) * (shape.hidden // 16)
    kind = _core.linear_bench.BlockKind.DENSE
    return Case(f"{name} lm_head bf16", kind, time, size, blocks, shape.vocab / columns)


@dataclass(frozen=True)
class Sample:
    """Seconds, of what was measured: the floors and then the linears."""

    read: float
    arithmetic: float  # negative: unknown for this CPU
    linears: float

    @property
    def of_floor(self) -> float:
        return max(self.read, self.arithmetic) / self.linears


def _sample(case: Case, rows: int, unread: Bytes, parallel: _core.Parallel) -> Sample:
    bench = _core.linear_bench
    read = bench.time_read(unread, parallel) * case.weight_bytes / unread.size
    tried = 1 << 18
    arithmetic = bench.time_blocks(case.kind, tried, parallel) * case.blocks * rows / tried
    return Sample(read, arithmetic, case.time(rows))


def _figures(case: Case, samples: list[Sample]) -> dict[str, Any]:
    def ms(seconds: float) -> float:
        return round(seconds * case.scale * 1e3, 3)

    seconds = statistics.median(sample.linears for sample in samples)
    floors = {"read": ms(statistics.median(sample.read for sample in samples))}
    if samples[0].arithmetic > 0:
        floors["arithmetic"] = ms(statistics.median(sample.arithmetic for sample in samples))
    return {
        "ms": ms(seconds),
        "best_ms": ms(min(sample.linears for sample in samples)),
        "gb_per_s": round(case.weight_bytes / seconds / 1e9, 2),
        "floor_ms": floors,
        "of_floor": round(statistics.median(sample.of_floor for sample in samples), 3),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 8, 17, 33, 65])
    parser.add_argument("--threads", type=threads, default=2)
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument(
        "--isa", choices=("portable", "avx2", "avx512"), default="", help="default: the best"
    )
    parser.add_argument(
        "--huge-pages", action="store_true", help="weights in 2 MiB pages; a mapped file has 4 KiB"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    parallel = _core.ThreadPool(args.threads)
    unread = random_bytes(round(_MEASURED_BYTES), args.huge_pages)
    cases: list[Case] = []
    for name in args.models:
        cases += _linear_cases(name, MODELS[name], parallel, args)
        cases.append(_lm_head_case(name, MODELS[name], parallel, args))
    samples: dict[tuple[str, int], list[Sample]] = {}
    for _ in range(args.repeats):
        for case in cases:
            for rows in args.rows:
                sample = _sample(case, rows, unread, parallel)
                samples.setdefault((case.name, rows), []).append(sample)
    return {
        "isa": _core.cpu_isa(args.isa),
        "threads": args.threads,
        "repeats": args.repeats,
        "huge_pages": args.huge_pages,
        "linears": {
            case.name: {rows: _figures(case, samples[case.name, rows]) for rows in args.rows}
            for case in cases
        },
    }
