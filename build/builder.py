"""Checkpoint -> network -> engine directory."""

import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trtree.build import models, text_files
from trtree.build.checkpoint import (
    Checkpoint,
    CheckpointError,
    dflash_config,
    headers,
    speculators,
)
from trtree.build.checkpoint.dflash_config import DrafterConfig
from trtree.build.checkpoint.patterns import left_out, matcher
from trtree.build.engine_dir import (
    GENERATION_CONFIG,
    TOKENIZER,
    TREE_TABLES,
    EngineDirWriter,
    writing,
)
from trtree.build.kv_cache import KvCache, decide
from trtree.build.lowering import LOWERINGS
from trtree.build.lowering.division import Shard
from trtree.build.lowering.shard import RankNetworks, shard_networks
from trtree.build.lowering.tensorrt import backend as tensorrt
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.weights import WeightPlan, plan_weights
from trtree.build.models import dflash
from trtree.build.models.qwen3 import Qwen3Config
from trtree.build.network.graph import Graph
from trtree.build.network.network import ITEM_BYTES, DType, Network, Owner, State
from trtree.build.options import BuildOptions, OptionError
from trtree.build.quantization_record import quantization_record, warn_of_differences
from trtree.build.source import BuildSource, CheckpointSource, ConfigSource, SourceWithWeights

log = logging.getLogger(__name__)

# A drafter's layers are Qwen3's.
_DRAFTER_BIASED = models.FAMILIES["Qwen3ForCausalLM"].biased
# What a checkpoint may bring beside weights that generation needs.
_TOKENIZER_FILES = (text_files.TOKENIZER_FILE, text_files.TOKENIZER_CONFIG, "chat_template.jinja")


@dataclass(frozen=True)
class EngineDescription:
    """Everything about an engine but its weights' bytes."""

    options: BuildOptions
    source: BuildSource
    target: Qwen3Config
    drafter: DrafterConfig | None
    networks: dict[str, Network]
    weights: WeightPlan
    kv_cache: KvCache
    block_size: int  # 0 without a drafter
    top_k: int  # ranks per depth the drafter reports; 0 without one
    max_seq_len: int

    @property
    def activations(self) -> str:
        """What NVFP4 linears round their inputs to; "none" if there are none."""
        found = {w.activations for w in self.weights.stored.values() if w.activations}
        return "+".join(sorted(found)) or "none"

    @property
    def quantization(self) -> dict[str, Any]:
        """By owner, how its checkpoint is quantized; see ``quantization_record``."""
        stored = self.weights.stored.values()
        return {owner: quantization_record(self.source, owner, stored) for owner in self.owners()}

    @property
    def kv_cache_summary(self) -> str:
        """One line: how the target's KV cache is stored, and why."""
        return self.kv_cache.summary(self.networks["target"])

    def owners(self) -> list[Owner]:
        return ["target", "drafter"] if self.drafter else ["target"]

    def weight_bytes(self, owner: Owner) -> int:
        """Weights of an owner's networks on the last rank, which has the most."""
        if self.options.on_tensorrt:
            return tensorrt.rank_bytes(self.options, self.networks, owner)
        return LOWERINGS[self.options.backend].stored_bytes(
            self.rank(self.options.tp - 1).weights, owner
        )

    def rank(self, rank: int) -> RankNetworks:
        """What one rank runs and stores; not of a TensorRT engine."""
        return shard_networks(self.networks, self.weights, Shard(rank, self.options.tp))

    @property
    def request_state_bytes(self) -> int:
        """Recurrent state and convolution windows that a request keeps on one rank, whatever
        its length."""
        shard = Shard(0, self.options.tp)
        states: dict[str, State] = {}
        for network in self.networks.values():
            branching = [state for state in network.states.values() if not state.paged]
            states |= {state.name: shard.state(state) for state in branching}
        return sum(math.prod(s.shape) * ITEM_BYTES[s.dtype] for s in states.values())

    @property
    def num_snapshots(self) -> int:
        """Places for snapshots of that state."""
        return self.options.num_snapshots if self.request_state_bytes else 0

    @property
    def engine_sizes(self) -> tensorrt.Sizes:
        """What TensorRT engines of this description are built for."""
        if self.options.paged_kv:
            return PagedSizes(
                sm=self.options.sm[0],
                page_size=self.options.page_size,
                num_pages=self.options.num_pages,
                max_requests=self.options.max_batch_size,
                max_rows=self.options.max_num_rows,
                max_seq_len=self.max_seq_len,
                verify_width=self.options.verify_width if self.drafter else 1,
                max_verify_width=1 + self.options.largest_budget if self.drafter else 1,
                block_size=self.block_size,
            )
        return tensorrt.EngineSizes(
            max_batch_size=self.options.max_batch_size,
            max_chunk=self.options.max_num_rows,
            verify_width=self.options.verify_width if self.drafter else 1,
            max_verify_width=1 + self.options.largest_budget if self.drafter else 1,
            block_size=self.block_size,
            max_seq_len=self.max_seq_len,
        )


