"""The ``tensorrt`` and ``tensorrt-rtx`` backends of the builder: one engine per network
and rank.

The drafter has two engines. Its context pass runs after every prefill chunk and commit,
its block pass once a round, with other shapes: one engine would compute both each time.
The price is that the block's key and value projections are stored in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt.compile import BuildMessages, compile_engine
from trtree.build.lowering.tensorrt.context import BATCH, OUTPUTS, ROWS, Profile
from trtree.build.lowering.tensorrt.inspection import inspect_engine
from trtree.build.lowering.tensorrt.library import (
    Library,
    check_sms,
    load_library,
    load_plugins,
    present_sm,
    weights_in_fp4,
)
from trtree.build.lowering.tensorrt.lower import LoweredNetwork, lower
from trtree.build.lowering.tensorrt.paged import paged_lowering
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.tensorrt.weights import Encoding, constant_bytes, stage
from trtree.build.lowering.weights import WeightReader
from trtree.build.network.network import DType, Network, Owner
from trtree.build.options import BuildOptions, OptionError
from trtree.plugins.gated_delta_net.tiles import HEAD_DIMS as DELTA_DIMS
from trtree.plugins.tree_attention.tiles import HEAD_DIMS, MAX_PAGE_SIZE, SMS

DTYPE: DType = "bfloat16"
SUFFIX = "engine"
# An engine's file name, by its network's name.
FILES = {"target": "target", "drafter_context": "drafter_context", "drafter_block": "drafter"}
# TopK's largest k.
MAX_TOP_K = 3840
# Rows of a prefill chunk, at least.
LEAST_CHUNK = 65
# The cache is rounded up to this many slots.
CACHE_STEP = 64


@dataclass(frozen=True)
class EngineSizes:
    """What an engine is built for.

    max_batch_size: requests per verify step. max_chunk: rows of a prefill chunk, which runs
    one request at a time. verify_width, max_verify_width: usual and most rows of a tree.
    """

    max_batch_size: int
    max_chunk: int
    verify_width: int
    max_verify_width: int
    block_size: int
    max_seq_len: int

    @property
    def cache_length(self) -> int:
        """Slots per request: its tokens, and a step's rows behind them."""
        headroom = max(self.max_verify_width, self.block_size)
        length = max(self.max_seq_len + headroom, LEAST_CHUNK)
        return -(-length // CACHE_STEP) * CACHE_STEP

    @property
    def kv_slots(self) -> int:
        """Of all requests together."""
        return self.max_batch_size * self.cache_length

    @property
    def kv_layout(self) -> str:
        return f"{self.max_batch_size} requests of {self.cache_length} slots"

    def profiles(self, network: Network, shard: Shard) -> list[Profile]:
        """Prefill of one request, and verify steps (or draft blocks) of several.

        TensorRT-RTX 1.7 fails on attention of one request (always one) whose rows are never
        more than 64, so every profile allows two requests or more rows than that.
        """
        batch = (1, 1, max(2, self.max_batch_size))
        if network.name == "drafter_block":
            # A block of one drafts nothing, but rows that are always one do not build.
            block, outputs = self.block_size, max(1, self.block_size - 1)
            rows = (block, block, max(2, block))
            sizes = {BATCH: batch, ROWS: rows, OUTPUTS: (outputs,) * 3}
            return [Profile("block", sizes)]
        chunk = max(LEAST_CHUNK, min(self.max_chunk, self.max_seq_len))
        # Nor does it fuse attention of rows that are always one.
        rows = (1, self.verify_width, max(2, self.max_verify_width))
        prefill = {BATCH: (1, 1, 1), ROWS: (1, max(1, chunk // 2), chunk), OUTPUTS: (1, 1, 1)}
        return [
            Profile("prefill", prefill),
            Profile("verify", {BATCH: batch, ROWS: rows, OUTPUTS: rows}),
        ]


Sizes = EngineSizes | PagedSizes


def encoding(options: BuildOptions, rank: int) -> Encoding:
    """How this build stores weights on ``rank``."""
    return Encoding(weights_in_fp4(options.sm), Shard(rank, options.tp))


def check(options: BuildOptions, networks: Mapping[str, Network]) -> None:
    """Refuse what TensorRT or the SMs cannot do, before any weight is read.

    Raises:
        OptionError: names the option and what to do.
        NetworkError: a weight does not divide among the ranks.
    """
    if options.activations == "float32":
        raise OptionError(
            f"activations float32: backend {options.backend} computes in bf16; "
            "pass --activations bf16 or nvfp4"
        )
    if options.attention == "plugin":
        _check_plugin(options, networks)
    if options.tree == "static":
        raise OptionError(
            f"tree static: calibrating it runs the engine, which backend {options.backend} "
            "does not do while building; pass --tree dynamic"
        )
    without = [sm for sm in options.sm if not weights_in_fp4([sm])]
    quantized = {w.activations for n in networks.values() for w in n.weights.values()}
    if without and "nvfp4" in quantized:
        raise OptionError(
            f"sm {without[0]}: has no FP4, and the checkpoint wants NVFP4 activations; "
            "pass --activations bf16"
        )
    for network in networks.values():
        for op in network.ops:
            if op.kind == "top_k_log_probs" and op.attrs["k"] > MAX_TOP_K:
                raise OptionError(f"top_k {op.attrs['k']}: TensorRT offers at most {MAX_TOP_K}")
            native = options.attention == "native"
            if op.kind == "index_select" and native and op.attrs["top_k"] > MAX_TOP_K:
                raise OptionError(
                    f"{op.name}: the checkpoint's index_topk is {op.attrs['top_k']}, TensorRT "
                    f"offers at most {MAX_TOP_K}; pass --backend cpu or reference"
                )
        constant_bytes(network, encoding(options, 0))


def _check_plugin(options: BuildOptions, networks: Mapping[str, Network]) -> None:
    if options.backend != "tensorrt":
        raise OptionError(
            f"attention plugin: the network of {options.backend} has no plugin layers "
            "(tensorrt's has); pass --attention native"
        )
    if len(options.sm) != 1 or options.sm[0] not in SMS:
        raise OptionError(
            f"sm {', '.join(map(str, options.sm))}: an engine's plugin kernels are for one SM of "
            f"{', '.join(map(str, SMS))}; pass --sm, or --attention native"
        )
    if options.page_size > MAX_PAGE_SIZE:
        raise OptionError(
            f"page_size {options.page_size}: attention plugin takes at most {MAX_PAGE_SIZE}"
        )
    states = [state for network in networks.values() for state in network.states.values()]
    for state in states:
        if state.kind == "recurrent" and not {state.head_dim, state.value_dim} <= set(DELTA_DIMS):
            raise OptionError(
                f"attention plugin: {state.name} has keys of {state.head_dim} and values of "
                f"{state.value_dim}, its kernels take {', '.join(map(str, DELTA_DIMS))}; pass "
                "--attention native"
            )
        if state.kind == "latent" and state.head_dim % 2:
            raise OptionError(
                f"attention plugin: {state.name} has vectors of {state.head_dim}, and its commit "
                "kernel moves 32-bit words; pass --attention native"
            )
        if state.kind == "kv" and state.head_dim not in HEAD_DIMS:
            raise OptionError(
                f"attention plugin: {state.name} has heads of {state.head_dim}, its kernels take "
                f"{', '.join(map(str, HEAD_DIMS))}; pass --attention native"
            )


def rank_bytes(options: BuildOptions, networks: Mapping[str, Network], owner: Owner) -> int:
    """Weights of an owner's engines on the last rank, which has the most."""
    return sum(
        constant_bytes(network, encoding(options, options.tp - 1))
        for name, network in networks.items()
        if name.startswith(owner)
    )


def borrowed_bytes(options: BuildOptions, networks: Mapping[str, Network]) -> int:
    """Of the drafter's engines, the target's embedding and head, which they hold again."""
    return sum(
        constant_bytes(network, encoding(options, options.tp - 1), "target")
        for name, network in networks.items()
        if name.startswith("drafter")
    )


def most_rows(profiles: Sequence[Profile]) -> int:
    """Of a request in one step."""
    return max(profile.sizes[ROWS][2] for profile in profiles)


def most_padded_rows(profiles: Sequence[Profile]) -> int:
    """Of all requests of a run together, padding included."""
    return max(profile.sizes[BATCH][2] * profile.sizes[ROWS][2] for profile in profiles)


def engine_entry(
    network: str, rank: int, lowered: LoweredNetwork, profiles: Sequence[Profile]
) -> dict[str, Any]:
    """What the manifest tells the runner of one engine."""
    return {
        "network": network,
        "rank": rank,
        "profiles": [asdict(profile) for profile in profiles],
        "inputs": [asdict(binding) for binding in lowered.inputs],
        "outputs": [asdict(binding) for binding in lowered.outputs],
        "plans": [asdict(plan) for plan in lowered.plans],
        "branches": dict(lowered.branches),
    }


def build_engines(
    directory: Path,
    options: BuildOptions,
    networks: Mapping[str, Network],
    sizes: Sizes,
    checkpoint_of: Callable[[Owner], WeightReader],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Build every rank's engines into ``directory``; returns their part of the manifest.

    Raises:
        OptionError, NetworkError: as ``check``, or TensorRT refused the network.
    """
    library = load_library(options.backend)
    check_sms(library, options.sm, present_sm())
    engines = {
        f"{FILES[network.name]}.rank{rank}.{SUFFIX}": (network, rank)
        for rank in range(options.tp)
        for network in networks.values()
    }
    return {
        "library": library.backend,
        "version": library.version,
        "weights": "fp4" if weights_in_fp4(options.sm) else "int8",
        "attention": options.attention,
        "cache_length": sizes.cache_length,
        "engines": {
            file: _build(
                directory / file, library, options, network, rank, sizes, checkpoint_of, progress
            )
            for file, (network, rank) in engines.items()
        },
    }


def _build(
    path: Path,
    library: Library,
    options: BuildOptions,
    network: Network,
    rank: int,
    sizes: Sizes,
    checkpoint_of: Callable[[Owner], WeightReader],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Build one engine; returns its entry in the manifest."""
    how = encoding(options, rank)
    staged = path.with_suffix(".weights")
    profiles = sizes.profiles(network, how.shard)
    paged = None
    if isinstance(sizes, PagedSizes):
        paged = paged_lowering(sizes, load_plugins(library), network, how.shard)
    try:
        weights = stage(staged, network, how, checkpoint_of, progress)
        messages = BuildMessages()
        logger = messages.logger(library.module)
        builder = library.module.Builder(logger)
        lowered = lower(
            library.module,
            builder,
            network,
            how,
            weights,
            sizes.cache_length,
            paged,
            max_rows=most_rows(profiles),
        )
        compile_engine(
            library,
            builder,
            messages,
            lowered,
            profiles,
            options.sm,
            path,
            plugins=paged is not None,
        )
    finally:
        staged.unlink(missing_ok=True)
    inspection = inspect_engine(path, lowered.definition.num_layers, messages.notes)
    quantized = {w.activations for w in network.weights.values() if w.kind == "nvfp4"}
    inspection.check(
        path.name,
        fused_weights=quantized == {"nvfp4"},
        attention=paged is None and any(op.kind == "tree_attention" for op in network.ops),
    )
    return engine_entry(network.name, rank, lowered, profiles) | inspection.manifest()
