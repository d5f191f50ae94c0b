"""Memory of an engine per rank, and the sizes of its trees."""

from collections.abc import Mapping
from typing import Any

from trtree.build.builder import EngineDescription
from trtree.build.hardware import Hardware
from trtree.build.lowering.division import Division, Shard
from trtree.build.lowering.tensorrt.backend import encoding, most_padded_rows
from trtree.build.lowering.tensorrt.memory import kv_bytes, workspace
from trtree.build.network.network import Network
from trtree.build.text_files import size_text

_KV = "KV"


def kv_bytes_per_token(description: EngineDescription) -> int:
    """KV of all layers, target and drafter, on one rank, in bytes per token."""
    shard = Shard(0, description.options.tp)
    states = {
        state.name: Division(network, shard).state(state).token_bytes
        for network in description.networks.values()
        for state in network.states.values()
        if state.paged
    }
    return sum(states.values())


def step_state_bytes_per_row(network: Network) -> int:
    """What a step keeps of each of its rows until commit, for state that branches: a
    convolution's input, a recurrence's key, update and decay."""
    total = 0
    for op in network.ops:
        shapes = [network.tensors[name].shape for name in op.inputs]
        if op.kind == "causal_conv":
            total += int(shapes[0][1])
        elif op.kind == "gated_delta_net":
            _, k, v = shapes[:3]
            total += int(k[1]) * int(k[2]) + int(v[1]) * int(v[2]) + int(v[1])
    return 4 * total


def memory_plan(
    description: EngineDescription, hardware: Hardware | None = None
) -> list[tuple[str, str]]:
    """Rows of a table for one rank: what, and how much of it."""
    options = description.options
    sizes = _sizes(description)
    total = sum(size for _, size in sizes)
    rows = [(name, size_text(size)) for name, size in sizes]
    rows.append(("total", size_text(total)))
    if hardware:
        rows.append((f"memory of {hardware.name}", size_text(hardware.memory_bytes)))
        left = hardware.memory_bytes - total
        rows.append(
            ("left", size_text(left) if left >= 0 else f"none: {size_text(-left)} too much")
        )
        rows.append(("tokens of KV that fit", f"{kv_tokens_that_fit(description, hardware)}"))
    rows.append(("type of KV", description.kv_cache_summary))
    rows.append(("a token's KV", size_text(kv_bytes_per_token(description))))
    rows += _token_rows(description)
    rows += _expert_reads(description)
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


def kv_tokens_that_fit(description: EngineDescription, hardware: Hardware) -> int:
    """How many tokens of KV, of all requests together, a GPU has room for beside all else;
    0 if that alone is too much."""
    (kv,) = (size for name, size in _sizes(description) if name.startswith(_KV))
    slots = description.engine_sizes.kv_slots
    if not description.options.on_tensorrt:
        slots = description.options.num_pages * description.options.page_size
    others = sum(size for _, size in _sizes(description)) - kv
    return max(0, hardware.memory_bytes - others) * slots // kv


def _sizes(description: EngineDescription) -> list[tuple[str, int]]:
    """What takes memory on one rank, in bytes."""
    sizes = [
        (f"{owner} weights", description.weight_bytes(owner)) for owner in description.owners()
    ]
    if description.options.on_tensorrt:
        sizes += _tensorrt_memory(description)
    else:
        sizes.append(_paged_kv(description))
    return sizes + _branch_state(description)


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
    name = f"{_KV}, {tokens} tokens in pages of {options.page_size}"
    return name, tokens * kv_bytes_per_token(description)


def _token_rows(description: EngineDescription) -> list[tuple[str, str]]:
    """What a token keeps on every rank where attention is latent: its kinds, with their bytes."""
    network = description.networks["target"]
    names = {"latent_attention": "latents", "index_select": "indexer keys"}
    states = {
        op.state: names[op.kind] for op in network.ops if op.state is not None and op.kind in names
    }
    sizes = dict.fromkeys(names.values(), 0)
    for state, kind in states.items():
        sizes[kind] += network.states[state].token_bytes
    if not states:
        return []
    parts = [f"{size_text(size)} of {kind}" for kind, size in sizes.items()]
    return [("a token keeps", f"{' and '.join(parts)}, whole on every rank")]


def _branch_state(description: EngineDescription) -> list[tuple[str, int]]:
    """State of requests that does not grow with their tokens, and what a step adds to it."""
    options = description.options
    per_request = description.request_state_bytes
    if not per_request:
        return []
    target = description.networks["target"]
    per_row = step_state_bytes_per_row(target) // options.tp
    requests, rows = options.max_batch_size, options.max_num_rows
    if options.on_tensorrt:
        rows = most_padded_rows(description.engine_sizes.profiles(target, Shard(0, options.tp)))
    table = [(f"recurrent state, {requests} x {size_text(per_request)}", requests * per_request)]
    if snapshots := description.num_snapshots:
        name = f"snapshots of it, {snapshots} x {size_text(per_request)}"
        table.append((name, snapshots * per_request))
    return [*table, (f"kept of a step, {rows} rows x {size_text(per_row)}", rows * per_row)]


def _tensorrt_memory(description: EngineDescription) -> list[tuple[str, int]]:
    """Networks run one after another and share their workspace."""
    sizes, how = description.engine_sizes, encoding(description.options, 0)
    networks = description.networks
    per_owner = [networks[name] for name in ("target", "drafter_block") if name in networks]
    kv = sum(kv_bytes(network, sizes, how) for network in per_owner)
    needs = [workspace(network, sizes, how) for network in networks.values()]
    rows = [
        (f"{_KV}, {sizes.kv_layout}", kv),
        ("activations (estimate)", max(need.activations + need.logits for need in needs)),
    ]
    if widened := max(need.widened for need in needs):
        rows.append(("widened weight (estimate)", widened))
    return rows


def _expert_reads(description: EngineDescription) -> list[tuple[str, str]]:
    """How many experts a step of one request needs in a layer, and how many are read.

    Rows are taken to choose independently and evenly: then ``rows`` of them need
    experts * (1 - (1 - top_k / experts) ** rows). Real ones agree more, and need fewer.
    """
    routings = {
        (op.attrs["experts"], op.attrs["top_k"])
        for op in description.networks["target"].ops
        if op.kind == "route"
    }
    options = description.options
    table = []
    for experts, top_k in sorted(routings):
        for rows in sorted({1, options.verify_width if description.drafter else 1}):
            needed = experts * (1 - (1 - top_k / experts) ** rows)
            read = f"{needed:.0f} of {experts} needed"
            if options.on_tensorrt:
                read += f", all are read: {experts / needed:.1f} times as much"
            table.append((f"experts per layer, {rows} row{'s' if rows > 1 else ''}", read))
    return table
