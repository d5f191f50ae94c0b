"""Targets with experts on the CPU engine: op by op against the reference, and bitwise."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import random_checkpoint
from op_by_op import OpByOp
from random_drafter import random_drafter
from random_moe import glm4_moe_config, qwen3_moe_config
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import DecodingMode, Executor, Request, SpeculativeConfig

VOCAB = 80
FAMILIES = {
    "qwen3": qwen3_moe_config(num_experts=16, num_experts_per_tok=4, decoder_sparse_step=1),
    "glm": glm4_moe_config(n_routed_experts=16, num_experts_per_tok=4),
}
# Op by op: ops compute in float32 here, in float64 in the reference.
TOLERANCE = 1e-6

Build = Callable[[str, str | None, str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """An engine by family, quantization and backend."""
    root = tmp_path_factory.mktemp("moe")

    @cache
    def checkpoint(family: str, algorithm: str | None) -> Path:
        directory = root / f"{family}.{algorithm}"
        return random_checkpoint(directory, FAMILIES[family], algorithm=algorithm)

    @cache
    def drafter(family: str) -> Path:
        return random_drafter(root / f"{family}.drafter", FAMILIES[family])

    @cache
    def built(family: str, algorithm: str | None, backend: str) -> Path:
        options = BuildOptions(
            checkpoint=checkpoint(family, algorithm),
            drafter=drafter(family),
            output=root / f"{family}.{algorithm}.{backend}",
            backend=backend,
            kv_tokens=4096,
            max_tree_budget=128,
            max_num_rows=2048,
        )
        return builder.write(builder.describe(options))

    return built


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_op_by_op(build: Build, family: str, algorithm: str | None) -> None:
    _, engine = open_engine(build(family, algorithm, "cpu"))
    _, reference = open_engine(build(family, algorithm, "reference"))
    check = OpByOp(engine, reference, page_size=16)
    rng = random.Random(0)
    pages = [9, 3, 14, 0, 7, 5]
    prompt = [rng.randrange(VOCAB) for _ in range(37)]
    check.rows_of(0, prompt, list(range(-1, 36)), pages)
    prefill(engine, _core.Sequence(1, 0, 0, pages), prompt)
    tokens, parents = random_tree(rng, 50, VOCAB)
    check.rows_of(37, tokens, parents, pages)
    run_rows(engine, [(_core.Sequence(1, 0, 37, pages), tokens, parents)])
    engine.observe(None)
    assert set(check.worst) >= {"route", "experts_up", "experts_down", "linear", "tree_attention"}
    assert ("experts_scale" in check.worst) == (
        algorithm == "NVFP4_SVD" or (algorithm == "NVFP4_AWQ" and family == "glm")
    )
    assert ("experts_linear" in check.worst) == (algorithm == "NVFP4_SVD")
    assert max(check.worst.values()) < TOLERANCE, check.worst


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_networks_in_w4a16(build: Build, family: str) -> None:
    """Where both backends route alike, their logits agree; a near tie may part them."""
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(60)]
    logits = {}
    for backend in ("cpu", "reference"):
        _, engine = open_engine(build(family, "W4A16_NVFP4", backend))
        logits[backend] = prefill(engine, _core.Sequence(1, 0, 0, list(range(8))), prompt)
    difference = np.linalg.norm(logits["cpu"] - logits["reference"], axis=1)
    relative = difference / np.linalg.norm(logits["reference"], axis=1)
    assert np.median(relative) < 1e-2


def pages_of(request: int) -> list[int]:
    """An eighth of the pool for each request, in an order of its own."""
    pages = list(range(request * 32, (request + 1) * 32))
    random.Random(request).shuffle(pages)
    return pages


@pytest.fixture(scope="module")
def load(build: Build) -> Any:
    @cache
    def loaded(family: str, algorithm: str | None, threads: int, isa: str = "") -> _core.Engine:
        engine = EngineDir.open(build(family, algorithm, "cpu"))
        return load_cpu_engine(engine, num_threads=threads, isa=isa)

    return loaded


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    batch=st.lists(
        st.tuples(
            st.integers(0, 40),  # prefix
            st.sampled_from([0, 1, 7, 16, 33, 64, 128]),  # budget
        ),
        min_size=1,
        max_size=6,
    ),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    load: Any, family: str, algorithm: str, seed: int, batch: list[tuple[int, int]], threads: int
) -> None:
    rng = random.Random(seed)
    engine = load(family, algorithm, threads)
    requests, prefixes = [], []
    for index, (prefix_length, budget) in enumerate(batch):
        pages = pages_of(index)
        prefix = [rng.randrange(VOCAB) for _ in range(prefix_length)]
        if prefix:
            prefill(engine, _core.Sequence(index, index, 0, pages), prefix)
        tokens, parents = random_tree(rng, budget, VOCAB)
        requests.append((_core.Sequence(index, index, prefix_length, pages), tokens, parents))
        prefixes.append(prefix)
    together = run_rows(engine, requests)

    for (_, tokens, parents), prefix, logits in zip(requests, prefixes, together, strict=True):
        for row in rng.sample(range(len(tokens)), min(2, len(tokens))):
            path = [*prefix, *(tokens[r] for r in path_to(row, parents))]
            for position, token in enumerate(path):
                at = _core.Sequence(99, 7, position, pages_of(7))
                alone = prefill(engine, at, [token])
            assert logits[row].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_SVD", None])
def test_every_instruction_set_gives_the_same_bits(load: Any, algorithm: str | None) -> None:
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(40)]
    results = set()
    for isa in ("portable", "avx2", "avx512"):
        try:
            engine = load("glm", algorithm, 1, isa)
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
            continue
        results.add(prefill(engine, _core.Sequence(1, 0, 0, pages_of(0)), prompt).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_executor_is_lossless(load: Any, family: str, algorithm: str) -> None:
    """Plain, chain and tree requests of one batch give the tokens that each gives alone."""
    rng = random.Random(2)
    engine = load(family, algorithm, 2)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    modes = [
        SpeculativeConfig(DecodingMode.TREE, tree_budget=64),
        SpeculativeConfig(DecodingMode.CHAIN),
        SpeculativeConfig(DecodingMode.TREE, tree_budget=16),
    ]

    def run(requests: list[Request]) -> list[list[int]]:
        executor = Executor(engine)
        output: dict[int, list[int]] = {executor.enqueue_request(r): [] for r in requests}
        while responses := executor.await_responses():
            for response in responses:
                output[response.request_id] += response.token_ids
        return list(output.values())

    plain = SpeculativeConfig(DecodingMode.PLAIN)
    together = run(
        [
            Request(prompt, max_tokens=32, speculative=modes[index % 3])
            for index, prompt in enumerate(prompts)
        ]
    )
    for prompt, tokens in zip(prompts, together, strict=True):
        assert len(tokens) == 32
        assert [tokens] == run([Request(prompt, max_tokens=32, speculative=plain)])


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
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    field: str,
    value: Any,
    message: str,
) -> None:
    low_rank = field == "added" or kind in ("experts_scale", "experts_linear")
    engine = EngineDir.open(build("glm", "NVFP4_SVD" if low_rank else "NVFP4", "cpu"))
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
