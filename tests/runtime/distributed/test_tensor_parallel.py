"""Promise 1 over ranks: logits, drafts and text are, byte for byte, those of one rank."""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding import run
from engines import DEMO_VOCAB, ROOT, random_checkpoint, tiny_config
from random_drafter import random_drafter
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config, qwen3_moe_config
from speculators_format import reduced, write_speculators
from steps import prefill, random_tree, run_rows
from thread_ranks import ThreadRanks
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions, OptionError, read_options
from trtree.build.plan import memory_plan
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    DecodingMode,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SpeculativeConfig,
)

PAGES = list(range(16))
PLAIN = SpeculativeConfig(DecodingMode.PLAIN)
KEY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}


def load(path: Path) -> _core.Engine:
    engine = EngineDir.open(path)
    if engine.manifest["mapping"]["tp_size"] == 1:
        return load_cpu_engine(engine, num_threads=1)
    return ThreadRanks(engine)


def transcript(engine: _core.Engine, vocab: int) -> list[bytes]:
    """A prompt, a tree, a commit of a path of it, a draft and a tree again: every result. State
    beside KV is saved on the way, and loaded to another slot."""
    rng = random.Random(3)
    results = []

    def keep(*arrays: np.ndarray) -> None:
        results.extend(np.ascontiguousarray(array).tobytes() for array in arrays)

    at = _core.Sequence(2**40 + 1, 1, 0, PAGES)
    keep(prefill(engine, at, [rng.randrange(vocab) for _ in range(21)]))
    committed = 21
    for nodes in (33, 5):
        at = _core.Sequence(2**40 + 1, 1, committed, PAGES)
        if engine.capabilities().block_size > 1:
            drafted = engine.draft([_core.DraftRequest(at, 7)], 8)
            keep(drafted.log_probs, drafted.token_ids)
        tokens, parents = random_tree(rng, nodes, vocab)
        keep(*run_rows(engine, [(at, tokens, parents)]))
        path = [0, *(row for row, parent in enumerate(parents) if parent == 0)][:2]
        saves = [_core.StateSave(1, 2)] if engine.capabilities().state_snapshots else []
        engine.commit([_core.Commit(at, path, saves=saves)])
        committed += len(path)
    if engine.capabilities().state_snapshots:
        engine.load_state(2, 3)
        at = _core.Sequence(9, 3, committed - 1, PAGES)
        keep(*run_rows(engine, [(at, [5, 6], [-1, 0])]))
    return results


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A target of random weights that divides among 4 ranks, by quantization and ranks."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def build(algorithm: str | None, tied: bool, bias: bool, tp: int) -> Path:
        name = f"{algorithm}-{tied}-{bias}"
        checkpoint = root / name
        if not checkpoint.exists():
            config = tiny_config(
                num_key_value_heads=4,
                intermediate_size=128,
                tie_word_embeddings=tied,
                attention_bias=bias,
                vocab_size=81,  # tiles are not shared evenly, and the last one is cut
            )
            random_checkpoint(checkpoint, config, algorithm=algorithm)
        return builder.write(
            builder.describe(
                BuildOptions(
                    checkpoint=checkpoint,
                    output=root / f"{name}-tp{tp}",
                    kv_tokens=256,
                    max_seq_len=256,
                    tp=tp,
                )
            )
        )

    return build


@pytest.mark.parametrize(
    ("algorithm", "tied", "bias"),
    [
        ("NVFP4", False, False),
        ("W4A16_NVFP4", True, True),
        ("NVFP4_AWQ", False, True),
        ("NVFP4_SVD", False, True),
        (None, False, True),
        (None, True, False),
    ],
)
def test_every_number_of_ranks_gives_the_same_bits(
    tiny_engine: Callable[..., Path], algorithm: str | None, tied: bool, bias: bool
) -> None:
    one, two, four = (
        transcript(load(tiny_engine(algorithm, tied, bias, tp)), 81) for tp in (1, 2, 4)
    )
    assert one == two
    assert one == four


