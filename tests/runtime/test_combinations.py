"""What is tested part by part elsewhere, at once: families, ranks, drafters of few tokens, small
pools, prompts in chunks, adaptive budgets. Text and log-probs are those of plain decoding alone.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding import Answer
from engines import random_checkpoint
from random_drafter import random_drafter
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config
from speculators_format import restate
from thread_ranks import ThreadRanks
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import (
    BudgetPolicy,
    DecodingMode,
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SpeculativeConfig,
    TreeKind,
)

VOCAB = 80
DRAFTED = [*range(0, 40, 2), *range(40, VOCAB)]
FAMILIES = {
    "glm4_moe": glm4_moe_config(),
    "next": hybrid_config("Qwen3NextForCausalLM"),
    "glm5": glm5_config(),
}
# Six rows cost what one does.
COSTS = _core.CostModel(
    [(1.0, 1.0), (6.0, 1.0), (516.0, 52.0)], [(1.0, 0.02), (64.0, 1.28)], 0.0, [(1.0, 0.005)]
)
PLAIN = SpeculativeConfig(DecodingMode.PLAIN)
ADAPTIVE = SpeculativeConfig(DecodingMode.TREE, TreeKind.DYNAMIC, 16, policy=BudgetPolicy.ADAPTIVE)
MODES = [ADAPTIVE, SpeculativeConfig(tree_budget=30), SpeculativeConfig(DecodingMode.CHAIN), PLAIN]


def drafter_of_few_tokens(directory: Path, config: dict[str, Any]) -> Path:
    """A random drafter whose head drafts the ids of DRAFTED alone."""
    whole = random_drafter(directory / "whole", config, block_size=6)
    path = directory / "drafter"
    path.mkdir()
    fields = restate(json.loads((whole / "config.json").read_text()), draft_vocab_size=len(DRAFTED))
    (path / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(1)
    head = 0.15 * torch.randn(len(DRAFTED), config["hidden_size"], generator=generator)
    offsets = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    tensors = load_file(whole / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": head.bfloat16(), "d2t": offsets}, path / "model.safetensors"
    )
    return path


def requests(rng: random.Random, mode: SpeculativeConfig | None) -> list[Request]:
    """Fourteen that begin alike in twos and threes, the longest first; all of one mode, or each of
    its own."""
    shared = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    found = []
    for index in range(14):
        sampling = SamplingConfig(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            # A third of them write DRAFTED's first tokens alone, so that drafts are right.
            logit_bias=[(t, -100.0) for t in range(VOCAB) if t not in (0, 2, 4)]
            if index % 3 == 0
            else [],
            seed=index,
        )
        prompt = [*shared[index % 2][: rng.randrange(40)], rng.randrange(VOCAB)]
        found.append(
            Request(
                prompt,
                max_tokens=90 if index == 0 else rng.randrange(1, 30),
                stop_token_ids=[7] if index % 4 == 1 else [],
                sampling=sampling,
                speculative=mode or MODES[index % 4],
                output=OutputConfig(2, 1 if index % 5 == 0 else -1),
            )
        )
    return found


def figures(executor: Executor, asked: list[Request]) -> list[list[object]]:
    """All that a client sees of each, log-probs to the last bit; they come two rounds apart."""
    seen: dict[int, Answer] = {}

    def see(responses: list[Response]) -> bool:
        for response in responses:
            seen[response.request_id].add(response)
        return bool(responses)

    for request in asked:
        seen[executor.enqueue_request(request)] = Answer()
        for _ in range(2):
            see(executor.await_responses())
    while see(executor.await_responses()):
        pass
    return [answer.figures() for answer in seen.values()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("family", "kv_cache"), [*((family, "float") for family in FAMILIES), ("next", "fp8")]
)
def test_everything_at_once_changes_no_bit(
    tmp_path: Path, family: str, kv_cache: str, ranks: int
) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", FAMILIES[family], algorithm="NVFP4")
    drafter = drafter_of_few_tokens(tmp_path, FAMILIES[family])

    def built(name: str, **options: Any) -> EngineDir:
        options |= {"checkpoint": checkpoint, "drafter": drafter, "kv_cache": kv_cache}
        chosen = BuildOptions(output=tmp_path / name, **options)
        return EngineDir.open(builder.write(builder.describe(chosen)))

    small = {"page_size": 1, "kv_tokens": 260, "max_num_rows": 40, "max_tree_budget": 32}
    engine = built("e", tp=ranks, max_seq_len=180, **small)
    executor = Executor(
        load_cpu_engine(engine, num_threads=2) if ranks == 1 else ThreadRanks(engine),
        ExecutorConfig(cost_model=COSTS, kv_cache_config=KvCacheConfig(snapshot_interval=7)),
    )
    cold = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    lone = load_cpu_engine(built("alone"), num_threads=1)
    for _ in range(2):  # the second time on warm prefixes
        together = figures(executor, requests(random.Random(3), None))
        alone = [
            figures(Executor(lone, cold), [request])[0]
            for request in requests(random.Random(3), PLAIN)
        ]
        assert together == alone
    statistics = executor.latest_statistics()
    assert statistics.preemptions > 0
    assert statistics.cached_prompt_tokens > 0
    assert statistics.accepted_tokens > 0
    assert statistics.free_pages + statistics.cached_pages == statistics.total_pages
