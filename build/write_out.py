"""Large files go to the disk while they are written, and out of memory behind the writer.

Left alone, the kernel keeps what was written until much of memory is taken by it. Finding
that memory can cost more than all the work of a conversion, and whoever waits for the file
to be on the disk waits for most of it at the end.
"""

import ctypes
import os

_WINDOW = 1 << 24
_WINDOWS = 4  # that may be on their way to the disk
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # linux/fs.h, SYNC_FILE_RANGE_*
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class WriteOut:
    """Follows one file's writer; it keeps the last 64 MiB in memory. Where the system has no
    such calls, nothing happens."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._begun = self._done = start

    def written(self, end: int) -> None:
        """The file has its bytes up to ``end``."""
        if _sync_file_range is None or not hasattr(os, "posix_fadvise"):
            return
        # Whatever is wrong with the file, the next write will say it.
        while end - self._begun >= _WINDOW:
            _sync_file_range(self._descriptor, self._begun, _WINDOW, _WRITE)
            self._begun += _WINDOW
            if self._begun - self._done > _WINDOWS * _WINDOW:
                wait = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
                _sync_file_range(self._descriptor, self._done, _WINDOW, wait)
                os.posix_fadvise(self._descriptor, self._done, _WINDOW, os.POSIX_FADV_DONTNEED)
                self._done += _WINDOW
