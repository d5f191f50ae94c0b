"""Files written record by record, of which a killed process leaves what it had finished.

Beside a file stands a journal: one JSON line per record, with the file's length and
SHA-256 after it. Whoever opens the file again goes on after the last record that the
file's bytes still agree with. The same hashes serve the manifest, so that nothing is read
twice.
"""

import fcntl
import hashlib
import json
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trtree.build.write_out import WriteOut

_PIECE = 1 << 21  # written and hashed at a time: while a core's caches hold it
_PIECES = 4  # in memory
_MAPPED = 1 << 26  # read at a time
_JOURNAL = ".journal"

Bytes = npt.NDArray[np.uint8]


class ResumableFile:
    """Context manager over one file to be written in order.

    done: the records already in the file, by key, with their data. ``write`` copies what it is
    given; ``room`` is memory to be filled instead. A thread of the file's own writes and hashes
    it, and an error of the disk's is raised by a later call. ``commit`` ends a record. Without
    an exception, leaving the block sets ``sha256``. The journal stays, for the files beside
    this one may take long; ``remove_journals`` ends them all.
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
        self._end = self._on_disk = end  # of what was given, and of what was written
        self._write_out = WriteOut(self._file.fileno(), end)
        self._writer = ThreadPoolExecutor(1, "writer")
        # What it was handed, and the memory that is free again after it.
        self._waiting: deque[tuple[Future[None], Bytes | None]] = deque()
        self._free: list[Bytes] = []
        self._pieces = 0
        self._piece: Bytes = np.empty(0, np.uint8)  # being filled
        self._handed, self._filled = 0, 0  # of it

    @property
    def name(self) -> str:
        """The file's name in its folder."""
        return self._path.name

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> None:
        """Append bytes, or anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        while view:
            count = min(len(view), len(self._piece) - self._filled or _PIECE)
            self.room(count)[:] = view[:count]
            view = view[count:]

    def room(self, count: int) -> Bytes:
        """Append ``count`` bytes: uint8 [count] to be filled before the next call."""
        if self._filled + count > len(self._piece):
            self._hand_over(self._piece)
            self._piece = self._next_piece(count)
            self._handed = self._filled = 0
        start = self._filled
        self._filled += count
        self._end += count
        return self._piece[start : self._filled]

    def commit(self, key: str, data: Any) -> None:
        """All that was written since the last commit is record ``key``, described by ``data``."""
        self._hand_over()
        end = self._end
        self._later(lambda: self._commit(key, end, data))

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._hand_over()
            self._writer.shutdown()
            while kind is None and self._waiting:
                self._waiting.popleft()[0].result()
        finally:
            self._file.close()
            self._journal.close()
        if kind is None:
            self.sha256 = self._digest.hexdigest()

    def _hand_over(self, over: Bytes | None = None) -> None:
        """Have the writer write what was filled; ``over``: nothing else will be in this piece."""
        data, self._handed = self._piece[self._handed : self._filled], self._filled
        if len(data) or over is not None:
            self._later(lambda: self._write(data), over)

    def _later(self, act: Callable[[], None], over: Bytes | None = None) -> None:
        while self._waiting and self._waiting[0][0].done():
            self._take_back()
        self._waiting.append((self._writer.submit(act), over))

    def _next_piece(self, count: int) -> Bytes:
        """Memory for ``count`` bytes, once the writer is done with some."""
        if count > _PIECE:
            return np.empty(count, np.uint8)  # one large tile; not kept
        if self._pieces < _PIECES and not self._free:
            self._pieces += 1
            return np.empty(_PIECE, np.uint8)
        while not self._free:
            self._take_back()
        return self._free.pop()

    def _take_back(self) -> None:
        future, piece = self._waiting.popleft()
        future.result()
        if piece is not None and len(piece) == _PIECE:
            self._free.append(piece)

    def _write(self, data: Bytes) -> None:
        self._digest.update(data.data)
        self._file.write(data.data)
        self._on_disk += len(data)
        self._write_out.written(self._on_disk)

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
                if not _hash(file, end, int(record["end"]) - end, digest):
                    break
                if digest.hexdigest() != record["sha256"]:
                    break
                self.done[str(record["key"])] = record["data"]
                self._digest, end = digest, int(record["end"])
                kept.append(line)
        return end, kept


def _hash(file: BinaryIO, start: int, count: int, digest: Any) -> bool:
    """Add ``count`` bytes from ``start`` on; whether there were so many."""
    if start + count > os.fstat(file.fileno()).st_size:
        return False
    end = start + count
    while start < end:
        at = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        part = min(end - at, _MAPPED)
        with mmap.mmap(file.fileno(), part, access=mmap.ACCESS_READ, offset=at) as pages:
            digest.update(memoryview(pages)[start - at :])
        if hasattr(os, "posix_fadvise"):  # to find memory for ever new pages takes longer
            os.posix_fadvise(file.fileno(), at, part, os.POSIX_FADV_DONTNEED)
        start = at + part
    return True


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
