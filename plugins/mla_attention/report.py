"""``python -m trtree.plugins.mla_attention.report [--json]``: the kernels of latent attention
and of its indexer, compiled for every SM without a GPU, with what they take of the SM."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtree.plugins.mla_attention import specs
from trtree.plugins.sparse_indexer import specs as indexer
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.report import figures, print_table
from trtree.plugins.tree_attention.specs import commit_spec_of_words
from trtree.plugins.tree_attention.tiles import SMS

# GLM-5's layers, whole or divided among 8 ranks, and a budget-16 tree.
VALUE_DIM, ROPE_DIM, SCALE = 512, 64, 256**-0.5
HEADS = (64, 8)
INDEX_HEADS, INDEX_DIM = 32, 128
ROWS, PAGE_SIZE = 17, 64


def kernel_specs(sm: int, heads: int) -> Iterator[KernelSpec]:
    """Of a layer with so many heads on a rank."""
    for selected in (False, True):
        layer = specs.LatentLayer(heads, VALUE_DIM, ROPE_DIM, PAGE_SIZE, ROWS, SCALE, selected)
        yield specs.attention_spec(layer, sm)
        yield specs.combine_spec(layer, sm)


def shared_specs(sm: int) -> Iterator[KernelSpec]:
    """Alike for any number of heads."""
    for dim, start in ((VALUE_DIM + ROPE_DIM, VALUE_DIM), (INDEX_DIM, 0)):
        yield specs.append_spec(specs.AppendLayer(dim, 0, PAGE_SIZE, start, ROPE_DIM))
        yield commit_spec_of_words("latent_commit", dim // 2, PAGE_SIZE, dim)
    yield indexer.scores_spec(indexer.IndexLayer(INDEX_HEADS, INDEX_DIM, PAGE_SIZE, ROWS), sm)
    yield indexer.top_k_spec()


def report(
    sms: list[int], heads_of_ranks: list[int], cache: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """{"kernels": [{name, sm, head_dim, registers, shared_bytes, shared_limit, spills, heads}]}.

    head_dim is the cache's; heads is null where a kernel does not depend on them.
    """
    kernels = []
    for sm in sms:
        for heads in heads_of_ranks:
            for spec in kernel_specs(sm, heads):
                kernels.append(figures(spec, sm, cache) | {"heads": heads})
        for spec in shared_specs(sm):
            kernels.append(figures(spec, sm, cache) | {"heads": None})
    return {"kernels": kernels}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sm", type=int, nargs="+", choices=SMS, default=list(SMS))
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS), help="of one rank")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    args = parser.parse_args(argv)
    result = report(args.sm, args.heads, args.cache)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print_table(result["kernels"], "heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
