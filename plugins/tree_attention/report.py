"""``python -m trtree.plugins.tree_attention.report [--json]``: every kernel, compiled for
every SM without a GPU, with what it takes of the SM."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trtree.plugins.tree_attention import specs
from trtree.plugins.tree_attention.aot import KernelSpec, compile_kernel
from trtree.plugins.tree_attention.tiles import FP8_MIN_SM, HEAD_DIMS, SHARED_LIMIT, SMS

# The shapes reported: a budget-16 tree on a layer like Qwen3's, its vocabulary.
ROWS, KV_HEADS, GROUP, PAGE_SIZE, WINDOW = 17, 8, 4, 64, 4096
TOP_K, VOCAB = 16, 151936
TREE_WIDTHS = (17, 2048)


def kernel_specs(sm: int, head_dim: int) -> Iterator[KernelSpec]:
    """The attention kernels of a head size on an SM."""
    kv_dtypes = [torch.bfloat16]
    if sm >= FP8_MIN_SM:
        kv_dtypes.append(torch.float8_e4m3fn)
    for kv_dtype in kv_dtypes:
        layer = specs.LayerConfig(
            head_dim,
            KV_HEADS,
            GROUP,
            PAGE_SIZE,
            ROWS,
            scale=head_dim**-0.5,
            rotary_dim=head_dim,
            kv_dtype=kv_dtype,
        )
        yield specs.append_spec(layer, sm)
        yield specs.attention_spec(layer, sm)
        yield specs.commit_spec(layer)
        if kv_dtype == torch.bfloat16:
            yield specs.attention_spec(replace(layer, window=WINDOW), sm)
    yield specs.combine_spec(layer, sm)


def tree_specs() -> Iterator[KernelSpec]:
    """The DDTree kernels, alike on every SM."""
    yield specs.top_k_chunks_spec(TOP_K)
    yield specs.top_k_merge_spec(TOP_K, VOCAB)
    for width in TREE_WIDTHS:
        yield specs.build_tree_spec(width)
        yield specs.walk_tree_spec(width)


def report(
    sms: list[int], head_dims: list[int], cache: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """{"kernels": [{name, sm, head_dim, registers, shared_bytes, shared_limit, spills}]}.

    head_dim is null for the DDTree kernels; registers and spills (bytes) are per thread.
    """
    kernels = []
    for sm in sms:
        chosen = [spec for head_dim in head_dims for spec in kernel_specs(sm, head_dim)]
        for spec in [*chosen, *tree_specs()]:
            kernels.append(figures(spec, sm, cache))
    return {"kernels": kernels}


def figures(spec: KernelSpec, sm: int, cache: Path | None = None) -> dict[str, Any]:
    """One row of a report."""
    taken = compile_kernel(spec, sm, cache).resources
    return {
        "name": spec.name,
        "sm": sm,
        "head_dim": spec.head_dim,
        "registers": taken.registers,
        "shared_bytes": taken.shared_bytes,
        "shared_limit": SHARED_LIMIT[sm],
        "spills": taken.spills,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sm", type=int, nargs="+", choices=SMS, default=list(SMS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    args = parser.parse_args(argv)
    result = report(args.sm, args.head_dim, args.cache)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print_table(result["kernels"])
    return 0


def print_table(kernels: list[dict[str, Any]], *more: str) -> None:
    """Rows of ``figures``, and ``more`` columns behind them."""
    table = Table("kernel", "SM", "head", "registers", "shared", "limit", "spills", *more)
    for row in kernels:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
