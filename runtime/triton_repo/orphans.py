"""A model's process must not outlive its server.

Triton's stub notices a server that was killed, or gave up waiting for open connections, only
between calls: a thread that waits for an answer over shared memory would wait for ever, and
hold the engine's memory.
"""

import os
import threading
import time

_LOOK_SECONDS = 1.0


def end_with_server() -> None:
    """From now on, end this process when its parent has gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="orphan", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)  # no clean-up: it would talk to the server
