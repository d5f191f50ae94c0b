"""What a user can ask of the server: a YAML file's keys, each also a flag of serve.py."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml

from trtree.runtime.cli import INT32_MAX, MAX_THREADS

API_KEY_VARIABLE = "TRTREE_API_KEY"
MODES = ("plain", "chain", "tree")
POLICIES = ("fixed", "load", "adaptive")


class ServeOptionError(ValueError):
    """An option that cannot be; names it, its value and what is allowed."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server; see ``serve.py --help`` for what each means."""

    engine: Path = Path("engines/demo")
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # default: the engine directory's name
    api_key_file: Path | None = None
    tp: int | None = None  # default: what the engine was built for
    dp: int | None = None  # replicas; default: as many as mpirun started ranks for
    threads: int | None = None
    mode: str | None = None  # default: tree, plain if the engine has no drafter
    tree_budget: int | None = None  # default: the engine's
    policy: str = "fixed"
    max_queue_size: int = 1024
    max_body_mib: int = 4
    prefix_cache: bool = True
    allow_unsafe_tree_state: bool = False
    drain_seconds: int = 30
    stall_seconds: int = 60
    max_unread_mib: int = 8
    trace: Path | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535),
            ("tp", 1, INT32_MAX),
            ("dp", 1, INT32_MAX),
            ("threads", 1, MAX_THREADS),
            ("tree_budget", 0, INT32_MAX),
            ("max_queue_size", 0, INT32_MAX),
            ("max_body_mib", 1, 1024),
            ("drain_seconds", 0, 86400),
            ("stall_seconds", 1, 86400),
            ("max_unread_mib", 1, 1024),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ServeOptionError(f"{name} {value} is not between {least} and {most}")
        for name, known in (("mode", (None, *MODES)), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                allowed = ", ".join(str(one) for one in known if one)
                raise ServeOptionError(f"{name} {getattr(self, name)!r} is none of {allowed}")

    @property
    def model(self) -> str:
        return self.served_model_name or self.engine.resolve().name

    def with_overrides(self, overrides: Mapping[str, Any]) -> "ServeOptions":
        """A copy with every override that is not None."""
        return replace(self, **{k: v for k, v in overrides.items() if v is not None})

    def api_key(self) -> str | None:
        """From the file, or else the environment.

        Raises:
            ServeOptionError: the file cannot be read or holds no key.
        """
        if self.api_key_file is None:
            return os.environ.get(API_KEY_VARIABLE) or None
        try:
            key = self.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ServeOptionError(f"api_key_file {self.api_key_file}: {reason}") from None
        if not key or "\n" in key:
            raise ServeOptionError(f"api_key_file {self.api_key_file}: expected one line, the key")
        return key


def read_serve_options(file: Path) -> ServeOptions:
    """Read a YAML file; paths are relative to where the command runs.

    Raises:
        ServeOptionError: not readable, not YAML, an unknown key or an invalid value.
    """
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ServeOptionError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ServeOptionError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ServeOptionError(f"{file}: expected a mapping of options")
    known = [field.name for field in fields(ServeOptions)]
    if unknown := sorted(set(map(str, data)) - set(known)):
        raise ServeOptionError(
            f"{file}: unknown option {', '.join(unknown)}; known: {', '.join(known)}"
        )
    types = get_type_hints(ServeOptions)
    try:
        values = {name: _typed(name, value, types[name]) for name, value in data.items()}
        return ServeOptions(**values)
    except ServeOptionError as error:
        raise ServeOptionError(f"{file}: {error}") from None


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """A YAML value as its field wants it."""
    allowed = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if Path in allowed and isinstance(value, str):
        return Path(value)
    if type(value) in allowed:
        return value
    names = " or ".join("text" if t in (str, Path) else t.__name__ for t in allowed)
    raise ServeOptionError(f"{name} {value!r}: expected {names.replace('NoneType', 'null')}")
