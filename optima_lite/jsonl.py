"""JSON Lines: read with line numbers, write whole lines, resume after a crash.

Two kinds of output, because two things can go wrong:

* a quick command (tasks, select) writes to a temporary name and renames at the end, so that a
  failure leaves whatever was there before (`atomic_output`);
* a long one (gen, score) appends line by line to the file itself, so that nothing finished is
  lost; `--resume` cuts a torn last line and keeps the rest byte for byte (`ResumableOutput`).
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

import orjson

from optima_lite.errors import InputError, OutputError, SettingError
from optima_lite.locks import is_special, only_writer
from optima_lite.records import Record, kind_of

R = TypeVar("R", bound=Record)
STDIN = "<stdin>"


def dumps(obj: Record | dict[str, Any]) -> bytes:
    """One line: UTF-8, `\\n` at the end and nowhere else."""
    data = obj.to_dict() if isinstance(obj, Record) else obj
    return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


def digest(record: Record) -> bytes:
    """16 bytes that are equal for equal records: to recognise one without keeping it."""
    data = orjson.dumps(record.to_dict(), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()


def parse_line(line: bytes, source: str, number: int) -> dict[str, Any]:
    """Decode one line; InputError says where and why not."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        torn = "" if line.endswith(b"\n") else " (the last line is torn: was its writer stopped?)"
        raise InputError(f"not JSON: {error}{torn}", source, number) from None
    if not isinstance(data, dict):
        raise InputError("expected a JSON object on each line", source, number)
    return data


class Reader(Generic[R]):
    """Iterate over the records of `path` ("-" is stdin); blank lines are passed over.

    `kind` is what a line holds; where it is one of several, each line's fields tell.

    With `skip_bad`, lines that cannot be read are counted in `skipped` and `on_bad` gets each
    error; without it the first one is raised.
    """

    def __init__(
        self,
        path: str,
        kind: type[R] | tuple[type[R], ...],
        skip_bad: bool = False,
        on_bad: Callable[[InputError], None] | None = None,
    ):
        self.path = path
        self.kinds = kind if isinstance(kind, tuple) else (kind,)
        self.skip_bad = skip_bad
        self.on_bad = on_bad
        self.skipped = 0
        self.source = STDIN if path == "-" else path
        self.number = 0
        self._stream: Iterable[bytes] = ()

    def __iter__(self) -> Iterator[R]:
        with self._open() as stream:
            self._stream = stream
            for self.number, line in enumerate(stream, start=1):
                if self.number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                try:
                    yield self._record(line)
                except InputError as error:
                    if not self.skip_bad:
                        raise
                    self.skipped += 1
                    if self.on_bad:
                        self.on_bad(error)

    def _record(self, line: bytes) -> R:
        data = parse_line(line, self.source, self.number)
        found = kind_of(data)
        kind = next((kind for kind in self.kinds if kind is found), self.kinds[0])
        try:
            return kind.from_dict(data)
        except InputError as error:
            hint = f" (this is a line of {found.__name__})" if found not in (None, kind) else ""
            raise InputError(error.reason + hint, self.source, self.number) from None

    def ready(self) -> bool:
        """Whether the next line can be had without waiting for whoever writes our pipe."""
        return not isinstance(self._stream, PipeLines) or self._stream.ready()

    def error(self, message: str) -> InputError:
        """An error about the record that was read last."""
        return InputError(message, self.source, self.number)

    def _open(self) -> AbstractContextManager[Iterable[bytes]]:
        if self.path == "-":
            return nullcontext(PipeLines(sys.stdin.fileno()))
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise InputError(error.strerror or str(error), self.path) from None


