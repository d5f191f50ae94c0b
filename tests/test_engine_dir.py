"""The engine directory: how it is replaced, and what of a damaged one is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtree.build.engine_dir import EngineDir, EngineDirError, writing


def test_the_old_engine_is_back_if_the_new_one_cannot_be_moved(tmp_path: Path) -> None:
    with writing(tmp_path / "engine") as out:
        out.finish({"backend": "old"})
    with (
        pytest.raises(EngineDirError, match="cannot write the engine"),
        writing(tmp_path / "engine", force=True) as out,
    ):
        out.path.rmdir()  # so that the second of two renames fails
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert json.loads((tmp_path / "engine/config.json").read_text())["backend"] == "old"


# Damaged engines (pitfall 36)


@pytest.fixture
def engine(demo_engine: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_engine(), tmp_path / "engine"))


def test_an_engine_of_another_format_version_is_refused(engine: Path) -> None:
    manifest = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(EngineDirError, match="format version 99, this trtree reads 2"):
        EngineDir.open(engine)


@pytest.mark.parametrize("name", ["network.json", "plan.json", "target.rank0.bin"])
def test_a_changed_file_is_refused(engine: Path, name: str) -> None:
    content = bytearray((engine / name).read_bytes())
    content[len(content) // 2] ^= 1
    (engine / name).write_bytes(content)
    with pytest.raises(EngineDirError, match=rf"{name}: SHA-256 .* the manifest says"):
        EngineDir.open(engine)


def test_a_truncated_or_missing_file_is_refused(engine: Path) -> None:
    file = engine / "drafter.rank0.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EngineDirError, match=r"bytes, the manifest says"):
        EngineDir.open(engine)
    file.unlink()
    with pytest.raises(EngineDirError, match=r"missing; the manifest lists it"):
        EngineDir.open(engine)


@pytest.mark.parametrize(
    ("section", "changes", "part"),
    [
        (None, {"build_config": None}, "build_config must be of type dict, not None"),
        (None, {"files": []}, "files must be of type dict"),
        (None, {"files": {}}, "files does not list network.json"),
        (None, {"backend": 3}, "backend must be of type str"),
        (None, {"speculative_config": []}, "speculative_config must be of type dict"),
        (None, {"backend": "tensorrt"}, "tensorrt is missing"),
        ("build_config", {"page_size": "16"}, "build_config.page_size must be of type int"),
        ("build_config", {"max_seq_len": None}, "build_config.max_seq_len must be of type int"),
        ("build_config", {"page_size": 0}, "build_config.page_size must be from 1"),
        ("build_config", {"num_pages": 2**31}, "build_config.num_pages must be from 1"),
        (
            "speculative_config",
            {"tree_budget": -1},
            "speculative_config.tree_budget must be from 0",
        ),
        ("pretrained_config", {"vocab_size": 1.5}, "pretrained_config.vocab_size"),
        ("speculative_config", {"top_k": True}, "speculative_config.top_k must be of type int"),
        ("files", {"plan.json": {"bytes": 4}}, "files.plan.json.sha256 is missing"),
        ("files", {"plan.json": 4}, "files.plan.json must be of type dict"),
    ],
)
def test_a_manifest_with_wrong_keys_is_refused(
    engine: Path, section: str | None, changes: dict[str, Any], part: str
) -> None:
    manifest = json.loads((engine / "config.json").read_text())
    (manifest[section] if section else manifest).update(changes)
    (engine / "config.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(engine)
    assert part in str(caught.value)


def test_a_manifest_without_a_key_is_refused(engine: Path) -> None:
    manifest = json.loads((engine / "config.json").read_text())
    del manifest["build_config"]["num_pages"]
    (engine / "config.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineDirError, match=r"build_config\.num_pages is missing"):
        EngineDir.open(engine)