def with_a_drafter(
    root: Path, config: dict[str, Any], algorithm: str | None, drafter_sizes: dict[str, int]
) -> Callable[[int], Path]:
    """Engines of random weights by number of ranks."""
    target = random_checkpoint(root / "target", config, algorithm=algorithm)
    drafter = random_drafter(root / "drafter", config, **drafter_sizes)

    def built(tp: int) -> Path:
        options = BuildOptions(
            checkpoint=target, drafter=drafter, output=root / f"tp{tp}", kv_tokens=512, tp=tp
        )
        return builder.write(builder.describe(options))

    return built


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_SVD", None])
@pytest.mark.parametrize(
    "config",
    [
        qwen3_moe_config,
        glm4_moe_config,
        partial(hybrid_config, "Qwen3NextForCausalLM", **KEY_HEADS),
        partial(hybrid_config, "Qwen3_5MoeForCausalLM", **KEY_HEADS),
        glm5_config,
    ],
)
def test_experts_and_a_drafter_on_every_number_of_ranks(
    tmp_path: Path, config: Callable[..., dict[str, Any]], algorithm: str | None
) -> None:
    sizes = {"num_key_value_heads": 4, "intermediate_size": 128}
    described = config(moe_intermediate_size=64, vocab_size=81, **sizes)
    built = with_a_drafter(tmp_path, described, algorithm, sizes)
    one, two, four = (transcript(load(built(tp)), 81) for tp in (1, 2, 4))
    assert len(one) == (8 if "linear_num_key_heads" in described else 7)
    assert one == two
    assert one == four


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", None])
@pytest.mark.parametrize("config", [qwen3_moe_config, glm4_moe_config])
def test_what_does_not_divide_evenly_is_divided_by_blocks(
    tmp_path: Path, config: Callable[..., dict[str, Any]], algorithm: str | None
) -> None:
    """As the public models on 8 ranks: KV heads are fewer than ranks, and widths are odd
    numbers of blocks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 208}
    described = config(moe_intermediate_size=144, vocab_size=137, **sizes)
    built = with_a_drafter(tmp_path, described, algorithm, sizes)
    one = transcript(load(built(1)), 137)
    for tp in (2, 4, 8):
        assert transcript(load(built(tp)), 137) == one, tp


def test_heads_are_divided_and_latents_are_not(tmp_path: Path) -> None:
    """And a head that is cut in two is refused."""
    described = glm5_config(intermediate_size=128, moe_intermediate_size=64)
    target = random_checkpoint(tmp_path / "target", described, algorithm="NVFP4")
    options = BuildOptions(checkpoint=target, output=tmp_path / "engine", tp=2)
    network = builder.describe(options).rank(1).networks["target"]
    attention = "model.layers.0.self_attn."
    assert network.tensors[f"{attention}kv_b_proj.key"].shape == ("rows", 2, 32)
    assert network.tensors[f"{attention}attention"].shape == ("rows", 2, 32)
    assert network.tensors[f"{attention}indexer.q_rotated"].shape == ("rows", 16, 32)
    assert network.states[f"{attention}latent"].shape == (1, 48)
    assert network.states[f"{attention}indexer.keys"].shape == (1, 32)
    stored = builder.describe(options).rank(1).weights.stored
    assert stored[f"target:{attention}kv_b_proj"].shape == (128, 32)
    with pytest.raises(NetworkError, match=r"q_heads: heads: 4 does not divide among 8 ranks"):
        builder.describe(options.with_changes({"tp": 8}))


def test_the_demo_with_its_drafter(demo_engine: Callable[..., Path]) -> None:
    # 2 KV heads: on 4 ranks each is held twice.
    one, two, four = (transcript(load(demo_engine(tp=tp)), DEMO_VOCAB) for tp in (1, 2, 4))
    assert len(one) == 7
    assert one == two
    assert one == four


def test_a_drafter_of_a_reduced_vocabulary(tmp_path: Path) -> None:
    ids = torch.arange(2, DEMO_VOCAB, 3)
    drafter = write_speculators(tmp_path / "drafter", reduced(ids), draft_vocab_size=len(ids))
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes({"drafter": drafter})

    def built(tp: int) -> Path:
        changes = {"output": tmp_path / f"tp{tp}", "tp": tp}
        return builder.write(builder.describe(options.with_changes(changes)))

    one, two = (transcript(load(built(tp)), DEMO_VOCAB) for tp in (1, 2))
    assert one == two


def test_the_executor_emits_the_same_tokens(demo_engine: Callable[..., Path]) -> None:
    prompts = [[5, 17, 300, 9], [44] * 30, [DEMO_VOCAB - 1, 0, 1]]
    modes = [
        SpeculativeConfig(DecodingMode.PLAIN),
        SpeculativeConfig(DecodingMode.CHAIN),
        SpeculativeConfig(DecodingMode.TREE, tree_budget=16),
    ]

    def decoded(tp: int) -> list[list[int]]:
        executor = Executor(load(demo_engine(tp=tp)))
        output: dict[int, list[int]] = {}
        for prompt, mode in zip(prompts, modes, strict=True):
            output[executor.enqueue_request(Request(prompt, 24, speculative=mode))] = []
        while responses := executor.await_responses():
            for response in responses:
                output[response.request_id] += response.token_ids
        return list(output.values())

    assert decoded(1) == decoded(2)


def test_a_rank_stores_its_part_only(demo_engine: Callable[..., Path]) -> None:
    whole = (demo_engine(tp=1) / "drafter.rank0.bin").stat().st_size
    parts = [(demo_engine(tp=2) / f"drafter.rank{rank}.bin").stat().st_size for rank in (0, 1)]
    # fc and the norms are whole on every rank.
    assert max(parts) < 0.75 * whole


@pytest.mark.parametrize(
    ("changes", "tp", "named"),
    [
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            r"KV heads: 3 does not divide among 4 ranks",
        ),
        (
            {"num_key_value_heads": 4, "intermediate_size": 48},
            4,
            r"gate_proj.*: features: 48 are 3 blocks of 16, too few for 4 ranks",
        ),
        ({}, 3, r"8 segments, which do not divide among 3 ranks"),
        ({"num_key_value_heads": 4, "vocab_size": 40}, 4, r"lm_head: 40 columns.*4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    tmp_path: Path, changes: dict[str, int], tp: int, named: str
) -> None:
    checkpoint = random_checkpoint(tmp_path / "target", tiny_config(**changes))
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "engine", tp=tp)
    with pytest.raises(NetworkError, match=named):
        builder.describe(options)


def hybrid(tmp_path: Path, tp: int, **changes: int) -> BuildOptions:
    sizes = KEY_HEADS | {"num_key_value_heads": 4, "intermediate_size": 128}
    config = hybrid_config("Qwen3_5ForCausalLM", **(sizes | changes))
    checkpoint = tmp_path / "target"
    if not checkpoint.exists():
        random_checkpoint(checkpoint, config, algorithm="NVFP4")
    return BuildOptions(
        checkpoint=checkpoint, output=tmp_path / f"tp{tp}", kv_tokens=512, max_num_rows=128, tp=tp
    )


def test_key_heads_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        NetworkError, match=r"linear_attn\.\S+: key heads: 2 does not divide among 4 ranks"
    ):
        builder.describe(hybrid(tmp_path, 4, linear_num_key_heads=2))


def test_a_rank_keeps_its_heads_state(tmp_path: Path) -> None:
    """Of 12 value heads 16 x 32 numbers each, and 3 inputs of 2 * 4 * 16 + 12 * 32 channels."""
    for tp in (1, 2, 4):
        description = builder.describe(hybrid(tmp_path, tp))
        assert description.request_state_bytes == 4 * (12 * 16 * 32 + 3 * 512) // tp
        rows = dict(memory_plan(description))
        kept = 512 + 4 * 16 + 12 * 32 + 12  # of a row: its input, key, update and decay
        assert rows[f"kept of a step, 128 rows x {4 * kept / tp / 1024:.1f} KiB"]
    whole, half = (
        sum(file.stat().st_size for file in builder.write(description).glob("target.rank0.bin"))
        for description in (builder.describe(hybrid(tmp_path, tp)) for tp in (1, 2))
    )
    assert half < 0.6 * whole  # embeddings and norms are whole


def test_ranks_go_on_from_snapshots_of_their_own_parts(tmp_path: Path) -> None:
    requests = [Request([7] * 40 + [i], 8, speculative=PLAIN) for i in range(3)]
    cache = ExecutorConfig(kv_cache_config=KvCacheConfig(snapshot_interval=16))
    answers = []
    for tp in (1, 2):
        executor = Executor(load(builder.write(builder.describe(hybrid(tmp_path, tp)))), cache)
        answers.append([run(executor, [request])[0] for request in requests])
    (one, two) = ([(tokens, last.statistics.cached_tokens) for tokens, last in a] for a in answers)
    assert one == two
    assert [cached for _, cached in two] == [0, 32, 32]


def test_the_reference_engine_runs_on_one_rank() -> None:
    with pytest.raises(OptionError, match="tp 2: backend reference runs on one rank"):
        BuildOptions(backend="reference", tp=2)


def test_a_rank_loads_no_other_ranks_plan(demo_engine: Callable[..., Path]) -> None:
    with pytest.raises(EngineDirError, match="built for 2 tensor-parallel ranks, loaded on 1"):
        load_cpu_engine(EngineDir.open(demo_engine(tp=2)))
