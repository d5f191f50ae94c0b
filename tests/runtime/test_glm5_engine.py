"""GLM-5 on the CPU engine: op by op against the reference, bitwise lossless, served.

Contexts below and above the top-k of 12: a sibling seen too early would take another key's
place in a row's choice, and every test here would see it.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwise import Batch, batches, check_commits, check_instruction_sets, check_trees, few_examples
from decoding import run, run_alone
from engines import random_checkpoint, write_target
from op_by_op import OpByOp
from random_engines import RandomEngines
from random_glm5 import glm5_config, random_glm5
from request_mixes import mixed_requests
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    Executor,
)

VOCAB = 80
CONFIG = glm5_config(
    num_hidden_layers=3, indexer_types=["full", "shared", "full"], n_routed_experts=16
)
# Op by op: ops compute in float32 here, in float64 in the reference.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> RandomEngines:
    root = tmp_path_factory.mktemp("glm5")
    return RandomEngines(root, {"glm5": CONFIG}, max_num_rows=2048)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", None])
@pytest.mark.parametrize("prompt_length", [5, 37])
def test_op_by_op(engines: RandomEngines, algorithm: str | None, prompt_length: int) -> None:
    _, engine = open_engine(engines.build("glm5", algorithm))
    _, reference = open_engine(engines.build("glm5", algorithm, backend="reference"))
    check = OpByOp(engine, reference)
    check.prompt_and_tree(VOCAB, prompt_length)
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


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
@few_examples(10)
@given(
    seed=st.integers(0, 2**32),
    batch=batches(prefixes=40, budgets=[0, 1, 7, 31, 32, 33, 64, 65, 128], requests=6),
    page_size=st.sampled_from([1, 16]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    engines: RandomEngines,
    algorithm: str | None,
    seed: int,
    batch: Batch,
    page_size: int,
    threads: int,
) -> None:
    engine = engines.load("glm5", algorithm, threads, page_size=page_size)
    alone = engines.load("glm5", algorithm)
    check_trees(engine, alone, batch, seed=seed, vocab=VOCAB, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_committed_path_continues_as_if_decoded_plainly(
    engines: RandomEngines, page_size: int
) -> None:
    """Commit moves latents and the indexer's keys across pages."""
    engine = engines.load("glm5", "NVFP4", 2, page_size=page_size)
    alone = engines.load("glm5", "NVFP4")
    committed = check_commits(engine, alone, vocab=VOCAB, page_size=page_size)
    assert committed > 2 * CONFIG["index_topk"]


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
def test_every_instruction_set_gives_the_same_bits(
    engines: RandomEngines, algorithm: str | None
) -> None:
    check_instruction_sets(lambda isa: engines.load("glm5", algorithm, isa=isa), VOCAB)


@pytest.mark.parametrize(
    ("kv_tokens", "page_size"), [(4096, 16), (320, 16), (320, 1)], ids=["room", "pre-empts", "1"]
)
def test_mixed_requests_answer_as_if_alone(
    engines: RandomEngines, kv_tokens: int, page_size: int
) -> None:
    """Also where the pool is too small for all at once. Prompts begin alike, and their pages are
    found again."""
    requests = mixed_requests(12, random.Random(2), vocab=VOCAB)
    expected = run_alone(engines.load("glm5", "NVFP4"), requests)
    engine = engines.load("glm5", "NVFP4", 2, kv_tokens=kv_tokens, page_size=page_size)
    executor = Executor(engine)
    assert [tokens for tokens, _ in run(executor, requests)] == expected
    statistics = executor.latest_statistics()
    assert (statistics.preemptions > 0) == (kv_tokens == 320)
    cached = statistics.cached_prompt_tokens
    assert [tokens for tokens, _ in run(executor, requests)] == expected  # on warm prefixes
    assert executor.latest_statistics().cached_prompt_tokens > cached


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
    engines: RandomEngines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    field: str,
    value: Any,
    message: str,
) -> None:
    engine = EngineDir.open(engines.build("glm5", "NVFP4"))
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
