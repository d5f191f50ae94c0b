"""Build a TensorRT engine of a random checkpoint: seconds, engine size, peak memory.

Shapes come from a model's configuration; the checkpoint is written to a temporary folder.
Peak anonymous memory is what the build needs beside the mapped weights, sampled from
outside while it runs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from trtree.build import builder
from trtree.build.bench.memory import PeakMemory
from trtree.build.bench.synthetic import write_random
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BACKENDS, BuildOptions, parse_sms
from trtree.runtime.cli import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("configs/models/qwen3_0.6b_nvfp4"),
        metavar="DIR",
        help="folder with config.json and hf_quant_config.json (default: %(default)s)",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="tensorrt-rtx")
    parser.add_argument("--sm", default="120", metavar="SM[,SM...]")
    parser.add_argument("--activations", choices=("nvfp4", "bf16"))
    parser.add_argument("--max-seq-len", type=positive, default=4096, metavar="N")
    parser.add_argument("--max-batch-size", type=positive, default=8, metavar="N")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where to write (default: /tmp)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.work) as directory:
        work = Path(directory)
        options = BuildOptions(
            checkpoint=work / "checkpoint",
            output=work / "engine",
            backend=args.backend,
            sm=parse_sms(args.sm),
            activations=args.activations,
            max_seq_len=args.max_seq_len,
            max_batch_size=args.max_batch_size,
            kv_tokens=args.max_seq_len * args.max_batch_size,
        )
        write_random(work / "checkpoint", args.model)
        description = builder.describe(options)
        with PeakMemory() as memory:
            started = time.perf_counter()
            builder.write(description)
            seconds = time.perf_counter() - started
        engines = sum(file.stat().st_size for file in (work / "engine").glob("*.engine"))
        manifest = EngineDir.open(work / "engine", verify=False).manifest
    built = manifest.get("tensorrt", {}).get("engines", {})
    return {
        "model": str(args.model),
        "backend": args.backend,
        "sm": args.sm,
        "activations": description.activations,
        "seconds": round(seconds, 1),
        "engine_bytes": engines,
        "peak_anonymous_bytes": memory.grown,
        "peak_anonymous_per_engine_byte": round(memory.grown / engines, 2) if engines else None,
        "layers": {file: entry["layers"] for file, entry in built.items()},
        "activation_bytes": {file: entry["activation_bytes"] for file, entry in built.items()},
        "weight_rewrites": {file: entry["weight_rewrites"] for file, entry in built.items()},
    }
