#!/usr/bin/env python3
"""Build an engine: checkpoint and drafter -> engine directory."""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.build.hardware import Hardware
from trtree.build.inspection import inspect
from trtree.build.lowering.tensorrt.library import gpu_backend
from trtree.build.network.network import NetworkError, Owner
from trtree.build.options import BACKENDS, BuildOptions, OptionError, parse_sms, read_options
from trtree.build.plan import engine_rows, memory_plan
from trtree.build.tree_tables import choices_from_log_probs, choices_to_json, medusa_tables
from trtree.runtime.calibration import calibrate
from trtree.runtime.cli import EXIT_BAD_INPUT, byte_progress, run_command
from trtree.runtime.engines import load_engine
from trtree.runtime.generate import read_prompts
from trtree.runtime.session import RequestError
from trtree.runtime.tokenizer import Tokenizer
from trtree.runtime.triton_repo.repository import IN_ENGINE, write_into_engine

ROOT = Path(__file__).resolve().parent
DEMO_CONFIG = ROOT / "configs" / "demo.yaml"
ERRORS = (CheckpointError, NetworkError, OptionError, EngineDirError, RequestError)
Add = Callable[..., Any]  # of an ArgumentParser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    return run_command(lambda: _run(args), ERRORS)


def _run(args: argparse.Namespace) -> int:
    if args.inspect:
        return _inspect(args.inspect)
    options = _options(args)
    if args.plan:
        plan = builder.plan(options, assume_drafter=args.assume_drafter)
        Console().print(_plan_table(plan, args.hardware))
        return 0
    if args.assume_drafter:
        raise OptionError("assume_drafter: only a plan can do without the drafter; pass --plan")
    if args.hardware:
        raise OptionError(
            f"hardware {args.hardware}: only plans are checked against it; pass --plan"
        )
    started = time.perf_counter()
    description = builder.describe(options)
    total = sum(description.weight_bytes(owner) for owner in description.owners()) * options.tp
    calibrating = _calibration(description) if options.tree == "static" else None
    with byte_progress("weights", total) as advance:
        path = builder.write(
            description,
            force=args.force,
            calibrate=calibrating,
            add_files=write_into_engine,
            progress=advance,
        )
    Console().print(_summary(description, path, time.perf_counter() - started))
    return 0


def _options(args: argparse.Namespace) -> BuildOptions:
    """The configuration file's options, overridden by the flags given."""
    if args.sm is not None:
        args.sm = parse_sms(args.sm)
    # Hardware files are of GPUs.
    without_gpu = "tensorrt-rtx" if args.hardware else "cpu"
    options = read_options(args.config, {"backend": gpu_backend() or without_gpu})
    flags = {
        name: getattr(args, name)
        for name in vars(args)
        if name in BuildOptions.__dataclass_fields__
    }
    if args.checkpoint is not None and args.drafter is None and args.config == DEMO_CONFIG:
        # The demo's drafter was trained for the demo's target alone.
        options = options.with_changes({"drafter": None})
    return options.with_overrides(flags)


def _calibration(description: builder.EngineDescription) -> Any:
    """Makes the static tree's tables by decoding calibration prompts with the new engine."""
    options = description.options
    if description.drafter is None:
        raise OptionError("tree static needs a drafter; pass --drafter")
    if options.tp > 1:
        raise OptionError(
            f"tree static: calibration decodes on one rank, and tp is {options.tp}; use tree "
            "dynamic, or build with --tp 1"
        )
    if options.calibration_prompts is None:
        raise OptionError("tree static needs --calibration-prompts: text to decode, one a line")
    texts = read_prompts(options.calibration_prompts)

    def run(path: Path) -> dict[str, Any]:
        engine_dir = EngineDir.open(path, verify=False)
        tokenizer = Tokenizer(engine_dir.tokenizer_path)
        log_probs = calibrate(
            load_engine(engine_dir),
            [tokenizer.encode(text) for text in texts],
            tree_budget=options.tree_budget,
            max_tokens=options.calibration_tokens,
        )
        choices = choices_from_log_probs(log_probs, options.tree_budget)
        return {
            "medusa_choices": choices_to_json(choices),
            **medusa_tables(choices).to_json(),
            "mean_log_probs": log_probs.tolist(),
        }

    return run


