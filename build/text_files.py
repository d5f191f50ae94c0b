"""What a checkpoint brings beside weights: its tokenizer, and where generation stops."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trtree.build.checkpoint import CheckpointError
from trtree.build.checkpoint.json_file import read_json
from trtree.build.engine_dir import GENERATION_CONFIG

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def generation_config(
    checkpoint: Path, config: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    """generation_config.json with the stop ids checked; ``config`` has them if it does not.

    Args:
        config: the checkpoint's config.json.

    Raises:
        CheckpointError: not a JSON object, or an eos_token_id that is no token.
    """
    file = checkpoint / GENERATION_CONFIG
    generation = read_json(file) if file.exists() else {}
    if generation.get("eos_token_id") is None:
        file = checkpoint / "config.json"
        generation["eos_token_id"] = config.get("eos_token_id")
    _check_stop_ids(file, generation["eos_token_id"], vocab_size)
    return generation


def check_tokenizer(checkpoint: Path, vocab_size: int) -> None:
    """Refuse a tokenizer that generation could not use with a vocabulary of this size.

    Raises:
        CheckpointError: missing, not readable, empty, or with ids the model does not have;
            or its tokenizer_config.json, if there, is no JSON object.
    """
    file = checkpoint / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint}: {TOKENIZER_FILE} is missing; save the tokenizer beside the weights"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
    settings = checkpoint / TOKENIZER_CONFIG
    if settings.exists():
        read_json(settings)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise CheckpointError(f"{file}: no token in it; save the checkpoint's own tokenizer")
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"{file}: token id {max(ids)} is outside the model's vocab_size {vocab_size}; "
            "save the tokenizer this checkpoint was trained with"
        )
    # Vocabularies are padded to round sizes, but not to twice theirs.
    if 2 * len(ids) < vocab_size:
        log.warning(
            "%s: %d tokens, the model's vocab_size is %d: is it this checkpoint's tokenizer?",
            file,
            len(ids),
            vocab_size,
        )


def _check_stop_ids(file: Path, stop: Any, vocab_size: int) -> None:
    """A token id, a list of them, or none at all."""
    for token in stop if isinstance(stop, list) else [] if stop is None else [stop]:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id must be a token id below vocab_size {vocab_size}, or a "
                f"list of them, not {stop!r}"
            )


def size_text(size: int) -> str:
    """Bytes as a person reads them: ``1.50 GiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1024:.1f} KiB"
