"""One writer per output: a second run that would write to the same file or directory is refused.

Two runs that append to one file double or tear its lines, and two trainings in one directory
remove each other's checkpoints. The lock is the kernel's (flock) on a small hidden file beside the
output, so it is gone when its holder is, however that ended; the hidden file goes at the end of a
run, and one that a killed run left behind means nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optima_lite.errors import OutputError


def is_special(path: Path) -> bool:
    """Whether this is a fifo or device: a place to write to, not something that could be lost."""
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def only_writer(path: str | Path) -> Iterator[None]:
    """Hold the right to write to `path`, a file or directory that need not exist.

    Raises OutputError at once where another process has it. Where no lock can be made (a read-only
    directory, a file system without locks), and at fifos and devices, nobody is kept out.
    """
    target = Path(os.path.realpath(path))  # one file may have several names
    if is_special(target):
        yield
        return
    lock = target.with_name(f".{target.name}.lock")
    handle = _acquire(lock, path)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                lock.unlink()  # while it is held: who has opened it before will see that it is gone
            os.close(handle)


def _acquire(lock: Path, path: str | Path) -> int | None:
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise OutputError(f"another run is writing {path}: wait for it, or stop it") from None
        except OSError:
            os.close(handle)
            return None
        # The holder before may have removed the file between our opening and our locking it.
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)