def describe(options: BuildOptions) -> EngineDescription:
    """Open the checkpoints and describe the networks; reads headers, and what must be equal.

    Raises:
        CheckpointError, NetworkError, OptionError: one line that names the file, tensor
            or option at fault.
    """
    source = CheckpointSource.open(options)
    drafter = None
    if source.drafter:
        drafter = dflash_config.read_drafter(source.drafter)
        speculators.check_copies(source.drafter, source.target)
    description = describe_source(options, source, drafter)
    if layer := headers.scaled_for_one_expert(source.target.names(), source.target.quantization):
        log.warning(
            "%s: the vector of its shared expert is in the norm before, which the router and the "
            "other experts read as well, and those were exported as if it were not: so ModelOpt "
            "0.47 writes NVFP4_AWQ; expect answers to suffer, and prefer NVFP4 or NVFP4_SVD",
            layer,
        )
    for owner in description.owners():
        check_coverage(description, owner, source.checkpoint(owner))
        _check_biases(description, owner)
    vocab_size = description.target.vocab_size
    text_files.check_tokenizer(options.checkpoint, vocab_size)
    text_files.generation_config(options.checkpoint, source.target.config, vocab_size)
    return description


def plan(options: BuildOptions, *, assume_drafter: bool = False) -> EngineDescription:
    """Describe the engine from configuration files alone; weights need not be there.

    assume_drafter: with a drafter of the usual shape (``dflash_config.usual_shape``), for
    targets that none is published for.

    Raises: as ``describe``.
    """
    source = ConfigSource.open(options)
    drafter = None
    file = (options.drafter or Path("the assumed drafter")) / "config.json"
    if assume_drafter:
        if options.drafter:
            raise OptionError(f"assume_drafter: the drafter is {options.drafter}; leave one out")
        shape = dflash_config.usual_shape(source.config("target"))
        source = source.with_drafter(shape, quantized=options.quantize_drafter is not None)
    if options.drafter or assume_drafter:
        drafter = dflash_config.parse(source.config("drafter"), file)
    return describe_source(options, source, drafter)


def describe_source(
    options: BuildOptions,
    source: BuildSource,
    drafter: DrafterConfig | None,
) -> EngineDescription:
    """Describe the engine over any weight source; ``describe`` and ``plan`` end here.

    Raises: as ``describe``.
    """
    config = source.config("target")
    family = models.family_of(config, options.checkpoint / "config.json")
    target = family.parse(config)
    if drafter:
        drafter.check_target(config)
    top_k = _top_k(options, drafter.draft_vocab or target.vocab_size) if drafter else 0

    dtype: DType = tensorrt.DTYPE if options.on_tensorrt else "float32"
    kv_cache = decide(options, source, dtype)
    graph = Graph("target", source, dtype=dtype, kv_scales=kv_cache.graph_scales)
    family.build(graph, target, drafter.target_layer_ids if drafter else ())
    networks = {"target": graph.network}
    if drafter:
        layers = dflash.DFlashConfig(
            Qwen3Config.from_dict(drafter.transformer),
            len(drafter.target_layer_ids),
            drafter.causal,
            drafter.draft_vocab,
        )
        context = Graph("drafter_context", source, dtype=dtype, owner="drafter")
        dflash.build_context(context, layers)
        block = Graph("drafter_block", source, dtype=dtype, owner="drafter")
        dflash.build_block(block, layers, target, top_k)
        networks |= {"drafter_context": context.network, "drafter_block": block.network}
    if options.on_tensorrt:
        tensorrt.check(options, networks)
    description = EngineDescription(
        options=options,
        source=source,
        target=target,
        drafter=drafter,
        networks=networks,
        weights=plan_weights(networks.values()),
        kv_cache=kv_cache.checked(graph.network, config),
        block_size=_block_size(options, drafter),
        top_k=top_k,
        max_seq_len=_max_seq_len(options, target.max_position_embeddings),
    )
    _check_activations(description)
    if not options.on_tensorrt:
        for rank in range(options.tp):
            description.rank(rank)  # refuses what does not divide
    return description


