"""The GPU kernels on this machine's GPU: the shared test table, then times.

Checks append, attention, combine and commit on every case of the table against the float64
reference, and the device DDTree against the reference in Python. Then times attention beside
torch's scaled_dot_product_attention with the same mask (its keys gathered and its heads laid
out for it beforehand, the best of its layouts) and beside the time that the bytes to be
moved take at this GPU's measured copy bandwidth. What does not fit --seconds is left out
and counted. Needs torch with CUDA, and triton. Times are in microseconds, medians, with a
cold L2.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtree.plugins.ddtree import reference as tree_reference
from trtree.plugins.tree_attention.cases import (
    AttentionCase,
    all_cases,
    depths,
    make_inputs,
    pack_mask,
    pairwise_cases,
    random_tree,
)
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv
from trtree.plugins.tree_attention.plan import plan_attention, row_tables
from trtree.plugins.tree_attention.reference import unpack_mask
from trtree.plugins.tree_attention.tiles import FP8_MIN_SM, SMS, attention_tile
from trtree.runtime.cli import positive

# Triton, and what imports it, is imported where it is used: other benchmarks do without.

# The relative error of a softmax weight: one rounding to the product's type, and then some.
WEIGHT_ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
LSE_ERROR = 1e-4
# The share of --seconds that the checks may take; most of it is compilation.
CHECK_SHARE = 0.6


@dataclass(frozen=True)
class Shape:
    """One timed step: every request has the same rows and context."""

    requests: int
    rows: int
    context: int
    fp8_kv: bool = False
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64

    def bytes_moved(self) -> int:
        """K and V once, q and the output once: what any kernel must move."""
        keys = self.context + self.rows
        kv = 2 * keys * self.kv_heads * self.head_dim * (1 if self.fp8_kv else 2)
        q = 2 * self.rows * self.kv_heads * self.group * self.head_dim * 2
        return self.requests * (kv + q)


SHAPES = [
    Shape(requests, rows, context, fp8_kv)
    for context in (1024, 8192, 32768, 131072)
    for requests in (1, 8)
    for rows in (1, 17, 65)
    for fp8_kv in (False, True)
    if requests * context <= 262144
]
TREE_WIDTHS = (17, 65, 257, 1025)
VOCAB, DEPTH, TOP_K = 151936, 15, 16
COMMIT_LAYERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--seconds", type=float, default=450, help="time to spend at most; default: %(default)s"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=min(os.cpu_count() or 1, 16),
        help="processes that check and compile; default: %(default)s",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu_results.json"),
        help="results file; default: %(default)s",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Checks and measures; the result is also written to --output."""
    if not torch.cuda.is_available():
        raise SystemExit("error: the gpu benchmark needs a CUDA GPU and a torch built for CUDA")
    deadline = time.monotonic() + args.seconds
    checks = check_table(args.jobs, time.monotonic() + CHECK_SHARE * args.seconds)
    result = {"machine": machine(), "checks": checks, "times": times(deadline)}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def machine() -> dict[str, Any]:
    import triton

    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "sm": sm_version(),
        "sm_count": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def sm_version() -> int:
    """The SM whose tiles this GPU uses: its own, else the newest older one known."""
    major, minor = torch.cuda.get_device_capability()
    known = [sm for sm in SMS if sm <= 10 * major + minor]
    if not known:
        raise SystemExit(f"error: the kernels need SM {SMS[0]}, this GPU is SM {major}{minor}")
    return known[-1]


def check_table(jobs: int, deadline: float) -> dict[str, Any]:
    """Every case of the table, the covering sample first: {"passed", "failed", "not_run"}."""
    sample = pairwise_cases()
    cases = sample + [case for case in all_cases() if case not in sample]
    failed: dict[str, str] = {}
    passed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(check_case, case, deadline): case for case in cases}
        for future in as_completed(futures):
            message = future.result()
            if message is None:
                passed += 1
            elif message:
                failed[futures[future].name] = message
    return {
        "cases": len(cases),
        "passed": passed,
        "failed": failed,
        "not_run": len(cases) - passed - len(failed),
        "trees": check_trees(),
    }


def check_case(case: AttentionCase, deadline: float) -> str | None:
    """None: passed; "": no time left, or not for this SM; else what is wrong."""
    from trtree.plugins.tree_attention.device_checks import (
        check_append,
        check_attention,
        check_commit,
    )

    sm = sm_version()
    if time.monotonic() > deadline or (case.fp8_kv and sm < FP8_MIN_SM):
        return ""
    device = torch.device("cuda")
    inputs = make_inputs(case)
    try:
        q, cache = check_append(inputs, device)
        check_attention(
            case,
            inputs,
            q,
            cache,
            attention_tile(sm, case.head_dim, case.rows, case.group),
            device,
            target_ctas=torch.cuda.get_device_properties(0).multi_processor_count,
            weight_error=WEIGHT_ERROR[case.dtype],
            lse_error=LSE_ERROR,
        )
        check_commit(case, inputs, device)
    except Exception as error:  # a kernel that does not compile or run is a result too
        return f"{type(error).__name__}: {error}"
    return None


