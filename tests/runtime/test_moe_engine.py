"""Targets with experts on the CPU engine: op by op against the reference, and bitwise."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwise import Batch, batches, check_instruction_sets, check_trees, few_examples
from decoding import run, run_alone
from op_by_op import OpByOp
from random_engines import RandomEngines
from random_moe import glm4_moe_config, qwen3_moe_config
from request_mixes import CHAIN, PLAIN, tree
from steps import prefill
from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import Executor, Request

VOCAB = 80
FAMILIES = {
    "qwen3": qwen3_moe_config(num_experts=16, num_experts_per_tok=4, decoder_sparse_step=1),
    "glm": glm4_moe_config(n_routed_experts=16, num_experts_per_tok=4),
}
# Op by op: ops compute in float32 here, in float64 in the reference.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> RandomEngines:
    return RandomEngines(tmp_path_factory.mktemp("moe"), FAMILIES, max_num_rows=2048)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_op_by_op(engines: RandomEngines, family: str, algorithm: str | None) -> None:
    _, engine = open_engine(engines.build(family, algorithm))
    _, reference = open_engine(engines.build(family, algorithm, backend="reference"))
    check = OpByOp(engine, reference)
    check.prompt_and_tree(VOCAB)
    engine.observe(None)
    assert set(check.worst) >= {"route", "experts_up", "experts_down", "linear", "tree_attention"}
    assert ("experts_scale" in check.worst) == (
        algorithm == "NVFP4_SVD" or (algorithm == "NVFP4_AWQ" and family == "glm")
    )
    assert ("experts_linear" in check.worst) == (algorithm == "NVFP4_SVD")
    assert max(check.worst.values()) < TOLERANCE, check.worst


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_networks_in_w4a16(engines: RandomEngines, family: str) -> None:
    """Where both backends route alike, their logits agree; a near tie may part them."""
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(60)]
    logits = {}
    for backend in ("cpu", "reference"):
        _, engine = open_engine(engines.build(family, "W4A16_NVFP4", backend=backend))
        logits[backend] = prefill(engine, _core.Sequence(1, 0, 0, list(range(8))), prompt)
    difference = np.linalg.norm(logits["cpu"] - logits["reference"], axis=1)
    relative = difference / np.linalg.norm(logits["reference"], axis=1)
    assert np.median(relative) < 1e-2


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"])
@pytest.mark.parametrize("family", FAMILIES)
@few_examples(20)
@given(
    seed=st.integers(0, 2**32),
    batch=batches(prefixes=40, budgets=[0, 1, 7, 16, 33, 64, 128], requests=6),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    engines: RandomEngines, family: str, algorithm: str, seed: int, batch: Batch, threads: int
) -> None:
    engine = engines.load(family, algorithm, threads)
    check_trees(engine, engine, batch, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_SVD", None])
def test_every_instruction_set_gives_the_same_bits(
    engines: RandomEngines, algorithm: str | None
) -> None:
    check_instruction_sets(lambda isa: engines.load("glm", algorithm, isa=isa), VOCAB)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_executor_is_lossless(engines: RandomEngines, family: str, algorithm: str) -> None:
    """Plain, chain and tree requests of one batch give the tokens that each gives alone."""
    rng = random.Random(2)
    engine = engines.load(family, algorithm, 2)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    modes = [tree(64), CHAIN, tree(16)]
    requests = [Request(p, 32, speculative=modes[i % 3]) for i, p in enumerate(prompts)]
    together = [tokens for tokens, _ in run(Executor(engine), requests)]
    assert all(len(tokens) == 32 for tokens in together)
    assert together == run_alone(engine, [Request(p, 32, speculative=PLAIN) for p in prompts])


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("route", "routing", 7, "route: routing 7 of 1"),
        ("experts_up", "heads", 3, r"experts\.up: experts \[96, 64\] between widths 64 and 192"),
        ("experts_down", "heads", 0, "its slots do not stand one after another"),
        ("experts_scale", "heads", 2, "width 64 for 2 slots of 256"),
        ("experts_scale", "weight", 0, r"a vector of \d+ for 1024"),
        ("experts_linear", "heads", 3, "between widths 256 and 32"),
        ("experts_up", "added", None, "width 256 added to 384"),
        ("experts_down", "inputs", [0, 1], "16 experts, weights of"),
        ("linear", "weight", "experts", "experts where one matrix is needed"),
        (None, "experts", 8, "16 scales for 8 experts"),
        (None, "top_k", 17, "top_k 17 of 8"),
    ],
)
def test_a_plan_is_checked_before_it_runs(
    engines: RandomEngines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    field: str,
    value: Any,
    message: str,
) -> None:
    low_rank = field == "added" or kind in ("experts_scale", "experts_linear")
    engine = EngineDir.open(engines.build("glm", "NVFP4_SVD" if low_rank else "NVFP4"))
    plan = engine.plan()
    stacks = [index for index, weight in enumerate(plan["weights"]) if weight["experts"]]
    changed: dict[str, Any] = plan["weights"][stacks[0]] if field == "experts" else {}
    if field == "top_k":
        changed = plan["routings"][0]
    if kind:
        changed = next(op for op in plan["networks"]["target"]["ops"] if op["kind"] == kind)
    if field == "added":
        inputs = changed["inputs"]
        field, value = "inputs", [*inputs[:2], inputs[0]]
    changed[field] = stacks[0] if value == "experts" else value
    monkeypatch.setattr(EngineDir, "plan", lambda *_: plan)
    with pytest.raises(ValueError, match=message):
        load_cpu_engine(engine)
