"""Read a data set's raw rows from wherever the user has them.

A source is a local file (a JSON list, JSON Lines or Parquet), a directory in the hub's layout
(`train-00000-of-00002.parquet`, …) or a hub id. Nothing here runs code that comes with data: no
loading scripts, no `trust_remote_code`. JSON Lines, Parquet and the hub are read row by row; a JSON
list has to be held whole.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from optima_lite.errors import InputError
from optima_lite.jsonl import parse_line

_BATCH = 256  # Parquet rows decoded at a time: about 2 MB of HotpotQA
_SHARD = re.compile(r"(?P<split>.+?)(-(?P<index>\d+)-of-(?P<count>\d+))?(-[0-9a-f]{16})?\.parquet")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".csv", ".gz", ".zip")
_FORMATS = "a JSON list, JSON Lines (.jsonl) or Parquet (.parquet)"


@dataclass(frozen=True)
class Row:
    """One raw row and where it stands, for error messages."""

    data: dict[str, Any]
    source: str
    number: int  # 1-based: the line of a JSON Lines file, else the row
    is_line: bool

    def error(self, reason: str) -> InputError:
        """An error about this row: `file.jsonl:7: …`, or `file.json: row 7: …`."""
        if self.is_line:
            return InputError(reason, self.source, self.number)
        return InputError(f"row {self.number}: {reason}", self.source)

    def text(self, key: str) -> str:
        """The text under `key`, stripped. Raises InputError where there is none."""
        value = self.data.get(key)
        if value is None:
            raise self.error(f'missing "{key}"')
        if not isinstance(value, str):
            raise self.error(f'"{key}" must be text, found {type(value).__name__}')
        if not value.strip():
            raise self.error(f'"{key}" is empty')
        return value.strip()


def rows(source: str, *, split: str, config: str | None = None) -> Iterator[Row]:
    """The rows of `source` in their order, lazily where the format allows.

    `split` picks the files of a directory and the split of a hub id, `config` the configuration of
    a hub id; a file is taken as it is. Raises InputError.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        for shard in _shards(path, split, config):
            yield from _parquet(shard)
    elif path.exists():
        yield from _file(path)
    elif _looks_like_path(source):
        raise InputError("no such file or directory", source)
    else:
        yield from _hub(source, config, split)


def _looks_like_path(source: str) -> bool:
    return not _HUB_ID.fullmatch(source) or source.lower().endswith(_FILE_SUFFIXES)


def _file(path: Path) -> Iterator[Row]:
    """Rows of one file. The name decides, else the first bytes (`/dev/fd/63` has no suffix)."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet(path)
        return
    with _open(path) as stream:
        head = stream.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:4]
        if suffix in (".jsonl", ".ndjson") or (head[:1] == b"{" and suffix in (".json", "")):
            yield from _json_lines(stream, path)
        elif suffix == ".json" or (head[:1] == b"[" and not suffix):
            yield from _json_list(stream, path)
        elif suffix in (".gz", ".zip") or head[:2] in (b"\x1f\x8b", b"PK"):
            raise InputError("is compressed: unpack it first", str(path))
        else:
            raise InputError(f"is not {_FORMATS}", str(path))


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(error.strerror or str(error), str(path)) from None


def _json_list(stream: IO[bytes], path: Path) -> Iterator[Row]:
    try:
        data = orjson.loads(stream.read().removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}", str(path)) from None
    if not isinstance(data, list):
        raise InputError("expected a list of rows", str(path))
    for number, item in enumerate(data, start=1):
        row = Row(item, str(path), number, is_line=False)
        if not isinstance(item, dict):
            raise row.error("expected a JSON object")
        yield row


def _json_lines(stream: IO[bytes], path: Path) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        if number == 1 and path.suffix.lower() == ".json" and line.strip() == b"{":
            raise InputError("expected a list of rows, found one object", str(path))
        yield Row(parse_line(line, str(path), number), str(path), number, is_line=True)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_BATCH)
            items = (data for batch in batches for data in batch.to_pylist())
            for number, data in enumerate(items, start=1):
                yield Row(data, str(path), number, is_line=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet: {_one_line(error)}", str(path)) from None


def _shards(folder: Path, split: str, config: str | None) -> list[Path]:
    """The Parquet files of `split` in a copy of a hub repository, in order."""
    places = [folder / config] if config else []
    places += [folder / "data", folder]
    found: list[tuple[Path, re.Match[str]]] = []
    for place in places:
        names = sorted(os.listdir(place)) if place.is_dir() else []
        matches = ((place / name, _SHARD.fullmatch(name)) for name in names)
        found = [(path, match) for path, match in matches if match and match["split"] == split]
        if found:
            break
    if not found:
        raise InputError(
            f"is a directory without {split}.parquet or {split}-00000-of-….parquet: "
            f"name one file, {_FORMATS}",
            str(folder),
        )
    # A lone `train.parquet` has no numbers: it is part 0 of 1.
    parts = [(int(match["index"] or 0), int(match["count"] or 1)) for _, match in found]
    if parts != [(i, len(found)) for i in range(len(found))]:
        files = ", ".join(path.name for path, _ in found)
        raise InputError(f"the files of {split} are not one complete set: {files}", str(folder))
    return [path for path, _ in found]


def _hub(source: str, config: str | None, split: str) -> Iterator[Row]:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for library in ("huggingface_hub", "datasets"):  # retries; what comes of them is said below
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        data = datasets.load_dataset(source, config, split=split)
    # datasets and huggingface_hub raise dozens of unrelated classes for "not there", "offline",
    # "no such split"; all of them mean that the user's id cannot be had.
    except Exception as error:
        what = f"{source} ({config})" if config else source
        raise InputError(
            f"{what}, split {split}, is no local file and the hub does not give it: "
            f"{_one_line(error)}; --source takes a local file or another id"
        ) from None
    for number, row in enumerate(data, start=1):
        yield Row(dict(row), source, number, is_line=False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
