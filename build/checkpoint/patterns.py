"""Name patterns as checkpoints write them: exact names, with ``*`` for any text."""

import re
from collections.abc import Iterable


def matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for names that match any pattern; use its ``fullmatch``.

    ``prefix*`` covers every name that begins so; ``prefix.*`` covers the module
    ``prefix`` and all below it, as ModelOpt's export means it.
    """
    alternatives = []
    for pattern in patterns:
        stem, children = (pattern[:-2], r"(\..*)?") if pattern.endswith(".*") else (pattern, "")
        alternatives.append(".*".join(re.escape(part) for part in stem.split("*")) + children)
    return re.compile("|".join(alternatives) or r"(?!)")