def _check_activations(description: EngineDescription) -> None:
    """What is asked for must round something: dense weights take their inputs as they are."""
    asked = description.options.activations
    if asked is None or description.activations != "none":
        return
    what = f"activations {asked}: no linear of {description.options.checkpoint} is NVFP4"
    if asked == "nvfp4":
        raise OptionError(
            f"{what}, so no input can be rounded; leave the option out, or use a checkpoint that "
            "is NVFP4"
        )
    log.warning("%s: the option has no effect", what)


def write(
    description: EngineDescription,
    *,
    force: bool = False,
    calibrate: Callable[[Path], dict[str, Any]] | None = None,
    add_files: Callable[[Path, dict[str, Any], dict[str, Any] | None], None] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write the engine directory and return its path.

    Args:
        calibrate: makes the static tree's tables from the otherwise finished directory.
        add_files: told the directory, the manifest and the tables, adds files of its own.
        progress: told the weight bytes written since it was last called.
    """
    options, source = description.options, description.source
    for owner, record in description.quantization.items():
        warn_of_differences(record, owner)
    if description.kv_cache.why and options.kv_cache == "auto":
        log.warning("target: KV cache in %s", description.kv_cache_summary)
    if not isinstance(source, SourceWithWeights):
        raise TypeError("a description made by plan() has no weights to write")
    key = resume_key(description) if options.backend == "cpu" else None
    with writing(options.output, force=force, key=key) as out:
        manifest = manifest_of(description) | _write_weights(out, description, source, progress)
        out.networks(description.networks)
        _write_text_files(out, description)
        tables = None
        if calibrate:
            out.finish(manifest)
            tables = calibrate(out.path)
            out.json(TREE_TABLES, tables)
        if add_files:
            add_files(out.path, manifest, tables)
        out.finish(manifest)
    return options.output


def resume_key(description: EngineDescription) -> str:
    """Stands for the options, versions and checkpoint files that decide an engine's bytes."""
    options = description.options
    files = [
        (str(file), *_size_and_time(file))
        for directory in (options.checkpoint, options.drafter)
        for file in sorted(directory.glob("*") if directory else ())
    ]
    weights = [repr(weight) for weight in description.weights.stored.values()]
    facts = [repr(options), _builder_versions(), files, weights]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]