def check_trees() -> dict[str, str]:
    """Device trees of a real vocabulary, and walks, against the reference in Python, by width."""
    from trtree.plugins.ddtree import device

    logits = tree_logits()
    result = {}
    for width in TREE_WIDTHS:
        k = min(width, 128)
        log_probs, token_ids = device.top_k_log_probs(logits, k)
        trees = tree_builder(log_probs, token_ids, width)()
        _, expected_ids = tree_reference.top_k_log_probs(logits.cpu().numpy(), k)
        tree = tree_reference.build_tree(log_probs.cpu().numpy(), expected_ids, width - 1)
        rows = int(trees.num_rows)
        choices = trees.tokens.clone()
        for row in range(rows - 1, 0, -1):  # down the tree, by first children
            choices[0, tree.parents[row]] = tree.token_ids[row - 1]
        walks = device.DeviceWalks.empty(trees)
        device.walk_trees(trees, choices, walks)
        path, bonus = tree_reference.walk(tree.token_ids, tree.parents, choices[0, :rows].tolist())
        same = (
            (token_ids.cpu().numpy() == expected_ids).all()
            and trees.parents[0, :rows].tolist() == tree.parents
            and trees.tokens[0, 1:rows].tolist() == tree.token_ids
            and walks.accepted[0, : int(walks.num_accepted)].tolist() == path
            and int(walks.bonus_tokens) == bonus
        )
        result[str(width)] = "equal" if same else "DIFFERENT"
    return result


def times(deadline: float) -> dict[str, Any]:
    bandwidth = copy_bandwidth()
    attention = []
    left_out = 0
    for shape in SHAPES:
        if time.monotonic() > deadline or (shape.fp8_kv and sm_version() < FP8_MIN_SM):
            left_out += 1
            continue
        attention.append(time_attention(shape, bandwidth))
    return {
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "attention": attention,
        "attention_left_out": left_out,
        "commit": time_commit(bandwidth),
        "trees": time_trees(),
    }


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-6 * microseconds(lambda: target.copy_(source)))


