"""GLM-5 on the CPU engine: op by op against the reference, bitwise lossless, served.

Contexts below and above the top-k of 12: a sibling seen too early would take another key's
place in a row's choice, and every test here would see it.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoding import run
from engines import random_checkpoint, write_target
from op_by_op import OpByOp
from random_drafter import random_drafter
from random_glm5 import glm5_config, random_glm5
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    DecodingMode,
    Executor,
    ExecutorConfig,
    Request,
    SamplingConfig,
    SpeculativeConfig,
)

VOCAB = 80
CONFIG = glm5_config(
    num_hidden_layers=3, indexer_types=["full", "shared", "full"], n_routed_experts=16
)
# Op by op: ops compute in float32 here, in float64 in the reference.
TOLERANCE = 2e-6

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """An engine by quantization, backend and pages."""
    root = tmp_path_factory.mktemp("glm5")

    @cache
    def checkpoint(algorithm: str | None) -> Path:
        return random_checkpoint(root / str(algorithm), CONFIG, algorithm=algorithm)

    @cache
    def drafter() -> Path:
        return random_drafter(root / "drafter", CONFIG)

    def built(
        algorithm: str | None, backend: str = "cpu", kv_tokens: int = 4096, page_size: int = 16
    ) -> Path:
        return engine(algorithm, backend, kv_tokens, page_size)

    @cache
    def engine(algorithm: str | None, backend: str, kv_tokens: int, page_size: int) -> Path:
        options = BuildOptions(
            checkpoint=checkpoint(algorithm),
            drafter=drafter(),
            output=root / f"{algorithm}.{backend}.{kv_tokens}.{page_size}",
            backend=backend,
            kv_tokens=kv_tokens,
            page_size=page_size,
            max_tree_budget=128,
            max_num_rows=2048,
        )
        return builder.write(builder.describe(options))

    return built


@pytest.fixture(scope="module")
def load(build: Build) -> Any:
    @cache
    def loaded(
        algorithm: str | None, threads: int = 1, isa: str = "", **options: Any
    ) -> _core.Engine:
        engine = EngineDir.open(build(algorithm, **options))
        return load_cpu_engine(engine, num_threads=threads, isa=isa)

    return loaded


def pages_of(request: int, page_size: int = 16) -> list[int]:
    """An eighth of the pool for each request, in an order of its own."""
    count = 4096 // page_size // 8
    pages = list(range(request * count, (request + 1) * count))
    random.Random(request).shuffle(pages)
    return pages


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", None])
@pytest.mark.parametrize("prompt_length", [5, 37])
def test_op_by_op(build: Build, algorithm: str | None, prompt_length: int) -> None:
    _, engine = open_engine(build(algorithm))
    _, reference = open_engine(build(algorithm, "reference"))
    check = OpByOp(engine, reference, page_size=16)
    rng = random.Random(0)
    pages = [9, 3, 14, 0, 7, 5]
    prompt = [rng.randrange(VOCAB) for _ in range(prompt_length)]
    check.rows_of(0, prompt, list(range(-1, prompt_length - 1)), pages)
    prefill(engine, _core.Sequence(1, 0, 0, pages), prompt)
    tokens, parents = random_tree(rng, 50, VOCAB)
    check.rows_of(prompt_length, tokens, parents, pages)
    run_rows(engine, [(_core.Sequence(1, 0, prompt_length, pages), tokens, parents)])
    engine.observe(None)
    assert set(check.worst) >= {
        "concat",
        "head_linear",
        "index_select",
        "latent_attention",
        "layer_norm",
    }
    assert check.worst["index_select"] == 0  # selections are equal
    assert max(check.worst.values()) < TOLERANCE, check.worst


def plain_logits(engine: _core.Engine, tokens: list[int]) -> bytes:
    """Logits after the last of the tokens, each decoded in a step of its own."""
    for position, token in enumerate(tokens):
        logits = prefill(engine, _core.Sequence(99, 7, position, pages_of(7)), [token])
    return logits[0].tobytes()


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    batch=st.lists(
        st.tuples(
            st.integers(0, 40),  # prefix
            st.sampled_from([0, 1, 7, 31, 32, 33, 64, 65, 128]),  # budget
        ),
        min_size=1,
        max_size=6,
    ),
    page_size=st.sampled_from([1, 16]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    load: Any,
    algorithm: str | None,
    seed: int,
    batch: list[tuple[int, int]],
    page_size: int,
    threads: int,
) -> None:
    rng = random.Random(seed)
    engine = load(algorithm, threads, page_size=page_size)
    requests, prefixes = [], []
    for index, (length, budget) in enumerate(batch):
        pages, prefix = pages_of(index, page_size), [rng.randrange(VOCAB) for _ in range(length)]
        for start in range(0, length, 17):  # the prompt in chunks
            at = _core.Sequence(index, index, start, pages)
            prefill(engine, at, prefix[start : start + 17])
        tokens, parents = random_tree(rng, budget, VOCAB)
        requests.append((_core.Sequence(index, index, length, pages), tokens, parents))
        prefixes.append(prefix)
    together = run_rows(engine, requests)

    alone = load(algorithm, 1, kv_tokens=4097)  # its caches are its own
    for (_, tokens, parents), prefix, logits in zip(requests, prefixes, together, strict=True):
        for row in rng.sample(range(len(tokens)), min(2, len(tokens))):
            path = [*prefix, *(tokens[r] for r in path_to(row, parents))]
            assert logits[row].tobytes() == plain_logits(alone, path)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_committed_path_continues_as_if_decoded_plainly(load: Any, page_size: int) -> None:
    """Commit moves latents and the indexer's keys across pages."""
    rng = random.Random(5)
    engine, alone = load("NVFP4", 2, page_size=page_size), load("NVFP4", 1, kv_tokens=4097)
    pages = pages_of(1, page_size)
    committed: list[int] = []
    for _ in range(6):
        at = _core.Sequence(1, 1, len(committed), pages)
        tokens, parents = random_tree(rng, 40, VOCAB)
        run_rows(engine, [(at, tokens, parents)])  # never committed
        tokens, parents = random_tree(rng, 40, VOCAB)
        (logits,) = run_rows(engine, [(at, tokens, parents)])
        path = path_to(max(range(41), key=lambda row: len(path_to(row, parents))), parents)
        expected = plain_logits(alone, committed + [tokens[r] for r in path])
        assert logits[path[-1]].tobytes() == expected
        engine.commit([_core.Commit(at, path)])
        committed += [tokens[r] for r in path]
    assert len(committed) > 2 * CONFIG["index_topk"]


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
def test_every_instruction_set_gives_the_same_bits(load: Any, algorithm: str | None) -> None:
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(40)]
    results = set()
    for isa in ("portable", "avx2", "avx512"):
        try:
            engine = load(algorithm, 1, isa)
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
            continue
        results.add(prefill(engine, _core.Sequence(1, 0, 0, pages_of(0)), prompt).tobytes())
    assert len(results) == 1


