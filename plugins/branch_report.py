"""``python -m trtree.plugins.branch_report [--json]``: the kernels of state that branches,
compiled for every SM without a GPU, with what they take of the SM."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from trtree.plugins.causal_conv import specs as conv
from trtree.plugins.gated_delta_net import specs as delta
from trtree.plugins.gated_delta_net.tiles import HEAD_DIMS
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.report import figures, print_table
from trtree.plugins.tree_attention.tiles import SMS

# The shapes reported: Qwen3.6-27B's value heads and convolution, at any head size.
HEADS, GROUP, KERNEL = 48, 3, 4


def kernel_specs(sm: int, head_dims: list[int]) -> Iterator[KernelSpec]:
    for head_dim in head_dims:
        layer = delta.DeltaConfig(head_dim, head_dim, HEADS, GROUP)
        yield delta.decay_spec(layer)
        yield delta.delta_spec(layer, sm)
        yield delta.commit_spec(layer)
    yield conv.conv_spec(conv.ConvLayer(KERNEL))
    yield conv.commit_spec(conv.ConvLayer(KERNEL))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sm", type=int, nargs="+", choices=SMS, default=list(SMS))
    parser.add_argument(
        "--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=list(HEAD_DIMS)
    )
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    args = parser.parse_args(argv)
    kernels = [
        figures(spec, sm, args.cache) for sm in args.sm for spec in kernel_specs(sm, args.head_dim)
    ]
    if args.json:
        json.dump({"kernels": kernels}, sys.stdout, indent=1)
        print()
    else:
        print_table(kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