def microseconds(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return 1e3 * float(do_bench(call, return_mode="median"))


def time_attention(shape: Shape, bandwidth: float) -> dict[str, Any]:
    """Attention and combine together, as one step of one layer runs them."""
    step = AttentionStep(shape, torch.device("cuda"))
    ours = microseconds(step.attend)
    sdpa = {name: microseconds(call) for name, call in step.sdpa_layouts()}
    best = min(sdpa, key=lambda name: sdpa[name])
    floor = 1e6 * shape.bytes_moved() / bandwidth
    return {
        "requests": shape.requests,
        "rows": shape.rows,
        "context": shape.context,
        "kv": "fp8" if shape.fp8_kv else "bf16",
        "work_items": step.plan.num_items,
        "kernel_us": ours,
        "sdpa_us": sdpa[best],
        "sdpa_layout": best,
        "bytes_us": floor,
        "share_of_bandwidth": floor / ours,
    }


class AttentionStep:
    """Random tensors of a shape, on a device: the kernels' step, and SDPA's of the same."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.scale = 1 / math.sqrt(shape.head_dim)
        on_gpu = device.type == "cuda"
        sm = sm_version() if on_gpu else 120
        ctas = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 8
        self.tile = attention_tile(sm, shape.head_dim, shape.rows, shape.group)
        count = -(-(shape.context + shape.rows) // shape.page_size)
        pages = torch.randperm(count * shape.requests).reshape(shape.requests, count)
        self.segments = [
            AttentionSegment(i * shape.rows, shape.rows, shape.context, pages[i])
            for i in range(shape.requests)
        ]
        num_rows = shape.requests * shape.rows
        self.tables = row_tables(self.segments, num_rows).to(device)
        self.plan = plan_attention(
            self.segments,
            num_rows,
            kv_heads=shape.kv_heads,
            group=shape.group,
            block_m=self.tile.block_m,
            target_ctas=ctas,
        ).to(device)
        tree = random_tree(shape.rows, random.Random(0))
        mask = pack_mask(tree, (shape.rows + 31) // 32)
        self.packed_mask = mask.repeat(shape.requests, 1).to(device)
        positions = shape.context + torch.tensor(depths(tree), dtype=torch.int32)
        self.positions = positions.repeat(shape.requests).to(device)
        heads = shape.kv_heads * shape.group
        self.q = torch.randn(num_rows, heads, shape.head_dim, device=device).bfloat16()
        size = (pages.numel(), shape.page_size, shape.kv_heads, shape.head_dim)
        dtype = torch.float8_e4m3fn if shape.fp8_kv else torch.bfloat16
        k, v = (torch.randn(size, device=device).to(dtype) for _ in range(2))
        ones = torch.ones(shape.kv_heads, device=device)
        self.cache = PagedKv(k, v, ones, ones) if shape.fp8_kv else PagedKv(k, v)

    def attend(self) -> torch.Tensor:
        """[rows, heads, head_dim]."""
        from trtree.plugins.tree_attention import launch

        out, _ = launch.tree_attention(
            self.q,
            self.packed_mask,
            self.positions,
            self.plan,
            self.tables.page_table,
            self.cache,
            self.tile,
            scale=self.scale,
        )
        return out

    def sdpa_layouts(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """SDPA on contiguous bfloat16 keys with a dense mask. "grouped" stacks a group's heads
        as rows of one KV head, as the kernels do; "expanded" repeats the KV heads."""
        s = self.shape
        q, k, v, mask = self._dense()
        attend = torch.nn.functional.scaled_dot_product_attention
        grouped = q.reshape(s.requests, s.kv_heads, s.group * s.rows, s.head_dim)
        group_mask = mask.repeat(1, 1, s.group, 1)
        yield "grouped", lambda: attend(grouped, k, v, group_mask, scale=self.scale)
        wide_k, wide_v = (x.repeat_interleave(s.group, dim=1) for x in (k, v))
        yield "expanded", lambda: attend(q, wide_k, wide_v, mask, scale=self.scale)

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [requests, heads, rows, dim], k and v [requests, kv_heads, keys, dim], mask
        [requests, 1, rows, keys]."""
        s = self.shape
        keys = s.context + s.rows
        slots = torch.arange(keys)
        where = [self.cache.locate(segment.pages, slots) for segment in self.segments]
        # Not every device indexes FP8 tensors; all index bytes.
        k, v = (
            torch.stack(
                [
                    store.view(torch.uint8)[page.to(self.device), at.to(self.device)]
                    for page, at in where
                ]
            ).view(store.dtype)
            for store in (self.cache.k, self.cache.v)
        )
        mask = torch.ones(s.requests, 1, s.rows, keys, dtype=torch.bool)
        visible = unpack_mask(self.packed_mask.cpu(), s.rows)
        mask[..., s.context :] = visible.reshape(s.requests, 1, s.rows, s.rows)
        q = self.q.reshape(s.requests, s.rows, -1, s.head_dim).transpose(1, 2)
        k, v = (x.transpose(1, 2).bfloat16().contiguous() for x in (k, v))
        return q.contiguous(), k, v, mask.to(self.device)


def time_commit(bandwidth: float) -> dict[str, Any]:
    """16 accepted rows of one request, all layers in one launch; each row moves."""
    from trtree.plugins.tree_attention import launch

    step = AttentionStep(Shape(1, 65, 8192), torch.device("cuda"))
    caches = [
        PagedKv(torch.empty_like(step.cache.k), torch.empty_like(step.cache.v))
        for _ in range(COMMIT_LAYERS)
    ]
    stores = launch.KvStores.of(caches)
    accepted = torch.arange(1, 65, 4, dtype=torch.int32, device="cuda")[None]
    count = torch.tensor([accepted.shape[1]], dtype=torch.int32, device="cuda")
    moved = 2 * len(stores.addresses) * accepted.shape[1] * stores.row_words * 4
    return {
        "layers": COMMIT_LAYERS,
        "rows": accepted.shape[1],
        "kernel_us": microseconds(lambda: launch.commit(stores, step.tables, accepted, count)),
        "bytes_us": 1e6 * moved / bandwidth,
    }


def time_trees() -> list[dict[str, Any]]:
    """Top-k of a drafter's block, and the search, by verify width."""
    from trtree.plugins.ddtree import device

    logits = tree_logits()
    top_k_us = microseconds(lambda: device.top_k_log_probs(logits, TOP_K))
    log_probs, token_ids = device.top_k_log_probs(logits, TOP_K)
    return [
        {
            "width": width,
            "top_k_us": top_k_us,
            "build_us": microseconds(tree_builder(log_probs, token_ids, width)),
        }
        for width in TREE_WIDTHS
    ]


def tree_logits() -> torch.Tensor:
    """[depth, vocab], peaked as a drafter's are."""
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(DEPTH, VOCAB, generator=generator)).to("cuda")


def tree_builder(log_probs: torch.Tensor, token_ids: torch.Tensor, width: int) -> Callable[[], Any]:
    """A call that grows one tree of that width, in place."""
    from trtree.plugins.ddtree import device

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=log_probs.device)

    trees = device.DeviceTrees.empty(1, width, log_probs.device)
    numbers = one(0), one(0), one(width - 1)

    def grow() -> Any:
        device.build_trees(log_probs[None], token_ids[None], *numbers, trees)
        return trees

    return grow
