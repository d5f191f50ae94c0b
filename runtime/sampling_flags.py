"""Sampling on the command line."""

import argparse
from collections.abc import Callable

from trtree.runtime.cli import integer
from trtree.runtime.executor import SamplingConfig

_count = integer(0)
_FLAGS: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("temperature", float, "0 for greedy decoding (default: %(default)s)"),
    ("top-k", _count, "draw from the N most probable tokens; 0 for all (default: %(default)s)"),
    ("top-p", float, "least probability mass to draw from (default: %(default)s)"),
    ("min-p", float, "least probability, as a part of the largest (default: %(default)s)"),
    ("repetition-penalty", float, "of tokens seen before; 1 for none (default: %(default)s)"),
    ("presence-penalty", float, "of tokens in the output; 0 for none (default: %(default)s)"),
    ("frequency-penalty", float, "for each occurrence in the output (default: %(default)s)"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of SamplingConfig that one number can say."""
    defaults = SamplingConfig()
    group = parser.add_argument_group("sampling")
    for name, kind, text in _FLAGS:
        group.add_argument(
            f"--{name}",
            type=kind,
            default=getattr(defaults, name.replace("-", "_")),
            metavar="N" if kind is _count else "X",
            help=text,
        )
    group.add_argument(
        "--seed",
        type=_count,
        default=0,
        metavar="N",
        help="the same seed gives the same text in every mode (default: %(default)s)",
    )


def sampling_config(args: argparse.Namespace) -> SamplingConfig:
    """The configuration that the flags of add_sampling_flags say; the executor checks it."""
    names = [name.replace("-", "_") for name, _, _ in _FLAGS]
    return SamplingConfig(**{name: getattr(args, name) for name in [*names, "seed"]})