def _size_and_time(file: Path) -> tuple[int, int]:
    """Zeros where there is nothing: a link of a download that left a file out."""
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _write_weights(
    out: EngineDirWriter,
    description: EngineDescription,
    source: SourceWithWeights,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """The backend's own files; returns what its manifest says beside the usual."""
    options = description.options
    if options.on_tensorrt:
        built = tensorrt.build_engines(
            out.path,
            options,
            description.networks,
            description.engine_sizes,
            source.checkpoint,
            progress,
        )
        return {"sm": list(options.sm), "tensorrt": built}
    checkpoints = {owner: source.checkpoint(owner) for owner in description.owners()}
    ranks = [description.rank(index) for index in range(options.tp)]
    LOWERINGS[options.backend].write_files(out, ranks, checkpoints, progress)
    return {}


def _block_size(options: BuildOptions, drafter: DrafterConfig | None) -> int:
    if drafter is None:
        return 0
    if options.block_size is not None and options.block_size > drafter.block_size:
        raise OptionError(
            f"block_size {options.block_size} is above the drafter's {drafter.block_size}"
        )
    size = options.block_size or drafter.block_size
    if options.tree == "static" and size < 2:
        raise OptionError(f"tree static: a block_size of {size} drafts nothing; raise it")
    return size


def _top_k(options: BuildOptions, vocab_size: int) -> int:
    if options.top_k is not None and options.top_k > vocab_size:
        raise OptionError(
            f"top_k {options.top_k} is above the {vocab_size} tokens that are drafted from"
        )
    return options.top_k or max(1, min(options.largest_budget, vocab_size))


def _max_seq_len(options: BuildOptions, model_limit: int) -> int:
    if options.max_seq_len is not None and options.max_seq_len > model_limit:
        raise OptionError(
            f"max_seq_len {options.max_seq_len} is above the model's "
            f"max_position_embeddings {model_limit}"
        )
    if not options.paged_kv:
        # Every request owns its part of the cache.
        share = options.kv_tokens // options.max_batch_size
        if options.max_seq_len is None and share < 2:
            raise OptionError(
                f"kv_tokens {options.kv_tokens} leave {share} tokens to each of "
                f"max_batch_size {options.max_batch_size} requests; raise kv_tokens"
            )
        return min(options.max_seq_len or share, model_limit)
    return min(options.max_seq_len or model_limit, options.num_pages * options.page_size)


def check_coverage(description: EngineDescription, owner: Owner, checkpoint: Checkpoint) -> None:
    """Every tensor of the checkpoint is part of a network, or known not to be.

    Raises:
        CheckpointError: naming those that are neither.
    """
    modules = {
        module
        for weight in description.weights.stored.values()
        if weight.owner == owner
        for module in weight.modules
    }
    unused = left_out(checkpoint.config)
    for pattern in unused:
        expression = matcher([pattern])
        if count := sum(expression.fullmatch(name) is not None for name in checkpoint.names()):
            what = "the vision model" if "visual" in pattern else "a prediction layer"
            log.info("%s: %d tensors of %s are left out", pattern, count, what)
    # A tied head that a checkpoint stores all the same is the embedding again.
    if owner == "drafter":
        ignored = speculators.ignored_tensors(checkpoint)
    else:
        ignored = ["lm_head.weight"] if description.target.tie_word_embeddings else []
    checkpoint.check_coverage(modules, [*unused, *ignored])


def _check_biases(description: EngineDescription, owner: Owner) -> None:
    """``attention_bias`` says whether attention's linears have biases (which of them, the
    family says); no other linear has one."""
    config = description.source.config(owner)
    stated = bool(config.get("attention_bias"))
    biased = models.family_of(config).biased if owner == "target" else _DRAFTER_BIASED
    for weight in description.weights.stored.values():
        if weight.owner != owner or len(weight.shape) == 1:
            continue
        for module in weight.modules:
            expected = stated and ".self_attn." in module and module.endswith(biased)
            if weight.has_bias != expected:
                found = "is there" if weight.has_bias else "is missing"
                raise CheckpointError(
                    f"{owner}: tensor {module}.bias {found}, but config.json has "
                    f"attention_bias {str(stated).lower()}; one of the two is wrong"
                )


def _write_text_files(out: EngineDirWriter, description: EngineDescription) -> None:
    checkpoint = description.options.checkpoint
    for name in _TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            out.copy(checkpoint / name, f"{TOKENIZER}/{name}")
    config = description.source.config("target")
    vocab_size = description.target.vocab_size
    out.json(GENERATION_CONFIG, text_files.generation_config(checkpoint, config, vocab_size))


def manifest_of(description: EngineDescription) -> dict[str, Any]:
    """The manifest but for what only the finished files tell."""
    options = description.options
    return {
        "builder": _builder_versions(),
        "backend": options.backend,
        "sm": None,
        "pretrained_config": dict(description.source.config("target")),
        "build_config": {
            "activations": description.activations,
            "quantization": description.quantization,
            "dtype": description.networks["target"].dtype,
            "kv_cache": description.kv_cache.manifest(),
            "page_size": options.page_size,
            "num_pages": options.num_pages,
            "max_batch_size": options.max_batch_size,
            "max_num_rows": options.max_num_rows,
            "max_seq_len": description.max_seq_len,
            "request_state_bytes": description.request_state_bytes,
            "state_snapshots": description.num_snapshots,
        },
        "mapping": {"world_size": options.tp, "tp_size": options.tp},
        "speculative_config": _speculative_config(description),
    }


def _speculative_config(description: EngineDescription) -> dict[str, Any] | None:
    if description.drafter is None:
        return None
    options = description.options
    return {
        "drafter": dict(description.drafter.transformer),
        "mask_token_id": description.drafter.mask_token_id,
        "target_layer_ids": list(description.drafter.target_layer_ids),
        "layer_ids_read_as": description.drafter.layer_ids_read_as,
        "block_size": description.block_size,
        "tree": options.tree,
        "tree_budget": options.tree_budget,
        "verify_width": options.verify_width,
        "max_tree_budget": options.largest_budget,
        "max_verify_width": 1 + options.largest_budget,
        "top_k": description.top_k,
    }


def _builder_versions() -> dict[str, str]:
    packages = ("trtree", "torch", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
