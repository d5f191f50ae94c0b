"""Files written record by record, of which a killed process leaves what it had finished.

Beside a file stands a journal: one JSON line per record, with the file's length and
SHA-256 after it. Whoever opens the file again goes on after the last record that the
file's bytes still agree with. The same hashes serve the manifest, so that nothing is read
twice.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

_PIECE = 1 << 22
_JOURNAL = ".journal"


class ResumableFile:
    """Context manager over one file to be written in order.

    done: the records already in the file, by key, with their data. ``tell`` and ``write``
    are those of a binary file; ``commit`` ends a record. Without an exception, leaving
    the block sets ``sha256``. The journal stays, for the files beside this one may take
    long; ``remove_journals`` ends them all.
    """

    sha256 = ""

    def __init__(self, path: Path) -> None:
        self.done: dict[str, Any] = {}
        self._path = path
        self._journal_path = path.with_name(path.name + _JOURNAL)
        self._digest = hashlib.sha256()
        end, lines = self._read_journal() if path.exists() else (0, [])
        self._file: BinaryIO = path.open("r+b" if path.exists() else "xb")
        self._file.truncate(end)
        self._file.seek(end)
        self._journal = self._journal_path.open("w", encoding="utf-8")
        self._journal.writelines(f"{line}\n" for line in lines)
        self._journal.flush()

    @property
    def name(self) -> str:
        """The file's name in its folder."""
        return self._path.name

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> None:
        """Append bytes, or anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)

    def commit(self, key: str, data: Any) -> None:
        """All that was written since the last commit is record ``key``, described by ``data``."""
        self._file.flush()
        record = {"key": key, "end": self.tell(), "sha256": self._digest.hexdigest(), "data": data}
        self._journal.write(json.dumps(record) + "\n")
        self._journal.flush()

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()
        self._journal.close()
        if kind is None:
            self.sha256 = self._digest.hexdigest()

    def _read_journal(self) -> tuple[int, list[str]]:
        """Take up the records that the file still holds; returns their end and lines."""
        end, kept = 0, []
        with suppress(OSError, ValueError, KeyError, TypeError), self._path.open("rb") as file:
            for line in self._journal_path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                digest = self._digest.copy()
                if not _hash(file, int(record["end"]) - end, digest):
                    break
                if digest.hexdigest() != record["sha256"]:
                    break
                self.done[str(record["key"])] = record["data"]
                self._digest, end = digest, int(record["end"])
                kept.append(line)
        return end, kept


def _hash(file: BinaryIO, count: int, digest: Any) -> bool:
    """Add the next ``count`` bytes; whether there were so many."""
    while count > 0:
        piece = file.read(min(count, _PIECE))
        if not piece:
            return False
        digest.update(piece)
        count -= len(piece)
    return count == 0


def remove_journals(directory: Path) -> None:
    """Once all files of a folder are complete."""
    for journal in directory.glob(f"*{_JOURNAL}"):
        journal.unlink()


@contextmanager
def staging_directory(path: Path, key: str) -> Iterator[tuple[Path, bool]]:
    """A folder beside ``path`` to be filled and renamed; yields it, and whether it is resumed.

    A process that was killed leaves its folder, and the next with the same ``key`` goes on
    in it; those of other keys are removed. An exception removes the folder.

    Raises:
        BlockingIOError: another process is filling it now.
    """
    staging = path.with_name(f".{path.name}.{key}.partial")
    for stale in path.parent.glob(f".{path.name}.*.partial"):
        if stale != staging:
            with suppress(OSError), _locked(stale):
                shutil.rmtree(stale, ignore_errors=True)
    resumed = staging.exists()
    staging.mkdir(exist_ok=True)
    with _locked(staging):
        try:
            yield staging, resumed
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go when the process ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
