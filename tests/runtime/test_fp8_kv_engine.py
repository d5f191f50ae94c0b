"""FP8 KV on the CPU engine: op by op against the reference, and as lossless as float KV.

A row's own keys and values are read back through the same rounding as the prefix's, so that
verification sees the bits that plain decoding sees later.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwise import (
    POOL_TOKENS,
    Batch,
    batches,
    check_commits,
    check_instruction_sets,
    check_trees,
    few_examples,
)
from decoding import run, run_alone
from engines import tiny_config
from op_by_op import OpByOp
from random_engines import RandomEngines
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config
from request_mixes import CHAIN, PLAIN, tree
from steps import path_to, prefill, random_tree, run_rows
from thread_ranks import ThreadRanks
from trtree import _core
from trtree.build.engine_dir import MANIFEST, PLAN, EngineDir, EngineDirError
from trtree.runtime.engines import load_engine, open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import Executor, Request

VOCAB = 80
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
}
FAMILIES = {
    "qwen3": tiny_config(head_dim=48),
    "window": tiny_config(**WINDOWS),
    "glm": glm4_moe_config(),
    "hybrid": hybrid_config("Qwen3NextForCausalLM"),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> RandomEngines:
    """Whose checkpoints ask for FP8 KV."""
    root = tmp_path_factory.mktemp("fp8")
    return RandomEngines(root, FAMILIES, calibrated_kv="FP8", kv_tokens=POOL_TOKENS)


def worst_ops(engine: _core.Engine, reference: _core.Engine) -> dict[str, float]:
    check = OpByOp(engine, reference)
    check.prompt_and_tree(VOCAB)
    engine.observe(None)
    return check.worst


@pytest.mark.parametrize("family", FAMILIES)
def test_op_by_op(engines: RandomEngines, family: str) -> None:
    """Both append the same numbers, so that every code is the same."""
    _, engine = open_engine(engines.build(family, "NVFP4"))
    _, reference = open_engine(engines.build(family, "NVFP4", backend="reference"))
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
def test_a_scale_that_is_ignored_shows(engines: RandomEngines, tmp_path: Path, scale: str) -> None:
    def ignore(plan: Any) -> None:
        for state in plan["states"]:
            state[scale] = 1.0

    engine = load_cpu_engine(
        changed(engines.build("qwen3", "NVFP4"), tmp_path / "spoilt", PLAN, ignore)
    )
    _, reference = open_engine(engines.build("qwen3", "NVFP4", backend="reference"))
    assert worst_ops(engine, reference)["tree_attention"] > 1e-3


def test_what_does_not_fit_the_manifest_is_refused(engines: RandomEngines, tmp_path: Path) -> None:
    def widen(manifest: Any) -> None:
        manifest["build_config"]["kv_cache"]["stored_as"] = "float32"

    for backend in ("cpu", "reference"):
        path = engines.build("qwen3", "NVFP4", backend=backend)
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
    engines: RandomEngines, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    def spoil(plan: Any) -> None:
        for state in plan["states"]:
            if not state["drafter"]:
                state |= change

    engine = changed(engines.build("qwen3", "NVFP4"), tmp_path / "spoilt", PLAN, spoil)
    engine.manifest["build_config"]["kv_cache"]["stored_as"] = change.get("dtype", "float8_e4m3fn")
    with pytest.raises((ValueError, EngineDirError), match=message):
        load_cpu_engine(engine)


@pytest.mark.parametrize("family", FAMILIES)
@few_examples(6)
@given(
    seed=st.integers(0, 2**32),
    batch=batches(prefixes=70, budgets=[0, 1, 16, 33, 65, 128], requests=3),
    page_size=st.sampled_from([1, 16]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    engines: RandomEngines, family: str, seed: int, batch: Batch, page_size: int, threads: int
) -> None:
    engine = engines.load(family, "NVFP4", threads, page_size=page_size)
    alone = engines.load(family, "NVFP4")
    check_trees(engine, alone, batch, seed=seed, vocab=VOCAB, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_a_committed_path_continues_as_if_decoded_plainly(
    engines: RandomEngines, family: str, page_size: int
) -> None:
    engine = engines.load(family, "NVFP4", 2, page_size=page_size)
    alone = engines.load(family, "NVFP4")
    assert check_commits(engine, alone, vocab=VOCAB, page_size=page_size) > 20


@pytest.mark.parametrize("page_size", [1, 16])
def test_modes_prefix_hits_and_preemption_change_no_token(
    engines: RandomEngines, page_size: int
) -> None:
    """A pool too small for its requests, prompts that begin alike, every mode."""
    path = engines.build("qwen3", "NVFP4", page_size=page_size, kv_tokens=400, max_tree_budget=33)
    modes = [PLAIN, CHAIN, tree(16), tree(33)]
    rng = random.Random(1)
    begin = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [begin + [rng.randrange(VOCAB) for _ in range(i)] for i in range(1, 8)]
    requests = [Request(prompt, max_tokens=48, speculative=PLAIN) for prompt in prompts]
    expected = run_alone(load_cpu_engine(EngineDir.open(path), num_threads=1), requests)
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
def test_instruction_sets_and_ranks_give_the_same_bits(engines: RandomEngines, family: str) -> None:
    check_instruction_sets(lambda isa: engines.load(family, "NVFP4", isa=isa), VOCAB)
    one = load_cpu_engine(EngineDir.open(engines.build(family, "NVFP4")), num_threads=1)
    two = ThreadRanks(EngineDir.open(engines.build(family, "NVFP4", tp=2)))
    assert transcript(one) == transcript(two)