class PipeLines:
    """Lines of a file descriptor, each given out as soon as it is there.

    Unlike a buffered reader it can tell whether a line is there, so that who has other work (turns
    that are running) need not wait for a slow writer.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._buffer = b""
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                yield line + newline
            elif self._ended:
                if line:
                    yield line
                return
            else:
                self._read()

    def ready(self) -> bool:
        """Whether a whole line, or the end, can be had at once."""
        while not self._ended and b"\n" not in self._buffer:
            if not select.select([self._descriptor], [], [], 0)[0]:
                return False
            self._read()
        return True

    def _read(self) -> None:
        data = os.read(self._descriptor, 1 << 16)
        self._buffer += data
        self._ended = not data


def groups(reader: Reader[R], key: Callable[[R], str]) -> Iterator[list[R]]:
    """Neighbouring records with the same key, as lists; a key that comes back is an error.

    Only the current group and 8 bytes a key are held, so the input may be of any length.
    """
    seen: set[int] = set()
    group: list[R] = []
    current: str | None = None
    last = 0
    for record in reader:
        name, line = key(record), reader.number
        if name != current:
            if group:
                # What the caller finds wrong with the group stands in the group's lines.
                reader.number = last
                yield group
                reader.number = line
            if hash(name) in seen:
                raise reader.error(
                    f"{name} appeared before: the lines of one task must stand together"
                )
            seen.add(hash(name))
            group, current = [], name
        group.append(record)
        last = line
    if group:
        reader.number = last
        yield group


def check_free(path: str, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse early, before a model is loaded, to write where something is."""
    if path == "-":
        return
    if not path:
        raise SettingError("-o needs a name")
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{path} is a directory")
    if not target.parent.is_dir():
        raise OutputError(f"{target.parent} does not exist: mkdir -p it first")
    # A fifo or /dev/null is a place to write to, not a file that could be lost.
    if target.is_file() and not (resume or overwrite):
        raise OutputError(f"{path} exists: --overwrite replaces it")


def refuse_input(input: str, output: str) -> None:
    """Refuse an output that grows while it is read: opening it would empty the input."""
    if output == "-" or not Path(output).is_file():
        return
    with suppress(OSError, ValueError):  # no such input (said when it is read), no real stdin
        source = os.fstat(sys.stdin.fileno()) if input == "-" else os.stat(input)
        if os.path.samestat(source, os.stat(output)):
            raise OutputError(f"{output} is the input: write to another file")