def tokens_of(executor: Executor, requests: list[Request]) -> list[list[int]]:
    return [tokens for tokens, _ in run(executor, requests)]


MODES = [
    SpeculativeConfig(DecodingMode.TREE, tree_budget=64),
    SpeculativeConfig(DecodingMode.CHAIN),
    SpeculativeConfig(DecodingMode.PLAIN),
    SpeculativeConfig(DecodingMode.TREE, tree_budget=128),
]


@pytest.mark.parametrize(
    ("kv_tokens", "page_size"), [(4096, 16), (320, 16), (320, 1)], ids=["room", "pre-empts", "1"]
)
def test_mixed_requests_answer_as_if_alone(load: Any, kv_tokens: int, page_size: int) -> None:
    """Trees, chains and plain decoding, greedy and sampled; also where the pool is too small for
    all at once. Prompts begin alike, and their pages are found again."""
    rng = random.Random(2)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = [
        Request(
            (shared if index % 3 else []) + [rng.randrange(VOCAB) for _ in range(1 + index)],
            max_tokens=16 + index,
            speculative=MODES[index % 4],
            sampling=SamplingConfig(temperature=0.8, seed=index)
            if index % 5 == 4
            else SamplingConfig(),
        )
        for index in range(12)
    ]
    engine = load("NVFP4", 2, kv_tokens=kv_tokens, page_size=page_size)
    executor = Executor(engine, ExecutorConfig())
    together = tokens_of(executor, requests)
    statistics = executor.latest_statistics()
    assert (statistics.preemptions > 0) == (kv_tokens == 320)
    cached = statistics.cached_prompt_tokens
    assert tokens_of(executor, requests) == together  # and on warm prefixes
    assert executor.latest_statistics().cached_prompt_tokens > cached
    alone = load("NVFP4", 1)
    for request, tokens in zip(requests, together, strict=True):
        assert len(tokens) == request.max_tokens
        assert tokens_of(Executor(alone), [request]) == [tokens]


