"""Writes model repositories."""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtree.build.engine_dir import EngineDir
from trtree.runtime.triton_repo.layouts import (
    Layout,
    RepositoryModel,
    engine_settings,
    models_of,
)
from trtree.runtime.triton_repo.model_config import can_check, check
from trtree.runtime.triton_repo.settings import EngineSettings

IN_ENGINE = "triton"  # the repository's folder in an engine directory
_MODEL_PY = '''"""Run by Triton's python backend; the model is part of the trtree package."""

from trtree.runtime.triton_repo.models import {runs} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_log = logging.getLogger(__name__)


class RepositoryError(ValueError):
    """A model repository that cannot be written."""


def write_into_engine(
    directory: Path, manifest: Mapping[str, Any], tables: Mapping[str, Any] | None
) -> None:
    """``triton/`` of an engine directory that is being written."""
    settings = engine_settings(EngineSettings(engine_dir="../.."), manifest, tables)
    _write(directory / IN_ENGINE, _models("llmapi", settings, manifest, decoupled=True))


def write_repository(
    engine: Path,
    output: Path,
    *,
    layout: Layout = "llmapi",
    settings: EngineSettings | None = None,
    decoupled: bool = True,
    force: bool = False,
) -> list[str]:
    """Write a repository for an engine; returns its models' names.

    It appears complete or not at all. Its paths to the engine are relative, so that both can
    be moved together.

    Args:
        settings: what its parameters are to say, over what the engine was built for.
        force: replace a repository that is there.

    Raises:
        EngineDirError: no engine there.
        RepositoryError: ``output`` exists, or cannot be written.
        ModelConfigError: a configuration is not as it was meant.
    """
    engine_dir = EngineDir.open(engine, verify=False)
    _check_target(output, force)
    path = os.path.relpath(engine.resolve(), output.resolve() / "model")
    chosen = replace(settings or EngineSettings(), engine_dir=path)
    chosen = engine_settings(chosen, engine_dir.manifest, engine_dir.tree_tables())
    models = _models(layout, chosen, engine_dir.manifest, decoupled=decoupled)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            staging.chmod(0o755)
            _write(staging, models)
            if output.exists():
                shutil.rmtree(output)
            staging.replace(output)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise RepositoryError(f"{output}: cannot write: {error.strerror or error}") from None
    return [model.config.name for model in models]


def _models(
    layout: Layout, settings: EngineSettings, manifest: Mapping[str, Any], *, decoupled: bool
) -> list[RepositoryModel]:
    max_batch_size = manifest["build_config"]["max_batch_size"]
    return models_of(layout, settings, decoupled=decoupled, max_batch_size=max_batch_size)


def _write(repository: Path, models: Sequence[RepositoryModel]) -> None:
    texts = [model.config.to_text() for model in models]
    if can_check():
        for model, text in zip(models, texts, strict=True):
            check(model.config, text)
    else:
        _log.info(
            "the Triton repository is not checked against Triton's schema; "
            "pip install 'trtree[triton]' to have that done"
        )
    for model, text in zip(models, texts, strict=True):
        version = repository / model.config.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(text)
        if model.runs is None:
            (version / ".keep").touch()  # Triton wants the folder, git and rsync want a file
        else:
            (version / "model.py").write_text(_MODEL_PY.format(runs=model.runs))


def _check_target(output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not force:
        raise RepositoryError(f"{output} exists; pass --force to replace it, or another --output")
    entries = list(output.iterdir()) if output.is_dir() else [output]
    if any(not (entry / "config.pbtxt").is_file() for entry in entries):
        raise RepositoryError(f"{output} exists and is no model repository; not replacing it")
