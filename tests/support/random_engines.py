"""Engines of targets with random weights, each built and loaded once."""

import itertools
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engines import random_checkpoint
from random_drafter import random_drafter
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.runtime.engines.cpu import load_cpu_engine


class RandomEngines:
    """Engines under ``root`` by family and quantization; a drafter goes with each family.

    ``families`` are config.json's; ``calibrated_kv`` is what the caches of quantized targets are
    calibrated for; ``options`` are the build options of every engine, which a call may change.
    """

    def __init__(
        self,
        root: Path,
        families: Mapping[str, dict[str, Any]],
        *,
        calibrated_kv: str | None = None,
        **options: Any,
    ) -> None:
        self._calibrated_kv = calibrated_kv
        self._root = root
        self._families = families
        self._options = {"kv_tokens": 4096, "max_tree_budget": 128} | options
        self._numbers = itertools.count()
        # Each made once.
        self._checkpoints = cache(self._write_checkpoint)
        self._drafters = cache(self._write_drafter)
        self._engines = cache(self._build)
        self._loaded = cache(self._load)

    def checkpoint(self, family: str, algorithm: str | None = None) -> Path:
        return self._checkpoints(family, algorithm)

    def build(self, family: str, algorithm: str | None = None, **options: Any) -> Path:
        return self._engines(family, algorithm, frozenset((self._options | options).items()))

    def load(
        self,
        family: str,
        algorithm: str | None = None,
        threads: int = 1,
        isa: str = "",
        **options: Any,
    ) -> _core.Engine:
        """The same engine, caches included, for the same arguments."""
        return self._loaded(self.build(family, algorithm, **options), threads, isa)

    def _write_checkpoint(self, family: str, algorithm: str | None) -> Path:
        config = self._families[family]
        directory, kv_cache = self._root / f"{family}.{algorithm}", self._calibrated_kv
        return random_checkpoint(directory, config, algorithm=algorithm, kv_cache=kv_cache)

    def _write_drafter(self, family: str) -> Path:
        return random_drafter(self._root / f"{family}.drafter", self._families[family])

    def _build(
        self, family: str, algorithm: str | None, options: frozenset[tuple[str, Any]]
    ) -> Path:
        chosen = BuildOptions(
            checkpoint=self.checkpoint(family, algorithm),
            drafter=self._drafters(family),
            output=self._root / f"engine{next(self._numbers)}",
            **dict(options),
        )
        return builder.write(builder.describe(chosen))

    def _load(self, path: Path, threads: int, isa: str) -> _core.Engine:
        return load_cpu_engine(EngineDir.open(path), num_threads=threads, isa=isa)
