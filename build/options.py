"""What a user can ask of a build: a YAML file's keys, each also a flag of build_engine.py."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from trtree.build.network.network import Activations

INT32_MAX = 2**31 - 1  # engines count in int32
PATHS = ("checkpoint", "drafter", "output", "calibration_prompts")

TENSORRT_BACKENDS = ("tensorrt", "tensorrt-rtx")
BACKENDS = ("cpu", "reference", *TENSORRT_BACKENDS)


class OptionError(ValueError):
    """An option of the wrong type or out of range; names it, its value and what is allowed."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build; see ``build_engine.py --help`` for what each means."""

    checkpoint: Path = Path()
    drafter: Path | None = None
    output: Path = Path("engines/demo")
    backend: str = "cpu"
    sm: tuple[int, ...] = (120,)  # GPUs of a TensorRT engine, as compute capability times 10
    tp: int = 1  # tensor-parallel ranks
    attention: Literal["native", "plugin"] = "native"  # of a TensorRT engine
    tree: Literal["dynamic", "static"] = "dynamic"
    tree_budget: int = 16
    max_tree_budget: int | None = None  # default: tree_budget, at least 64
    top_k: int | None = None  # ranks per depth; default: as many as the budget can use
    block_size: int | None = None  # default: the drafter's
    activations: Activations | None = None  # default: the checkpoint's
    kv_cache: Literal["auto", "fp8", "float"] = "auto"  # of the target
    quantize: Literal["nvfp4"] | None = None  # the target's linears, at build time
    quantize_drafter: Literal["nvfp4"] | None = None
    page_size: int = 16
    kv_tokens: int = 8192
    max_batch_size: int = 8
    state_snapshots: int | None = None  # of recurrent state; default: 2 for each of max_batch_size
    max_num_rows: int = 512
    max_seq_len: int | None = None  # default: the checkpoint's, at most kv_tokens
    calibration_prompts: Path | None = None  # needed by static trees
    calibration_tokens: int = 64  # decoded per prompt

    def __post_init__(self) -> None:
        for name in PATHS:
            _path(name, getattr(self, name), optional=name in ("drafter", "calibration_prompts"))
        _at_least("tree_budget", self.tree_budget, 0)
        for name in (
            "page_size",
            "kv_tokens",
            "max_batch_size",
            "max_num_rows",
            "calibration_tokens",
            "tp",
        ):
            _at_least(name, getattr(self, name), 1)
        for name, least in (
            ("max_tree_budget", 0),
            ("state_snapshots", 0),
            ("top_k", 1),
            ("block_size", 1),
            ("max_seq_len", 2),
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least)
        _one_of("tree", self.tree, ("dynamic", "static"))
        _one_of("activations", self.activations, (None, "nvfp4", "bf16", "float32"))
        _one_of("kv_cache", self.kv_cache, ("auto", "fp8", "float"))
        _one_of("quantize", self.quantize, (None, "nvfp4"))
        _one_of("quantize_drafter", self.quantize_drafter, (None, "nvfp4"))
        _one_of("backend", self.backend, BACKENDS)
        for sm in self.sm:
            _at_least("sm", sm, 1)
        _one_of("attention", self.attention, ("native", "plugin"))
        if self.attention == "plugin" and not self.on_tensorrt:
            raise OptionError(
                f"attention plugin: backend {self.backend} has its own kernel; leave it out"
            )
        if self.state_snapshots and not self.paged_kv:
            raise OptionError(
                f"state_snapshots {self.state_snapshots}: engines of backend {self.backend} with "
                "attention native keep none, and have no prefix cache; leave it out"
            )
        if self.tp > 1 and self.backend == "reference":
            raise OptionError(f"tp {self.tp}: backend reference runs on one rank")
        if self.max_tree_budget is not None and self.max_tree_budget < self.tree_budget:
            raise OptionError(
                f"max_tree_budget {self.max_tree_budget} is below tree_budget {self.tree_budget}"
            )
        if self.tree == "static" and self.tree_budget == 0:
            raise OptionError("tree static: a tree_budget of 0 leaves no tree to fix; raise it")
        if self.num_pages * self.page_size > INT32_MAX:
            raise OptionError(
                f"kv_tokens {self.kv_tokens} in pages of page_size {self.page_size} are above "
                f"{INT32_MAX} tokens; lower one"
            )
        if self.max_num_rows < 1 + self.largest_budget:
            raise OptionError(
                f"max_num_rows {self.max_num_rows} is below the largest verify width "
                f"{1 + self.largest_budget} (1 + max_tree_budget)"
            )

    @property
    def on_tensorrt(self) -> bool:
        return self.backend in TENSORRT_BACKENDS

    @property
    def paged_kv(self) -> bool:
        """Whether requests share a pool of pages, or own a part of the cache each."""
        return not self.on_tensorrt or self.attention == "plugin"

    @property
    def verify_width(self) -> int:
        """Rows of a full draft tree: the budget counts nodes, the root is one more."""
        return 1 + self.tree_budget

    @property
    def largest_budget(self) -> int:
        """The largest budget a request may ask for; it bounds the verify width."""
        return max(self.tree_budget, 64) if self.max_tree_budget is None else self.max_tree_budget

    @property
    def num_snapshots(self) -> int:
        """Places for snapshots of requests' recurrent state; none where no pages are shared."""
        if not self.paged_kv:
            return 0
        return 2 * self.max_batch_size if self.state_snapshots is None else self.state_snapshots

    @property
    def num_pages(self) -> int:
        return -(-self.kv_tokens // self.page_size)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "BuildOptions":
        """A copy with every override that is not None."""
        return self.with_changes({k: v for k, v in overrides.items() if v is not None})

    def with_changes(self, changes: Mapping[str, Any]) -> "BuildOptions":
        """A copy with these options, checked like any."""
        return replace(self, **changes)


def read_options(file: Path, defaults: Mapping[str, Any] | None = None) -> BuildOptions:
    """Read a YAML file; relative checkpoint paths are relative to it.

    ``defaults`` stand for options that the file does not name.

    Raises:
        OptionError: not readable, not YAML, an unknown key, or an invalid value.
    """
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also of a date's parts
        raise OptionError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise OptionError(f"{file}: expected a mapping of options")
    known = {field.name for field in fields(BuildOptions)}
    unknown = sorted(set(map(str, data)) - known)
    if unknown:
        raise OptionError(
            f"{file}: unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    try:
        for key in PATHS:
            if isinstance(data.get(key), str):
                data[key] = Path(data[key]) if key == "output" else file.parent / data[key]
        if "sm" in data:
            data["sm"] = parse_sms(data["sm"])
        return BuildOptions(**{**(defaults or {}), **data})
    except OptionError as error:
        raise OptionError(f"{file}: {error}") from None


def parse_sms(value: Any) -> tuple[int, ...]:
    """``120``, ``"89,120"`` or ``[89, 120]`` -> (89, 120).

    Raises:
        OptionError: something else.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        if not parts:
            raise ValueError
        return tuple(sorted({int(str(part)) for part in parts}))
    except ValueError:
        raise OptionError(f"sm must be numbers such as 120 or 89,120, not {value!r}") from None


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be an integer of at least {least}, not {value!r}")
    if value > INT32_MAX:
        raise OptionError(f"{name} must be at most {INT32_MAX}, not {value}")


def _path(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, Path) or "\0" in str(value):
        shown = str(value) if isinstance(value, Path) else value
        raise OptionError(f"{name} must be a path, not {shown!r}")


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(a) for a in allowed if a is not None)
        raise OptionError(f"{name} must be one of {names}, not {value!r}")