@contextmanager
def atomic_output(path: str, *, overwrite: bool = False) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes bytes to stdout ("-") or to `path`, whole or not at all.

    Writes to stdout are flushed one by one, so that a reader downstream can start. Raises
    OutputError where the file may not be written, or another run is writing it.
    """
    check_free(path, overwrite=overwrite)
    if path == "-":
        yield _write_stdout
        return
    if is_special(Path(path)):  # check_free has refused directories
        with open(path, "wb") as stream:
            yield _writer(stream, flush=True)
        return
    target = Path(path)
    # A run that appends to the file would go on writing to one that has no name any more.
    with only_writer(path):
        try:
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        except OSError as error:
            raise OutputError(f"{path}: {error.strerror}") from None
        try:
            with os.fdopen(handle, "wb") as stream:
                yield _writer(stream, flush=False)
                stream.flush()
                os.fsync(stream.fileno())
            usual_mode(name)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise


class ResumableOutput:
    """An append-only JSONL output that a killed run can continue. Use it in a `with`, which keeps
    other runs out and raises OutputError or SettingError where the file may not be written.

    `kept` are the finished records of the run before (only with `resume`): iterate them once to
    check settings and collect ids, then `write` goes on after them. With `overwrite`, the old file
    lives until the first new record is there.
    """

    def __init__(self, path: str, *, resume: bool = False, overwrite: bool = False):
        if resume and overwrite:
            raise SettingError("--resume and --overwrite exclude each other")
        if resume and path == "-":
            raise SettingError("--resume needs a file: add -o FILE")
        if resume and is_special(Path(path)):
            raise SettingError(f"--resume needs a file, and {path} is a pipe or device")
        self.path = path
        self._resume, self._overwrite = resume, overwrite
        self._stream: IO[bytes] | None = None
        self._held = ExitStack()
        self._keep = 0  # bytes
        self._number = 0

    def __enter__(self) -> ResumableOutput:
        if self.path == "-":
            return self
        check_free(self.path, resume=True)
        with ExitStack() as held:
            held.enter_context(only_writer(self.path))
            if Path(self.path).is_file():  # asked now that nobody else can make it
                if not (self._resume or self._overwrite):
                    raise OutputError(
                        f"{self.path} exists: --resume goes on after its records, "
                        "--overwrite replaces it"
                    )
                self._keep = Path(self.path).stat().st_size if self._resume else 0
            self._held = held.pop_all()
        return self

    def kept(self, kind: type[R]) -> Iterator[R]:
        """The finished records; afterwards a torn last line is known and will be cut."""
        if not self._keep:
            return
        end = 0
        with open(self.path, "rb") as stream:
            for self._number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    if not line.startswith(b"{"):
                        raise self.error("not a torn record, nor any record")
                    break
                data = parse_line(line, self.path, self._number)
                try:
                    yield kind.from_dict(data)
                except InputError as error:
                    raise self.error(error.reason) from None
                end += len(line)
        self._keep = end

    def error(self, message: str) -> InputError:
        """An error about the record that `kept` gave last."""
        return InputError(message, self.path, self._number)

    def truncate_to(self, records: int) -> None:
        """Keep only the first so many lines (whole groups, say)."""
        end = 0
        if records:
            with open(self.path, "rb") as stream:
                for _ in range(records):
                    end += len(stream.readline())
        self._keep = end

    def write(self, record: Record) -> None:
        """Write one record and flush it."""
        line = dumps(record)
        if self.path == "-":
            _write_stdout(line)
            return
        if self._stream is None:
            self._open()
        assert self._stream is not None
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:  # a full disk, mostly; --resume cuts what it left of the line
            raise OutputError(f"{self.path}: {error.strerror}") from None

    def _open(self) -> None:
        try:
            mode = "ab" if self._resume else "wb"
            self._stream = open(self.path, mode)  # noqa: SIM115 - closed by __exit__
            if self._resume:
                self._stream.truncate(self._keep)
        except OSError as error:
            raise OutputError(f"{self.path}: {error.strerror}") from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._held:
            if error is None and self.path != "-" and self._stream is None:
                self._open()  # an empty input makes an empty file; a torn line is cut all the same
            if self._stream is not None:
                self._stream.close()


def require_same(old: dict[str, Any], new: dict[str, Any], path: str) -> None:
    """Raise OutputError naming every setting in which a kept record differs from this run."""
    changed = [
        f"{key} was {_shown(old.get(key))}, now {_shown(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise OutputError(
            f"{path} was made with other settings: {'; '.join(changed)} (--overwrite, or removing "
            "it, starts anew)"
        )


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)


def incomplete(path: str, whole: int, name: str, found: int, wanted: int) -> OutputError:
    """The error about a group in the middle of an output that lacks lines: a person cut them."""
    return OutputError(
        f"{path}:{whole + 1}: {name} has {found} of {wanted} lines, and others follow: keep what "
        f"stands before with `head -n {whole}`, then --resume"
    )


class Kept:
    """The finished groups of an earlier run, which the input must begin with, task for task.

    `groups` are task ids with what else must be the same, part by part. `skip` says whether the
    next group of the input is one of them; `end` must be called when the input has ended.
    """

    def __init__(self, path: str, groups: dict[str, dict[str, Any]]):
        self._path = path
        self._due = deque(groups.items())
        self.count = 0

    def skip(self, name: str, parts: Callable[[], dict[str, Any]]) -> bool:
        """Raises OutputError where another task is due, or the task is not what it was."""
        if not self._due:
            return False
        due, known = self._due.popleft()
        if due != name:
            raise OutputError(
                f"{self._path} was made from other input: it goes on with {due}, this with {name}"
            )
        changed = [part for part, value in parts().items() if known.get(part) != value]
        if changed:
            raise OutputError(
                f"{self._path} was made from other input: {' and '.join(changed)} changed in {name}"
            )
        self.count += 1
        return True

    def end(self) -> None:
        """Raises OutputError where the input was shorter than what is kept."""
        if self._due:
            raise OutputError(
                f"{self._path} was made from other input: it also has {self._due[0][0]}"
            )


def write_all(write: Callable[[bytes], None], records: Iterable[Record]) -> int:
    """Write records one by one; returns how many."""
    count = 0
    for count, record in enumerate(records, start=1):  # noqa: B007
        write(dumps(record))
    return count


def _writer(stream: IO[bytes], flush: bool) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data)
        if flush:
            stream.flush()

    return write


def _write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def usual_mode(path: str | Path) -> None:
    """Give a file the permissions of any new one: those made as temporary files are private."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)