def test_equal_scores_leave_the_lower_positions(tmp_path: Path) -> None:
    """Weights of zero: every key scores 0, and a row attends the first twelve it sees."""
    config = glm5_config(indexer_types=["full", "shared"])
    tensors = random_glm5(config, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.indexer.weights_proj.weight"].zero_()
    checkpoint = write_target(tmp_path / "c", tensors, config)
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "e", backend="cpu")
    _, engine = open_engine(builder.write(builder.describe(options)))
    found = {}

    def observe(network: str, op: str, inputs: list[Any], outputs: list[Any]) -> None:
        if op.endswith("indexer.select"):
            found[op] = outputs[0].view(np.int32)

    engine.observe(observe)
    prefill(engine, _core.Sequence(1, 0, 0, list(range(4))), list(range(30)))
    (selection,) = found.values()
    assert selection[5].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, -1]
    assert selection[29].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("backend", "error"), [("cpu", RuntimeError), ("reference", FloatingPointError)]
)
def test_a_score_that_is_nan_names_its_row(
    tmp_path: Path, backend: str, error: type[Exception]
) -> None:
    """Where a row has to choose: with fewer keys nobody asks for scores."""
    config = glm5_config()
    tensors = random_glm5(config, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.indexer.weights_proj.weight"].fill_(3e38)
    checkpoint = write_target(tmp_path / "c", tensors, config)
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "e", backend=backend)
    _, engine = open_engine(builder.write(builder.describe(options)))
    at = _core.Sequence(1, 0, 0, list(range(4)))
    prefill(engine, at, list(range(12)))
    with pytest.raises(error, match=r"NaN in the scores of row 12"):
        prefill(engine, at, list(range(13)))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"index_head_dim": 40}, "index_head_dim 40 is not a multiple of 16"),
        ({"kv_lora_rank": 40}, r"kv_lora_rank \+ qk_rope_head_dim 56 is not a multiple of 16"),
        ({"kv_lora_rank": 40, "qk_rope_head_dim": 8}, "kv_lora_rank 40 is not a multiple of 16"),
    ],
)
def test_sizes_that_the_kernels_do_not_have(
    tmp_path: Path, changes: dict[str, int], part: str
) -> None:
    config = glm5_config(**changes)
    checkpoint = random_checkpoint(tmp_path / "c", config)
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "e", backend="cpu")
    with pytest.raises(NetworkError, match=part):
        builder.write(builder.describe(options))


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("index_select", "heads", 3, "width 512 for 3 of 32"),
        ("index_select", "state", 9, r"state 9 of \d+"),
        ("index_select", "inputs", "swapped", "width 16 for 16 of 32"),
        ("latent_append", "state", "kv", "its state is no latent"),
        ("latent_attention", "inputs", "self", "its selection is none"),
        ("latent_attention", "heads", 0, "width 192 for 0 of 48"),
        ("head_keys", "weight", 0, "a weight without heads"),
        ("head_values", "inputs", "wide", r"4 heads \[32 \+ 32, 32\] between widths 192 and"),
        ("layer_norm", "heads", 3, "its parts do not fit its width"),
        ("linear", "weight", "heads", "heads where one matrix is needed"),
        (None, "head_sizes", [32, 31], "its heads do not fit 256 rows"),
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
    engine = EngineDir.open(build("NVFP4"))
    plan = engine.plan()
    of_heads = next(i for i, weight in enumerate(plan["weights"]) if weight["head_sizes"])
    changed: dict[str, Any] = plan["weights"][of_heads]
    if kind:
        changed = next(op for op in plan["networks"]["target"]["ops"] if op["kind"] == kind)
    special = {
        "swapped": changed.get("inputs", [])[::-1],
        "self": changed.get("inputs", [])[:1] * 2,
        "heads": of_heads,
        "wide": next(
            op["inputs"]
            for op in plan["networks"]["target"]["ops"]
            if op["kind"] == "latent_attention"
        )[:1],
        "kv": next(i for i, state in enumerate(plan["states"]) if state["kind"] == "kv"),
    }
    changed[field] = special.get(value, value) if isinstance(value, str) else value
    monkeypatch.setattr(EngineDir, "plan", lambda *_: plan)
    with pytest.raises(ValueError, match=message):
        load_cpu_engine(engine)
