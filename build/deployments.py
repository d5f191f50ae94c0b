"""``python -m trtree.build.deployments``: which models fit on which machines, as Markdown.

From configuration files alone: every model of a folder (with its drafter, where NAME_dflash
lies beside NAME_nvfp4) under the build options of each deployment.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.hardware import Hardware
from trtree.build.network.network import NetworkError
from trtree.build.options import OptionError, read_options
from trtree.build.plan import kv_tokens_that_fit
from trtree.build.text_files import size_text
from trtree.runtime.cli import run_command

ERRORS = (CheckpointError, NetworkError, OptionError)
_TARGET, _DRAFTER = "_nvfp4", "_dflash"


def table(models: Path, deployments: Sequence[Path], hardware: Hardware) -> Iterator[str]:
    """Lines of a Markdown table: a row per model, and per deployment the weights of a GPU and
    the tokens of KV, of all requests together, that it has room for beside them; "refused"
    where such an engine cannot be built.

    Raises:
        CheckpointError, OptionError: a file is missing or invalid.
    """
    names = sorted(path.name.removesuffix(_TARGET) for path in models.glob(f"*{_TARGET}"))
    titles = [f"{file.stem}: weights | tokens of KV" for file in deployments]
    yield f"| model | {' | '.join(titles)} |"
    yield "|---|" + "---|---|" * len(deployments)
    for name in names:
        cells = [_cells(models, name, file, hardware) for file in deployments]
        drafter = " + DFlash" if (models / f"{name}{_DRAFTER}").exists() else ""
        yield f"| {name}{drafter} | {' | '.join(cells)} |"


def _cells(models: Path, name: str, deployment: Path, hardware: Hardware) -> str:
    drafter = models / f"{name}{_DRAFTER}"
    options = read_options(deployment).with_changes(
        {
            "checkpoint": models / f"{name}{_TARGET}",
            "drafter": drafter if drafter.exists() else None,
        }
    )
    hardware.check(options.sm, options.tp)
    try:
        description = builder.plan(options)
    except (NetworkError, OptionError):  # --plan says why
        return "refused | "
    weights = size_text(sum(map(description.weight_bytes, description.owners())))
    tokens = kv_tokens_that_fit(description, hardware)
    return f"{weights} | {f'{tokens // 1000:,}k' if tokens else 'does not fit'}"


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
