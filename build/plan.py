"""Memory of an engine per rank, and the sizes of its trees."""

from collections.abc import Mapping
from typing import Any

from trtree.build.builder import EngineDescription
from trtree.build.hardware import Hardware
from trtree.build.lowering.tensorrt.backend import encoding
from trtree.build.lowering.tensorrt.memory import kv_bytes, workspace
from trtree.build.network.network import State
from trtree.build.text_files import size_text


def kv_bytes_per_token(description: EngineDescription) -> int:
    """KV of all layers, target and drafter, in bytes per token."""
    states = {s.name: s for n in description.networks.values() for s in n.states.values()}
    return sum(_state_bytes(state) for state in states.values())


def memory_plan(
    description: EngineDescription, hardware: Hardware | None = None
) -> list[tuple[str, str]]:
    """Rows of a table for one rank: what, and how much of it."""
    options = description.options
    sizes = [
        (f"{owner} weights", description.weight_bytes(owner)) for owner in description.owners()
    ]
    sizes += _tensorrt_memory(description) if options.on_tensorrt else [_paged_kv(description)]
    total = sum(size for _, size in sizes)
    rows = [(name, size_text(size)) for name, size in sizes]
    rows.append(("total", size_text(total)))
    if hardware:
        rows.append((f"memory of {hardware.name}", size_text(hardware.memory_bytes)))
        left = hardware.memory_bytes - total
        rows.append(
            ("left", size_text(left) if left >= 0 else f"none: {size_text(-left)} too much")
        )
    rows.append(("longest request", f"{description.max_seq_len} tokens"))
    if description.drafter:
        rows.append(("tree budget", f"{options.tree_budget} nodes"))
        rows.append(("verify width", f"{options.verify_width} rows"))
        rows.append(
            ("block size", f"{description.block_size} (depth {description.block_size - 1})")
        )
        mask_words = -(-options.verify_width // 32)
        mask = options.verify_width * mask_words
        rows.append(("packed mask", f"{mask} words per request and step"))
    return rows


def engine_rows(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What finished TensorRT engines are, one row each; none for other backends."""
    engines = manifest.get("tensorrt", {}).get("engines", {})
    return [
        (
            file,
            f"{size_text(manifest['files'][file]['bytes'])}, "
            f"{size_text(entry['activation_bytes'])} of device memory beside weights and KV; "
            f"{entry['layers']} layers, {entry['fused_kernels']} fused kernels",
        )
        for file, entry in engines.items()
    ]


def _paged_kv(description: EngineDescription) -> tuple[str, int]:
    options = description.options
    tokens = options.num_pages * options.page_size
    name = f"KV, {tokens} tokens in pages of {options.page_size}"
    return name, tokens * kv_bytes_per_token(description)


def _tensorrt_memory(description: EngineDescription) -> list[tuple[str, int]]:
    """Contiguous caches; networks run one after another and share their workspace."""
    sizes, how = description.engine_sizes, encoding(description.options, 0)
    networks = description.networks
    per_owner = [networks[name] for name in ("target", "drafter_block") if name in networks]
    kv = sum(kv_bytes(network, sizes, how) for network in per_owner)
    needs = [workspace(network, sizes, how) for network in networks.values()]
    rows = [
        (f"KV, {sizes.max_batch_size} requests of {sizes.cache_length} slots", kv),
        ("activations (estimate)", max(need.activations + need.logits for need in needs)),
    ]
    if widened := max(need.widened for need in needs):
        rows.append(("widened weight (estimate)", widened))
    return rows


def _state_bytes(state: State) -> int:
    element = {"float32": 4, "bfloat16": 2, "int32": 4}[state.dtype]
    return 2 * state.heads * state.head_dim * element