def _inspect(directory: Path) -> int:
    found = inspect(directory)
    console = Console()
    facts = Table(title=f"checkpoint {directory}", box=SIMPLE_HEAVY, show_header=False)
    for row in found.facts:
        facts.add_row(*row)
    groups = Table(box=SIMPLE_HEAVY)
    for title in ("modules", "how many", "stored as", "shape", "bytes"):
        groups.add_column(title, overflow="fold")
    for row in found.groups:
        groups.add_row(*row)
    console.print(facts, *([groups] if found.groups else []))
    for problem in found.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return EXIT_BAD_INPUT if found.problems else 0


def _plan_table(plan: builder.EngineDescription, hardware_file: Path | None) -> Table:
    options = plan.options
    hardware = Hardware.read(hardware_file) if hardware_file else None
    if hardware and options.on_tensorrt:
        hardware.check(options.sm, options.tp)
    title = f"plan for {options.backend}, per rank (of {options.tp})"
    table = Table(title=title, box=SIMPLE_HEAVY, show_header=False)
    for row in _pair(plan):
        table.add_row(*row)
    if not plan.drafter:
        table.add_row("", "to plan for trees: --drafter DIR, or --assume-drafter")
    for row in memory_plan(plan, hardware):
        table.add_row(*row)
    if not hardware:
        table.add_row("fits", "--hardware configs/hardware/rtx_pro_6000.yaml says on which GPUs")
    return table


def _pair(description: builder.EngineDescription) -> list[tuple[str, str]]:
    """What the engine is of: the target and its drafter."""
    options, drafter = description.options, description.drafter
    layers = f"{description.target.num_hidden_layers} layers"
    target = f"{_short(options.checkpoint)}, {layers}, {_kind(description, 'target')}"
    if drafter is None:
        return [("target", target), ("drafter", "none: plain decoding only")]
    name = _short(options.drafter) if options.drafter else "assumed, of the usual shape"
    taps = len(drafter.target_layer_ids)
    shape = f"{drafter.transformer['num_hidden_layers']} layers, block size {drafter.block_size}"
    stored = _kind(description, "drafter")
    return [("target", target), ("drafter", f"{name}, {shape}, {taps} layers tapped, {stored}")]


def _kind(description: builder.EngineDescription, owner: Owner) -> str:
    """What its quantization is called."""
    quantization = description.source.quantization(owner)
    return quantization.algorithm if quantization else "not quantized"


def _summary(description: builder.EngineDescription, path: Path, seconds: float) -> Table:
    options = description.options
    table = Table(title=f"engine {path}", box=SIMPLE_HEAVY, show_header=False)
    for row in _pair(description):
        table.add_row(*row)
    table.add_row("activations", description.activations)
    if description.drafter:
        table.add_row(
            "tree",
            f"{options.tree}, budget {options.tree_budget}, verify width {options.verify_width} "
            f"(at most {1 + options.largest_budget}), top-k {description.top_k}",
        )
    for row in memory_plan(description):
        table.add_row(*row)
    table.add_row("backend", options.backend)
    for row in engine_rows(EngineDir.open(path, verify=False).manifest):
        table.add_row(*row)
    table.add_row("for Triton", f"tritonserver --model-repository={_short(path / IN_ENGINE)}")
    table.add_row("built in", f"{seconds:.1f} s")
    return table


def _short(path: Path | None) -> str:
    """A path as one would type it here."""
    if path is not None and path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build_engine.py",
        description="Build an engine directory from a checkpoint and a DFlash drafter. "
        "Everything has a default in the configuration file; flags override it.",
        epilog="Exit codes: 0 done, 2 bad input (one line says what), 130 interrupted, "
        "143 terminated.",
    )
    add = parser.add_argument
    _add_inputs(add)
    _add_target_machine(add)
    _add_tree(add)
    _add_numbers(add)
    _add_sizes(add)
    _add_other_actions(add)
    return parser


def _add_inputs(add: Add) -> None:
    add("--version", action="version", version=f"trtree {version('trtree')}")
    add(
        "--config",
        type=Path,
        default=DEMO_CONFIG,
        metavar="FILE",
        help="YAML file with any of the options below, '-' written as '_' (default: the demo's)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="target: a Hugging Face directory of safetensors shards",
    )
    add("--drafter", type=Path, metavar="DIR", help="DFlash drafter: likewise")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="engine directory to write (default: engines/demo)",
    )
    add("--force", action="store_true", help="replace an engine that is already there")


