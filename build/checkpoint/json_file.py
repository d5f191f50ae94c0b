"""Reading a JSON object of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from trtree.build.checkpoint.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value
