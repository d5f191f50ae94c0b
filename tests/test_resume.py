"""A conversion that was killed goes on where it stopped, and ends in the same bytes."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engines import DEMO
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint, StoredLinear
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.build.options import BuildOptions
from trtree.build.resumable import ResumableFile, remove_journals, staging_directory

# Kills itself once it has told of some weights.
KILLED = """
import os, signal, sys
from pathlib import Path
from trtree.build import builder
from trtree.build.options import BuildOptions
left = int(sys.argv[4])
def progress(count):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
target, drafter, output = map(Path, sys.argv[1:4])
options = BuildOptions(checkpoint=target, drafter=drafter, output=output)
builder.write(builder.describe(options), progress=progress)
"""


def options_for(output: Path) -> BuildOptions:
    return BuildOptions(checkpoint=DEMO / "target_nvfp4", drafter=DEMO / "drafter", output=output)


def kill_after(weights: int, output: Path) -> Path:
    """Build until then; returns the folder that is left."""
    arguments = [DEMO / "target_nvfp4", DEMO / "drafter", output, weights]
    run = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False)
    assert run.returncode == -signal.SIGKILL
    (left,) = output.parent.glob(f".{output.name}.*.partial")
    return left


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The linears that are read from now on."""
    seen: list[Sequence[str]] = []
    load = Checkpoint.stored_linear

    def linear(self: Checkpoint, modules: Sequence[str]) -> StoredLinear:
        seen.append(modules)
        return load(self, modules)

    monkeypatch.setattr(Checkpoint, "stored_linear", linear)
    return seen


def files_of(engine: Path) -> dict[str, object]:
    found: dict[str, object] = EngineDir.open(engine).manifest["files"]
    return found


def test_it_goes_on_where_it_was_killed(tmp_path: Path, loaded: list[Sequence[str]]) -> None:
    output = tmp_path / "engine"
    left = kill_after(20, output)
    assert (left / "target.rank0.bin.journal").exists()
    told: list[int] = []
    builder.write(builder.describe(options_for(output)), progress=told.append)
    resumed = len(loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]

    whole = builder.write(builder.describe(options_for(tmp_path / "whole")))
    assert 0 < resumed < len(loaded) - resumed
    assert files_of(output) == files_of(whole)  # sizes and hashes, read back by open()
    assert sum(told) >= (output / "target.rank0.bin").stat().st_size


def test_finished_files_are_not_written_again(tmp_path: Path, loaded: list[Sequence[str]]) -> None:
    """Killed in the drafter's weights, it keeps all of the target's."""
    output = tmp_path / "engine"
    description = builder.describe(options_for(output))
    stored = [w.owner for w in description.weights.stored.values()]
    assert (kill_after(stored.count("target") + 1, output) / "drafter.rank0.bin").exists()
    builder.write(description)
    of_target = [modules for modules in loaded if modules[0].startswith("model.")]
    assert loaded and not of_target


@pytest.mark.parametrize("fault", ["flip", "truncate", "journal"])
def test_damaged_leftovers_are_written_again(
    tmp_path: Path, loaded: list[Sequence[str]], fault: str
) -> None:
    output = tmp_path / "engine"
    file = kill_after(20, output) / "target.rank0.bin"
    if fault == "flip":
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(bytes(data))
    elif fault == "truncate":
        os.truncate(file, 10)
    else:
        file.with_name(f"{file.name}.journal").write_text("no JSON\n")
    builder.write(builder.describe(options_for(output)))
    resumed = len(loaded)
    whole = builder.write(builder.describe(options_for(tmp_path / "whole")))
    assert resumed == len(loaded) - resumed  # the first weight is damaged: all are read
    assert files_of(output) == files_of(whole)


def test_other_options_start_afresh(tmp_path: Path, loaded: list[Sequence[str]]) -> None:
    output = tmp_path / "engine"
    left = kill_after(20, output)
    options = options_for(output).with_changes({"quantize_drafter": "nvfp4"})
    builder.write(builder.describe(options))
    assert not left.exists()
    manifest = EngineDir.open(output).manifest
    assert manifest["build_config"]["quantization"]["drafter"]["by"] == "builder"


def test_two_processes_do_not_fill_one_folder(tmp_path: Path) -> None:
    description = builder.describe(options_for(tmp_path / "engine"))
    key = builder.resume_key(description)
    with (
        staging_directory(tmp_path / "engine", key),
        pytest.raises(EngineDirError, match="another process is building this engine now"),
    ):
        builder.write(description)


def test_an_error_of_the_disk_is_raised(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"), ResumableFile(tmp_path / "file") as file:
            file.write(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not file.sha256


def test_a_record_ends_where_it_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt), ResumableFile(path) as file:
        file.write(b"first")
        file.commit("a", {"bytes": 5})
        file.write(b"half of the sec")
        raise KeyboardInterrupt
    with ResumableFile(path) as file:
        assert file.done == {"a": {"bytes": 5}} and file.tell() == 5
        file.write(b"second")
        file.commit("b", None)
    assert path.read_bytes() == b"firstsecond"
    remove_journals(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
