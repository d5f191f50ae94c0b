"""FP8 KV on the CPU engine: op by op against the reference, and as lossless as float KV.

A row's own keys and values are read back through the same rounding as the prefix's, so that
verification sees the bits that plain decoding sees later.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoding import run
from engines import random_checkpoint, tiny_config
from op_by_op import OpByOp
from random_drafter import random_drafter
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config
from steps import path_to, prefill, random_tree, run_rows
from thread_ranks import ThreadRanks
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import MANIFEST, PLAN, EngineDir, EngineDirError
from trtree.build.options import BuildOptions
from trtree.runtime.engines import load_engine, open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    DecodingMode,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SpeculativeConfig,
)

VOCAB = 80
KV_TOKENS = 2048
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
}
CONFIGS = {
    "qwen3": tiny_config(head_dim=48),
    "window": tiny_config(**WINDOWS),
    "glm": glm4_moe_config(),
    "hybrid": hybrid_config("Qwen3NextForCausalLM"),
}
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """An engine with a drafter, by family and build options."""
    root = tmp_path_factory.mktemp("fp8")
    built: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        checkpoint, drafter = root / family, root / f"{family}.drafter"
        if not checkpoint.exists():
            random_checkpoint(checkpoint, CONFIGS[family], algorithm="NVFP4", kv_cache="FP8")
            random_drafter(drafter, CONFIGS[family])
        name = f"{family}.{options}"
        if name not in built:
            given = {"kv_tokens": KV_TOKENS, "max_tree_budget": 128, "max_num_rows": 512} | options
            built[name] = builder.write(
                builder.describe(
                    BuildOptions(
                        checkpoint=checkpoint,
                        drafter=drafter,
                        output=root / f"engine{len(built)}",
                        **given,
                    )
                )
            )
        return built[name]

    return make


Load = Callable[..., _core.Engine]


@pytest.fixture(scope="module")
def load(build: Build) -> Load:
    """A CPU engine by family, page size, threads and instruction set; ``copy`` makes others."""

    @cache
    def loaded(
        family: str, page_size: int, threads: int, isa: str = "", copy: int = 0
    ) -> _core.Engine:
        engine = EngineDir.open(build(family, page_size=page_size))
        return load_cpu_engine(engine, num_threads=threads, isa=isa)

    return loaded


def worst_ops(engine: _core.Engine, reference: _core.Engine) -> dict[str, float]:
    """A prompt, then a tree, op by op."""
    check = OpByOp(engine, reference)
    check.prompt_and_tree(VOCAB)
    engine.observe(None)
    return check.worst


@pytest.mark.parametrize("family", CONFIGS)
def test_op_by_op(build: Build, family: str) -> None:
    """Both append the same numbers, so that every code is the same and attention alone rounds."""
    _, engine = open_engine(build(family))
    _, reference = open_engine(build(family, backend="reference"))
    worst = worst_ops(engine, reference)
    assert "tree_attention" in worst
    assert max(worst.values()) < 2e-6, worst


def changed(path: Path, folder: Path, file: str, change: Callable[[Any], None]) -> EngineDir:
    """An engine beside ``path`` with another plan or manifest."""
    folder.mkdir()
    for part in path.iterdir():
        (folder / part.name).symlink_to(part)
    data = json.loads((path / file).read_text())
    change(data)
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(data))
    return EngineDir(folder, json.loads((folder / MANIFEST).read_text()))


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_a_scale_that_is_ignored_shows(build: Build, tmp_path: Path, scale: str) -> None:
    def ignore(plan: Any) -> None:
        for state in plan["states"]:
            state[scale] = 1.0

    engine = load_cpu_engine(changed(build("qwen3"), tmp_path / "spoilt", PLAN, ignore))
    _, reference = open_engine(build("qwen3", backend="reference"))
    assert worst_ops(engine, reference)["tree_attention"] > 1e-3


def test_what_does_not_fit_the_manifest_is_refused(build: Build, tmp_path: Path) -> None:
    def widen(manifest: Any) -> None:
        manifest["build_config"]["kv_cache"]["stored_as"] = "float32"

    for backend in ("cpu", "reference"):
        path = build("qwen3", backend=backend)
        engine = changed(path, tmp_path / backend, MANIFEST, widen)
        with pytest.raises(EngineDirError, match=r"KV is stored as float32, .* float8_e4m3fn; reb"):
            load_engine(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": 0.0}, "FP8 scales 0.0"),
        ({"v_scale": float("inf")}, "FP8 scales 0.0.* inf must be above 0"),
        ({"dtype": "bfloat16"}, "bfloat16 is not known"),
        ({"head_dim": 40}, "FP8 heads of 40 are no multiple of 16"),
    ],
)
def test_plans_are_checked(
    build: Build, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    def spoil(plan: Any) -> None:
        for state in plan["states"]:
            if not state["drafter"]:
                state |= change

    engine = changed(build("qwen3"), tmp_path / "spoilt", PLAN, spoil)
    engine.manifest["build_config"]["kv_cache"]["stored_as"] = change.get("dtype", "float8_e4m3fn")
    with pytest.raises((ValueError, EngineDirError), match=message):
        load_cpu_engine(engine)


def pages_of(request: int, page_size: int) -> list[int]:
    """An eighth of the pool for each request, in an order of its own."""
    count = KV_TOKENS // page_size // 8
    pages = list(range(request * count, (request + 1) * count))
    random.Random(request).shuffle(pages)
    return pages


def plain_logits(engine: _core.Engine, tokens: list[int]) -> np.ndarray:
    """Logits after the last of the tokens, each decoded in a step of its own."""
    pages = pages_of(0, 16)
    for position, token in enumerate(tokens):
        logits = prefill(engine, _core.Sequence(99, 0, position, pages), [token])
    return logits[0]


@pytest.mark.parametrize("family", CONFIGS)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    batch=st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 16, 33, 65, 128])),
        min_size=1,
        max_size=3,
    ),
    page_size=st.sampled_from([1, 16]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_and_what_follows_them_equal_plain_decoding(
    load: Load, family: str, seed: int, batch: list[tuple[int, int]], page_size: int, threads: int
) -> None:
    rng = random.Random(seed)
    engine, alone = load(family, page_size, threads), load(family, 16, 1, copy=1)
    requests, prefixes = [], []
    for index, (prefix_length, budget) in enumerate(batch):
        pages = pages_of(index, page_size)
        prefix = [rng.randrange(VOCAB) for _ in range(prefix_length)]
        if prefix:
            prefill(engine, _core.Sequence(index, index, 0, pages), prefix)
        at = _core.Sequence(index, index, prefix_length, pages)
        requests.append((at, *random_tree(rng, budget, VOCAB)))
        prefixes.append(prefix)
    together = run_rows(engine, requests)
    commits, paths = [], []
    for (at, tokens, parents), prefix, logits in zip(requests, prefixes, together, strict=True):
        path = path_to(rng.randrange(len(tokens)), parents)
        paths.append([*prefix, *(tokens[row] for row in path)])
        assert logits[path[-1]].tobytes() == plain_logits(alone, paths[-1]).tobytes()
        commits.append(_core.Commit(at, path))
    engine.commit(commits)
    following = [
        (_core.Sequence(index, index, len(path), pages_of(index, page_size)), [7], [-1])
        for index, path in enumerate(paths)
    ]
    for path, (logits,) in zip(paths, run_rows(engine, following), strict=True):
        assert logits.tobytes() == plain_logits(alone, [*path, 7]).tobytes()


@pytest.mark.parametrize("page_size", [1, 16])
def test_modes_prefix_hits_and_preemption_change_no_token(build: Build, page_size: int) -> None:
    """A pool too small for its requests, prompts that begin alike, every mode."""
    path = build("qwen3", page_size=page_size, kv_tokens=400, max_tree_budget=33)
    modes = [
        SpeculativeConfig(DecodingMode.PLAIN),
        SpeculativeConfig(DecodingMode.CHAIN),
        SpeculativeConfig(DecodingMode.TREE, tree_budget=16),
        SpeculativeConfig(DecodingMode.TREE, tree_budget=33),
    ]
    rng = random.Random(1)
    begin = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [begin + [rng.randrange(VOCAB) for _ in range(i)] for i in range(1, 8)]
    cold = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    expected = []
    for prompt in prompts:
        alone = Executor(load_cpu_engine(EngineDir.open(path), num_threads=1), cold)
        [(tokens, _)] = run(alone, [Request(prompt, max_tokens=48, speculative=modes[0])])
        expected.append(tokens)
    assert len({tuple(tokens) for tokens in expected}) > 3
    executor = Executor(load_cpu_engine(EngineDir.open(path), num_threads=2))
    for first in range(2):
        chosen = [modes[(first + i) % 4] for i in range(len(prompts))]
        results = run(
            executor,
            [
                Request(p, max_tokens=48, speculative=m)
                for p, m in zip(prompts, chosen, strict=True)
            ],
        )
        assert [tokens for tokens, _ in results] == expected
    statistics = executor.latest_statistics()
    assert statistics.preemptions > 0
    assert statistics.cached_prompt_tokens > 0


def transcript(engine: _core.Engine) -> bytes:
    """A prompt, trees and commits, drafts: every result."""
    rng, results, committed = random.Random(3), [], 21
    pages = list(range(16))
    prompt = [rng.randrange(VOCAB) for _ in range(committed)]
    results.append(prefill(engine, _core.Sequence(1, 1, 0, pages), prompt))
    for nodes in (33, 5):
        at = _core.Sequence(1, 1, committed, pages)
        drafted = engine.draft([_core.DraftRequest(at, 7)], 8)
        results += [drafted.log_probs, drafted.token_ids]
        tokens, parents = random_tree(rng, nodes, VOCAB)
        results += run_rows(engine, [(at, tokens, parents)])
        path = path_to(nodes, parents)
        engine.commit([_core.Commit(at, path)])
        committed += len(path)
    return b"".join(np.ascontiguousarray(result).tobytes() for result in results)


@pytest.mark.parametrize("family", ["qwen3", "glm"])
def test_instruction_sets_and_ranks_give_the_same_bits(build: Build, family: str) -> None:
    path = EngineDir.open(build(family))
    results = {transcript(ThreadRanks(EngineDir.open(build(family, tp=2))))}
    for isa in ("portable", "avx2", "avx512"):
        try:
            results.add(transcript(load_cpu_engine(path, num_threads=1, isa=isa)))
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
    assert len(results) == 1
