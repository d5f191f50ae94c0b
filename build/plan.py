"""Memory of an engine per rank, the sizes of its trees, and whether it fits a machine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtree.build.builder import EngineDescription
from trtree.build.hardware import Hardware
from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt import backend as tensorrt
from trtree.build.lowering.tensorrt.memory import kv_bytes, workspace
from trtree.build.network.network import Network, NetworkError
from trtree.build.options import OptionError
from trtree.build.text_files import size_text

_KV = "KV"
# As many requests at once as are looked for.
_MOST_REQUESTS = 1 << 12


def kv_bytes_per_token(description: EngineDescription) -> int:
    """KV of all layers, target and drafter, on one rank, in bytes per token."""
    shard = Shard(0, description.options.tp)
    states = {
        state.name: shard.state(state).token_bytes
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
    rows = []
    for name, size in sizes:
        rows.append((name, size_text(size)))
        rows += _of_it(description, name)
    total = sum(size for _, size in sizes)
    rows.append(("total", size_text(total)))
    if hardware:
        rows.append((f"memory of {hardware.name}", size_text(hardware.memory_bytes)))
        left = hardware.memory_bytes - total
        rows.append(
            ("left", size_text(left) if left >= 0 else f"none: {size_text(-left)} too much")
        )
        rows += _verdict(description, hardware, total)
    rows.append(("type of KV", description.kv_cache_summary))
    rows.append(("a token's KV", size_text(kv_bytes_per_token(description))))
    rows += _token_rows(description)
    rows += _expert_reads(description)
    rows.append(("longest request", f"{description.max_seq_len:,} tokens"))
    if description.drafter:
        rows.append(("tree budget", f"{options.tree_budget} nodes"))
        rows.append(("verify width", f"{options.verify_width} rows"))
        rows.append(
            ("block size", f"{description.block_size} (depth {description.block_size - 1})")
        )
    return rows


def _verdict(
    description: EngineDescription, hardware: Hardware, total: int
) -> list[tuple[str, str]]:
    """Whether it fits, with how much KV, and on how few GPUs it would."""
    options = description.options
    tokens = kv_tokens_that_fit(description, hardware)
    requests = requests_that_fit(description, hardware)
    most = f"{requests:,} requests of {description.max_seq_len:,} tokens at once"
    flags = f"--max-batch-size {requests}"
    if options.max_seq_len is None and not options.paged_kv:  # else it would follow the batch
        flags += f" --max-seq-len {description.max_seq_len}"
    if total <= hardware.memory_bytes:
        fits = (
            f"yes: with {tokens:,} tokens of KV for {options.max_batch_size} requests together, or "
            f"with {most} ({flags})"
        )
    elif options.paged_kv and tokens:
        fits = f"no; with --kv-tokens {tokens} it would"
    elif requests:
        fits = f"no; {most} would: {flags}"
    else:
        fits = f"no, not even one request of {description.max_seq_len:,} tokens"
    least = least_tp(description, hardware)
    return [
        ("fits", fits),
        ("least --tp that fits", f"{least}" if least else f"none up to {hardware.gpus}"),
    ]


def requests_that_fit(description: EngineDescription, hardware: Hardware) -> int:
    """How many requests of ``max_seq_len`` tokens a GPU has room for at once, with the
    activations and states of so many; 0 if for none, 4096 if for more than that."""
    weights = sum(size for _, size in _weights(description))

    def fits(requests: int) -> bool:
        states = _beside_weights(_of_requests(description, requests))
        return weights + sum(size for _, size in states) <= hardware.memory_bytes

    low, high = 0, 1
    while high <= _MOST_REQUESTS and fits(high):
        low, high = high, 2 * high
    while low < _MOST_REQUESTS and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def least_tp(description: EngineDescription, hardware: Hardware) -> int | None:
    """The fewest ranks, of powers of two, on whose GPUs this build fits; None if too few."""
    tp = 1
    while tp <= hardware.gpus:
        try:
            options = description.options.with_changes({"tp": tp})
            divided = replace(description, options=options)
            if options.on_tensorrt:
                tensorrt.check(options, description.networks)
            if sum(size for _, size in _sizes(divided)) <= hardware.memory_bytes:
                return tp
        except (NetworkError, OptionError):  # does not divide
            pass
        tp *= 2
    return None


def _of_requests(description: EngineDescription, requests: int) -> EngineDescription:
    """The same engine for so many requests of ``max_seq_len`` tokens at once."""
    changes = {"max_batch_size": requests}
    options = description.options
    if options.paged_kv:
        width = 1 + options.largest_budget if description.drafter else 1
        tokens = description.max_seq_len + max(width, description.block_size)
        changes["kv_tokens"] = requests * -(-tokens // options.page_size) * options.page_size
    return replace(description, options=options.with_changes(changes))


def kv_tokens_that_fit(description: EngineDescription, hardware: Hardware) -> int:
    """How many tokens of KV, of all requests together, a GPU has room for beside all else;
    0 if that alone is too much."""
    sizes = _sizes(description)
    (kv,) = (size for name, size in sizes if name.startswith(_KV))
    slots = description.engine_sizes.kv_slots
    if not description.options.on_tensorrt:
        slots = description.options.num_pages * description.options.page_size
    others = sum(size for _, size in sizes) - kv
    return max(0, hardware.memory_bytes - others) * slots // kv


def _sizes(description: EngineDescription) -> list[tuple[str, int]]:
    """What takes memory on one rank, in bytes."""
    return [*_weights(description), *_beside_weights(description)]


def _weights(description: EngineDescription) -> list[tuple[str, int]]:
    return [(f"{owner} weights", description.weight_bytes(owner)) for owner in description.owners()]


def _beside_weights(description: EngineDescription) -> list[tuple[str, int]]:
    if description.options.on_tensorrt:
        sizes = _tensorrt_memory(description)
    else:
        sizes = [_paged_kv(description)]
    return sizes + _branch_state(description)


def _of_it(description: EngineDescription, name: str) -> list[tuple[str, str]]:
    """What of a size would surprise: a drafter's part."""
    options, networks = description.options, description.networks
    if not options.on_tensorrt or not description.drafter:
        return []
    if name == "drafter weights":
        borrowed = tensorrt.borrowed_bytes(options, networks)
        return [("  of it copied from the target", size_text(borrowed))]
    if name.startswith(_KV):
        drafter = networks["drafter_block"]
        context = kv_bytes(drafter, description.engine_sizes, tensorrt.encoding(options, 0))
        return [("  of it for the drafter", size_text(context))]
    return []


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
        rows = tensorrt.most_padded_rows(
            description.engine_sizes.profiles(target, Shard(0, options.tp))
        )
    table = [(f"recurrent state, {requests} x {size_text(per_request)}", requests * per_request)]
    if snapshots := description.num_snapshots:
        name = f"snapshots of it, {snapshots} x {size_text(per_request)}"
        table.append((name, snapshots * per_request))
    return [*table, (f"kept of a step, {rows} rows x {size_text(per_row)}", rows * per_row)]


def _tensorrt_memory(description: EngineDescription) -> list[tuple[str, int]]:
    """Networks run one after another and share their workspace."""
    sizes, how = description.engine_sizes, tensorrt.encoding(description.options, 0)
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
