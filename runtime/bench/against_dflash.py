"""z-lab's published package (PyPI ``dflash``) on the same pair and prompts.

The chain's acceptance, round by round, has to be the package's own when both compute in
float32 with dequantized weights; the CPU engine's, in the checkpoint's arithmetic, is
reported beside it. Needs ``transformers`` and ``dflash`` (README: benchmarks).
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trtree.build import builder
from trtree.build.checkpoint import Checkpoint
from trtree.build.options import BuildOptions
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.runtime.executor import Request
from trtree.runtime.session import Session


def compare(options: BuildOptions, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Acceptance lengths and tokens/s of the package, the reference and the CPU engine.

    Raises:
        RuntimeError: the reference engine's rounds are not the package's.
    """
    with tempfile.TemporaryDirectory() as folder:
        sessions = {
            name: Session(
                builder.write(
                    builder.describe(options.with_changes({"output": Path(folder) / name, **how}))
                )
            )
            for name, how in (
                ("reference", {"backend": "reference", "activations": "float32"}),
                ("cpu", {"backend": "cpu"}),
            )
        }
        ids = [sessions["cpu"].tokenizer.encode(prompt) for prompt in prompts]
        results = {name: _ours(session, ids, max_tokens) for name, session in sessions.items()}
    results["dflash"] = _theirs(options, ids, max_tokens)
    block = builder.describe(options).block_size
    for index, (theirs, ours) in enumerate(
        zip(results["dflash"]["rounds"], results["reference"]["rounds"], strict=True)
    ):
        count = _full_rounds(theirs, max_tokens, block)
        if ours[:count] != theirs[:count]:
            raise RuntimeError(
                f"prompt {index}: the reference engine accepts {ours[:count]}, dflash "
                f"{theirs[:count]}"
            )
    return {
        name: {
            "acceptance_length": sum(map(sum, r["rounds"])) / sum(map(len, r["rounds"])),
            "tokens_per_s": r["tokens_per_s"],
        }
        for name, r in results.items()
    } | {"rounds_equal": True}


def load_dequantized(checkpoint: Checkpoint) -> Any:
    """transformers' model of a Qwen3 checkpoint in float32, NVFP4 weights dequantized."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = {
        k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "dtype")
    }
    tensors: dict[str, torch.Tensor] = {}
    for module in sorted({name.rpartition(".")[0] for name in checkpoint.names()}):
        name = f"{module}.weight"
        if len(checkpoint.info(name).shape) == 1:
            tensors[name] = checkpoint.tensor(name).float()
            continue
        linear = checkpoint.linear([module])
        if isinstance(linear.weight, nvfp4.QuantizedTensor):
            tensors[name] = nvfp4.dequantize(linear.weight)
        else:
            tensors[name] = linear.weight.float()
        if linear.bias is not None:
            tensors[f"{module}.bias"] = linear.bias.float()
    model = Qwen3ForCausalLM(Qwen3Config(**config)).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    if missing != tied or unexpected:
        raise RuntimeError(f"transformers lacks {unexpected} and misses {missing}")
    if tied:
        model.tie_weights()
    return model


def _ours(session: Session, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    rounds, tokens, seconds = [], 0, 0.0
    for ids in prompts:
        request = Request(
            ids, max_tokens=max_tokens, speculative=session.speculative_config("chain")
        )
        started = time.perf_counter()
        session.enqueue(request)
        lengths = [len(response.token_ids) for response in session.responses()]
        seconds += time.perf_counter() - started
        rounds.append(lengths[1:])  # the first is the prefill's token
        tokens += sum(lengths)
    return {"rounds": rounds, "tokens_per_s": tokens / seconds}


def _theirs(options: BuildOptions, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    from dflash import model as dflash

    # Its clock waits for a GPU, which need not be there.
    dflash._cuda_time = time.perf_counter
    target = load_dequantized(Checkpoint.open(options.checkpoint))
    drafter = dflash.DFlashDraftModel.from_pretrained(options.drafter, dtype=torch.float32).eval()
    rounds, tokens, seconds = [], 0, 0.0
    for ids in prompts:
        started = time.perf_counter()
        result = dflash.dflash_generate(
            drafter, target, torch.tensor([ids]), max_tokens, None, return_stats=True
        )
        seconds += time.perf_counter() - started
        rounds.append(list(result.acceptance_lengths))
        tokens += int(result.num_output_tokens)
    return {"rounds": rounds, "tokens_per_s": tokens / seconds}


def _full_rounds(lengths: Sequence[int], max_tokens: int, block: int) -> int:
    """Rounds before the package shrinks its last blocks to what max_tokens leaves."""
    done, count = 1, 0
    while count < len(lengths) and done + block <= max_tokens:
        done += lengths[count]
        count += 1
    return count
