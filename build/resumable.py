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
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

_PIECE = 1 << 22
_QUEUED = 1 << 27  # bytes that may wait to be written; one larger buffer waits alone
_JOURNAL = ".journal"


class ResumableFile:
    """Context manager over one file to be written in order.

    done: the records already in the file, by key, with their data. ``tell`` and ``write``
    are those of a binary file, but a thread of the file's own writes and hashes what
    ``write`` was given, so that is not to change any more, and an error of the disk's is
    raised by a later call. ``commit`` ends a record. Without an exception, leaving the
    block sets ``sha256``. The journal stays, for the files beside this one may take long;
    ``remove_journals`` ends them all.
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
        self._end = end
        self._writer = ThreadPoolExecutor(1, "writer")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0

    @property
    def name(self) -> str:
        """The file's name in its folder."""
        return self._path.name

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> None:
        """Append bytes, or anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        self._end += len(view)
        self._later(len(view), lambda: self._write(view))

    def commit(self, key: str, data: Any) -> None:
        """All that was written since the last commit is record ``key``, described by ``data``."""
        end = self._end
        self._later(0, lambda: self._commit(key, end, data))

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self._writer.shutdown()
            while kind is None and self._waiting:
                self._waiting.popleft()[0].result()
        finally:
            self._file.close()
            self._journal.close()
        if kind is None:
            self.sha256 = self._digest.hexdigest()

    def _later(self, size: int, act: Callable[[], None]) -> None:
        """Have the writer do it, once there is room in the queue."""
        while self._waiting and (
            self._waiting[0][0].done() or self._waiting_bytes + size > _QUEUED
        ):
            future, written = self._waiting.popleft()
            self._waiting_bytes -= written
            future.result()
        self._waiting.append((self._writer.submit(act), size))
        self._waiting_bytes += size

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._file.write(piece)
            self._digest.update(piece)

    def _commit(self, key: str, end: int, data: Any) -> None:
        self._file.flush()
        record = {"key": key, "end": end, "sha256": self._digest.hexdigest(), "data": data}
        self._journal.write(json.dumps(record) + "\n")
        self._journal.flush()

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
