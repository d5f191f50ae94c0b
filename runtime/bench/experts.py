"""Experts on the CPU: time of one layer's experts, next to reading those that are needed.

For each model, kind and number of rows: milliseconds for both halves of one layer (`up` and
`down`, preparing the activations included), how many experts the rows chose, and the floor:
reading the packed bytes of just those, measured right before. Rows choose independently and
evenly, anew in every repeat. `of_floor` is the floor over the time. Weights are random.

Figures are medians over the repeats.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import trtree._core as _core
from trtree.plugins import nvfp4_linear
from trtree.plugins.moe import cpu
from trtree.plugins.moe.contract import Routing
from trtree.runtime.bench.linear import random_bytes
from trtree.runtime.cli import positive, threads

FloatArray = npt.NDArray[np.float32]

INPUT_SCALE = 0.003


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    intermediate: int
    routing: Routing


MODELS = {
    "qwen3-30b-a3b": LayerShape(2048, 768, Routing(128, 8)),
    "glm-4.5-air": LayerShape(4096, 1408, Routing(128, 8, "sigmoid")),
}
KINDS = {"w4a4": INPUT_SCALE, "w4a16": None}


class Layer:
    """One layer's experts over random bytes."""

    def __init__(self, shape: LayerShape, input_scale: float | None, huge_pages: bool) -> None:
        self.shape = shape
        experts = shape.routing.experts
        sizes = [(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)]
        self.expert_bytes = sum(nvfp4_linear.packed_size(*size) for size in sizes)
        scales = np.full(experts, 1e-3, dtype=np.float32)
        self.up, self.down = (
            _core.moe.nvfp4_experts(
                random_bytes(experts * nvfp4_linear.packed_size(*size), huge_pages),
                *size,
                scales,
                input_scale,
                None,
            )
            for size in sizes
        )

    def time(self, x: FloatArray, weights: FloatArray, parallel: Any, isa: str) -> float:
        started = time.perf_counter()
        slots = self.shape.routing.top_k
        h = cpu.experts_up(self.up, x, weights, slots, parallel=parallel, isa=isa)
        cpu.experts_down(self.down, h, weights, parallel=parallel, isa=isa)
        return time.perf_counter() - started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 4, 17, 65])
    parser.add_argument("--threads", type=threads, default=2)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument(
        "--isa", choices=("portable", "avx2", "avx512"), default="", help="default: the best"
    )
    parser.add_argument(
        "--huge-pages", action="store_true", help="weights in 2 MiB pages; a mapped file has 4 KiB"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    parallel = _core.ThreadPool(args.threads)
    unread = random_bytes(240_000_000, args.huge_pages)
    figures: dict[str, Any] = {}
    for name in args.models:
        for kind, input_scale in KINDS.items():
            layer = Layer(MODELS[name], input_scale, args.huge_pages)
            figures[f"{name} {kind}"] = {
                rows: _figures(layer, rows, unread, parallel, args) for rows in args.rows
            }
    return {
        "isa": _core.cpu_isa(args.isa),
        "threads": args.threads,
        "repeats": args.repeats,
        "huge_pages": args.huge_pages,
        "experts": figures,
    }


def _figures(
    layer: Layer,
    rows: int,
    unread: npt.NDArray[np.uint8],
    parallel: _core.Parallel,
    args: argparse.Namespace,
) -> dict[str, Any]:
    random = np.random.default_rng(rows)
    shape = layer.shape
    seconds, floors, needed = [], [], []
    for _ in range(args.repeats):
        x = random.standard_normal((rows, shape.hidden), dtype=np.float32)
        logits = random.standard_normal((rows, shape.routing.experts), dtype=np.float32)
        weights = cpu.route(logits, shape.routing)
        needed.append(int((weights != 0).any(axis=0).sum()))
        rate = unread.size / _core.linear_bench.time_read(unread, parallel)
        floors.append(needed[-1] * layer.expert_bytes / rate)
        seconds.append(layer.time(x, weights, parallel, args.isa))
    ratios = [floor / second for floor, second in zip(floors, seconds, strict=True)]
    return {
        "ms": round(statistics.median(seconds) * 1e3, 3),
        "floor_ms": round(statistics.median(floors) * 1e3, 3),
        "of_floor": round(statistics.median(ratios), 3),
        "experts_needed": statistics.mean(needed),
    }
