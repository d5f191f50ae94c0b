"""From an engine directory's manifest to what the engine can do."""

from collections.abc import Iterable

from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError


def capabilities_of(engine: EngineDir) -> _core.Capabilities:
    """Capabilities of an engine with paged KV."""
    build = engine.manifest["build_config"]
    speculative = engine.manifest["speculative_config"]
    c = _core.Capabilities()
    c.backend = engine.manifest["backend"]
    c.activations = build["activations"]
    c.kv_layout = _core.KvLayout.PAGED
    c.page_size = build["page_size"]
    c.num_pages = build["num_pages"]
    c.max_batch_size = build["max_batch_size"]
    c.max_num_rows = build["max_num_rows"]
    c.max_seq_len = build["max_seq_len"]
    c.recurrent_state = build["request_state_bytes"] > 0
    c.state_snapshots = build.get("state_snapshots", 0)
    c.vocab_size = engine.manifest["pretrained_config"]["vocab_size"]
    c.verify_width = speculative["max_verify_width"] if speculative else 1
    c.block_size = speculative["block_size"] if speculative else 0
    c.max_top_k = speculative["top_k"] if speculative else 0
    return c


def check_kv_cache(engine: EngineDir, stored: Iterable[str]) -> None:
    """Refuse an engine whose target keeps KV (``stored``: each cache's type) in another type
    than the manifest says.

    Raises:
        EngineDirError: names both.
    """
    said = engine.manifest["build_config"]["kv_cache"].get("stored_as")
    if others := sorted(set(stored) - {said}):
        raise EngineDirError(
            f"{engine.path}: config.json says that KV is stored as {said}, the engine's networks "
            f"store {', '.join(others)}; rebuild the engine"
        )


def check_ranks(engine: EngineDir, ranks: int) -> None:
    """Refuse to load an engine on another number of ranks than it was built for.

    Raises:
        EngineDirError: names both numbers.
    """
    built = engine.manifest["mapping"]["tp_size"]
    if built != ranks:
        raise EngineDirError(
            f"{engine.path}: built for {built} tensor-parallel ranks, loaded on {ranks}; run "
            f"mpirun -n {built} runtime/serve.py, or rebuild with --tp {ranks}"
        )
