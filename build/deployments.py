"""``python -m trtree.build.deployments``: which models fit on which machines, as Markdown.

From configuration files alone: every model of a folder under the build options of each
deployment, with its drafter, where NAME_dflash lies beside NAME_nvfp4, or with one of the usual
shape ("assumed").
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.hardware import Hardware
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions, OptionError, read_options
from trtree.build.plan import kv_tokens_that_fit, least_tp, requests_that_fit
from trtree.build.text_files import size_text
from trtree.runtime.cli import run_command

ERRORS = (CheckpointError, NetworkError, OptionError)
_TARGET, _DRAFTER = "_nvfp4", "_dflash"


def table(models: Path, deployments: Sequence[Path], hardware: Hardware) -> Iterator[str]:
    """Lines of a Markdown table: a row per model, and per deployment the weights of a GPU, the
    tokens of KV, of all its requests together, that it has room for beside them, and how many
    requests of the longest kind fit at once; "refused" where such an engine cannot be built.

    Raises:
        CheckpointError, OptionError: a file is missing or invalid.
    """
    names = sorted(path.name.removesuffix(_TARGET) for path in models.glob(f"*{_TARGET}"))
    options = {file.stem: read_options(file) for file in deployments}
    titles = [
        f"{name}: weights | KV tokens | requests of {option.max_seq_len}"
        for name, option in options.items()
    ]
    yield f"| model | {' | '.join(titles)} |"
    yield "|---|" + "---|---|---|" * len(titles)
    for name in names:
        drafter = models / f"{name}{_DRAFTER}"
        pair: dict[str, Path | None] = {
            "checkpoint": models / f"{name}{_TARGET}",
            "drafter": drafter if drafter.exists() else None,
        }
        with_drafter = " + DFlash" if drafter.exists() else " + assumed"
        cells = [_cells(option.with_changes(pair), hardware) for option in options.values()]
        yield f"| {name}{with_drafter} | {' | '.join(cells)} |"


def _cells(options: BuildOptions, hardware: Hardware) -> str:
    hardware.check(options.sm, options.tp)
    try:
        description = builder.plan(options, assume_drafter=options.drafter is None)
    except (NetworkError, OptionError):  # --plan says why
        return "refused | | "
    weights = size_text(sum(map(description.weight_bytes, description.owners())))
    tokens = kv_tokens_that_fit(description, hardware)
    if not tokens:
        least = least_tp(description, hardware)
        return f"{weights} | does not fit{f': --tp {least}' if least else ''} | "
    return f"{weights} | {tokens // 1000:,}k | {requests_that_fit(description, hardware):,}"


def main(argv: Sequence[str] | None = None) -> int:
    configs = Path("configs")
    parser = argparse.ArgumentParser(
        prog="python -m trtree.build.deployments", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("--models", type=Path, default=configs / "models", metavar="DIR")
    parser.add_argument(
        "--hardware", type=Path, default=configs / "hardware/rtx_pro_6000.yaml", metavar="FILE"
    )
    parser.add_argument(
        "deployments",
        nargs="*",
        type=Path,
        default=sorted((configs / "deployments").glob("*.yaml")),
        metavar="FILE",
        help="options as of build_engine.py --config (default: configs/deployments/*.yaml)",
    )
    args = parser.parse_args(argv)

    def show() -> int:
        for line in table(args.models, args.deployments, Hardware.read(args.hardware)):
            print(line)
        return 0

    return run_command(show, ERRORS)


if __name__ == "__main__":
    sys.exit(main())
