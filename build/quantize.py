"""``python -m trtree.build.quantize``: calibrated quantization with NVIDIA's ModelOpt.

Writes a checkpoint that ``build_engine.py`` reads. The input scales come from running the
model over prompts, so give text of the kind it will see. Needs the extra ``modelopt``.
NVFP4_AWQ and NVFP4_SVD try many scales for every linear, which is slow without a GPU, and not
for experts that transformers stacks in one tensor. Without calibration data,
``build_engine.py --quantize nvfp4`` quantizes weights alone and needs none of this.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.checkpoint.quantized import check_plain
from trtree.build.engine_dir import GENERATION_CONFIG
from trtree.build.modelopt_cpu import on_cpu
from trtree.build.options import OptionError
from trtree.build.text_files import TOKENIZER_CONFIG, TOKENIZER_FILE
from trtree.runtime.cli import positive, run_command

# ModelOpt's names of its configurations.
_CONFIGS = {
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "NVFP4_AWQ": "NVFP4_AWQ_LITE_CFG",
    "NVFP4_SVD": "NVFP4_SVDQUANT_DEFAULT_CFG",
    "FP8": "FP8_DEFAULT_CFG",
}
_SEARCHED = ("NVFP4_AWQ", "NVFP4_SVD")
_KV_CONFIGS = {"FP8": "FP8_KV_CFG", "NVFP4": "NVFP4_KV_CFG"}
_COPIED = (TOKENIZER_FILE, TOKENIZER_CONFIG, GENERATION_CONFIG, "chat_template.jinja")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), (CheckpointError, OptionError))


def _run(args: argparse.Namespace) -> int:
    quantize(
        args.checkpoint,
        args.output,
        algorithm=args.algorithm,
        prompts=args.prompts,
        kv_cache=args.kv_cache,
        max_tokens=args.max_tokens,
    )
    print(f"{args.output}: {args.algorithm}")
    return 0


def quantize(
    checkpoint: Path,
    output: Path,
    *,
    algorithm: str,
    prompts: Path,
    kv_cache: str | None = None,
    max_tokens: int = 512,
) -> None:
    """Quantize ``checkpoint`` and write it to ``output``, which appears complete or not at all.

    Args:
        prompts: calibration text, one a line, of which max_tokens tokens each are used.
        kv_cache: also calibrate scales for the KV cache.

    Raises:
        CheckpointError: not a plain checkpoint, or one without a tokenizer.
        OptionError: output exists, no prompts, ModelOpt is missing, or cannot do it.
    """
    if output.exists():
        raise OptionError(f"{output} exists; give another --output")
    opened = Checkpoint.open(checkpoint)
    check_plain(checkpoint, opened.quantization)
    batches = _token_batches(checkpoint, prompts, max_tokens)
    model, config, export = _prepare(checkpoint, algorithm, kv_cache)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        partial.chmod(0o755)
        export(model, config, batches, partial)
        for name in _COPIED:
            if (checkpoint / name).is_file() and not (partial / name).exists():
                shutil.copyfile(checkpoint / name, partial / name)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _token_batches(checkpoint: Path, prompts: Path, max_tokens: int) -> list[list[int]]:
    try:
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise OptionError(f"--prompts {prompts}: cannot be read: {error}") from None
    if not lines:
        raise OptionError(f"--prompts {prompts}: holds no text")
    file = checkpoint / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{checkpoint}: {TOKENIZER_FILE} is missing")
    tokenizer = Tokenizer.from_file(str(file))
    return [ids for line in lines if (ids := tokenizer.encode(line).ids[:max_tokens])]


def _prepare(checkpoint: Path, algorithm: str, kv_cache: str | None) -> tuple[Any, Any, Any]:
    """The loaded model, ModelOpt's configuration, and what quantizes and exports."""
    try:
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise OptionError(f"{error}; install the extra: pip install 'trtree[modelopt]'") from None
    config = getattr(mtq, _CONFIGS[algorithm])
    if algorithm in _SEARCHED and not torch.cuda.is_available():
        config = on_cpu(config)
    if kv_cache is not None:
        kv = getattr(mtq, _KV_CONFIGS[kv_cache])["quant_cfg"]
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, kv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    model.config.architectures = [type(model).__name__]
    stacked = (name for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name)
    if algorithm in _SEARCHED and (name := next(stacked, None)):
        raise OptionError(
            f"--algorithm {algorithm}: ModelOpt searches scales of experts that are modules each, "
            f"and {name} is one tensor for all of a layer; use --algorithm NVFP4"
        )

    def export(model: Any, config: Any, batches: list[list[int]], directory: Path) -> None:
        def forward(model: Any) -> None:
            with torch.no_grad():
                for ids in batches:
                    model(torch.tensor([ids], device=device))

        quantized = mtq.quantize(model, config, forward)
        export_hf_checkpoint(quantized, dtype=torch.bfloat16, export_dir=str(directory))

    return model, config, export


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.build.quantize", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="bf16, fp16 or float32")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--algorithm", choices=tuple(_CONFIGS), default="NVFP4", help="default: %(default)s")
    add(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="calibration text, one a line: some hundred lines of the kind that will be served",
    )
    add("--kv-cache", choices=tuple(_KV_CONFIGS), help="also calibrate the KV cache's scales")
    add(
        "--max-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="used of each prompt (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