def _add_target_machine(add: Add) -> None:
    add(
        "--backend",
        choices=BACKENDS,
        help="what will run the engine (default: tensorrt where it is installed and "
        "sees a GPU, else cpu)",
    )
    add(
        "--sm",
        metavar="SM[,SM...]",
        help="GPUs of a TensorRT engine: 120 (RTX PRO 6000 Blackwell), 89, ... (default: 120)",
    )
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks (default: 1)")
    add(
        "--attention",
        choices=("native", "plugin"),
        help="a TensorRT engine's attention: TensorRT's own layers over contiguous KV, or this "
        "project's kernels over KV pages (plugin: backend tensorrt only, one SM; not yet run on a "
        "GPU; default: native)",
    )


def _add_tree(add: Add) -> None:
    add(
        "--tree-budget",
        type=int,
        metavar="N",
        help="nodes of a draft tree besides its root; the verify width is one more (default: 16)",
    )
    add(
        "--max-tree-budget",
        type=int,
        metavar="N",
        help="largest budget a request may ask for (default: the tree budget, at least 64)",
    )
    add(
        "--tree",
        choices=("dynamic", "static"),
        help="rebuild the tree every round, or fix it from calibrated log-probs (default: dynamic)",
    )
    add(
        "--top-k",
        type=int,
        metavar="K",
        help="candidates per depth (default: as many as the budget can use)",
    )
    add(
        "--block-size",
        type=int,
        metavar="B",
        help="the drafter's block, bonus token included (default: the drafter's own)",
    )


def _add_numbers(add: Add) -> None:
    add(
        "--activations",
        choices=("nvfp4", "bf16", "float32"),
        help="what quantized linears round their inputs to (default: the checkpoint's)",
    )
    add(
        "--kv-cache",
        choices=("auto", "fp8", "float"),
        help="how the target's KV cache is stored: fp8 (e4m3, with the checkpoint's scales or "
        "1.0), float (the engine's own type), or auto: as the checkpoint was calibrated, where "
        "the backend can (default: auto)",
    )
    add(
        "--quantize",
        choices=("nvfp4",),
        help="quantize a bf16, fp16 or float32 target while building: W4A16, weights rounded to "
        "nearest; embeddings, head and routers stay as they are",
    )
    add("--quantize-drafter", choices=("nvfp4",), help="likewise, the drafter")


def _add_sizes(add: Add) -> None:
    add("--page-size", type=int, metavar="P", help="tokens per KV page (default: 16)")
    add(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="tokens the KV pool holds, all requests together (default: 8192)",
    )
    add(
        "--max-batch-size",
        "--max-batch",
        type=int,
        metavar="N",
        help="requests per step (default: 8)",
    )
    add(
        "--state-snapshots",
        type=int,
        metavar="N",
        help="of hybrids: places for snapshots of recurrent state, from which prompts that begin "
        "alike go on; 0 turns that off (default: 2 for each of max-batch-size; none with native "
        "attention of TensorRT's)",
    )
    add("--max-num-rows", type=int, metavar="N", help="rows per step (default: 512)")
    add(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="tokens per request, prompt included (default: the model's)",
    )
    add(
        "--calibration-prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one a line, that calibrate a static tree",
    )
    add(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens decoded per calibration prompt (default: 64)",
    )


def _add_other_actions(add: Add) -> None:
    add(
        "--inspect",
        type=Path,
        metavar="DIR",
        help="print what a checkpoint or drafter holds and what is wrong with it; build nothing",
    )
    add(
        "--plan",
        action="store_true",
        help="print memory and tree sizes from configuration files alone; build nothing",
    )
    add(
        "--assume-drafter",
        action="store_true",
        help="with --plan: a drafter of the usual shape (5 layers, block size 16), for targets "
        "that none is published for",
    )
    add(
        "--hardware",
        type=Path,
        metavar="FILE",
        help="with --plan: a machine of GPUs to check against, such as "
        "configs/hardware/rtx_pro_6000.yaml (then the default backend is tensorrt-rtx)",
    )


if __name__ == "__main__":
    sys.exit(main())
