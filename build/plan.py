"""Memory of an engine per rank, and the sizes of its trees."""

from trtree.build.builder import EngineDescription
from trtree.build.network.network import State


def kv_bytes_per_token(description: EngineDescription) -> int:
    """KV of all layers, target and drafter, in bytes per token."""
    states = {s.name: s for n in description.networks.values() for s in n.states.values()}
    return sum(_state_bytes(state) for state in states.values())


def memory_plan(description: EngineDescription) -> list[tuple[str, str]]:
    """Rows of a table: what, and how much of it."""
    options = description.options
    tokens = options.num_pages * options.page_size
    kv = tokens * kv_bytes_per_token(description)
    weights = {owner: description.weight_bytes(owner) for owner in description.owners()}
    rows = [(f"{owner} weights", _bytes(size)) for owner, size in weights.items()]
    rows.append((f"KV, {tokens} tokens in pages of {options.page_size}", _bytes(kv)))
    rows.append(("total", _bytes(sum(weights.values()) + kv)))
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


def _state_bytes(state: State) -> int:
    element = {"float32": 4, "bfloat16": 2, "int32": 4}[state.dtype]
    return 2 * state.heads * state.head_dim * element


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1024:.1f} KiB"
