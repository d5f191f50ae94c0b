"""Build an engine of a pair widened to a larger model's shapes; see widen.py."""

from dataclasses import replace
from pathlib import Path

from trtree.build import builder
from trtree.build.bench.widen import Shape, WidenedSource
from trtree.build.checkpoint import dflash_config
from trtree.build.options import BuildOptions, OptionError
from trtree.build.source import CheckpointSource


def build_widened(options: BuildOptions, shape: Shape) -> Path:
    """Write the widened engine to ``options.output``.

    Raises:
        OptionError: the shape cannot hold the pair exactly, or there is no drafter.
    """
    if options.drafter is None:
        raise OptionError("--widen needs a pair: a checkpoint and a drafter")
    source = CheckpointSource.open(options)
    drafter = dflash_config.read_drafter(source.checkpoint("drafter"))
    wide = WidenedSource(source, shape)
    drafter = replace(
        drafter,
        transformer=dict(wide.config("drafter")),
        num_target_layers=int(wide.config("target")["num_hidden_layers"]),
    )
    return builder.write(builder.describe_source(options, wide, drafter), force=True)
