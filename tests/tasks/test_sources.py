"""Rows from every kind of source, in order, with a place for every error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from optima_lite.errors import InputError
from optima_lite.tasks import sources
from optima_lite.tasks.sources import rows

ROWS = [{"question": f"Q{i}?", "nested": {"title": ["a", "b"], "n": [i, i + 1]}} for i in range(5)]


def read(path: Path | str, split: str = "train", config: str | None = None) -> list[dict]:
    return [row.data for row in rows(str(path), split=split, config=config)]


def parquet(path: Path, items: list[dict]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), path)
    return path


def jsonl(path: Path, items: list[dict]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.mark.parametrize(
    "name", ["a.json", "a.jsonl", "a.ndjson", "lines.json", "bare", "barelist"]
)
def test_json_formats(tmp_path, name):
    path = tmp_path / name
    if name in ("a.json", "barelist"):
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        jsonl(path, ROWS)
    assert read(path) == ROWS


def test_parquet_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BATCH", 2)
    found = list(rows(str(parquet(tmp_path / "a.parquet", ROWS)), split="x"))
    assert [row.data for row in found] == ROWS
    assert [row.number for row in found] == [1, 2, 3, 4, 5]


def test_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}')
    assert [(row.data["a"], row.number) for row in rows(str(path), split="x")] == [(1, 1), (2, 3)]
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"a": 1}]')
    assert read(path) == [{"a": 1}]


def test_json_lines_are_read_lazily(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nnot json\n')
    stream = rows(str(path), split="x")
    assert next(stream).data == {"a": 1}
    with pytest.raises(InputError, match=r"a\.jsonl:2: not JSON"):
        next(stream)


@pytest.mark.parametrize("place", [".", "data", "distractor"])
def test_hub_layout(tmp_path, place):
    """Ten and more shards: number order, not the order the disk lists them in."""
    for i in reversed(range(5)):
        parquet(tmp_path / place / f"train-{i:05}-of-00005.parquet", [ROWS[i]])
    parquet(tmp_path / place / "validation-00000-of-00001.parquet", ROWS[:2])
    assert read(tmp_path, config="distractor") == ROWS
    assert read(tmp_path, "validation", config="distractor") == ROWS[:2]


def test_hub_layout_other_names(tmp_path):
    parquet(tmp_path / "data" / "train-00000-of-00001-0123456789abcdef.parquet", ROWS)
    parquet(tmp_path / "validation.parquet", ROWS[:1])
    assert read(tmp_path) == ROWS
    assert read(tmp_path, "validation") == ROWS[:1]


def test_hub_layout_with_a_hole(tmp_path):
    for i in (0, 2):
        parquet(tmp_path / f"train-{i:05}-of-00003.parquet", ROWS)
    with pytest.raises(InputError, match="not one complete set: train-00000-of-00003"):
        read(tmp_path)


def test_other_directory(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(InputError, match=r"is a directory without train\.parquet"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1, 2", r"a\.json: not JSON"),
        ("a.json", b"3", r"a\.json: expected a list of rows"),
        ("a.json", b'{\n "a": 1\n}', r"a\.json: expected a list of rows, found one object"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json: row 2: expected a JSON object"),
        ("a.jsonl", b'{"a": 1}\n[2]\n', r"a\.jsonl:2: expected a JSON object"),
        ("a.jsonl", b'{"a": 1}\n{"a":', r"a\.jsonl:2: not JSON.*torn"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: cannot be read as Parquet"),
        ("a.csv", b"q,a\n", r"a\.csv: is not a JSON list"),
        ("a.json.gz", b"\x1f\x8b..", r"is compressed"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.json", "/no/such/folder", "a/b/c", "data/x.parquet"])
def test_missing_file_is_not_looked_up_on_the_hub(name):
    with pytest.raises(InputError, match="no such file or directory"):
        read(name)


def test_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return ROWS

    fake = SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read("some/id", "validation", "distractor") == ROWS
    assert asked == [(("some/id", "distractor"), {"split": "validation"})]


def test_hub_failure_is_one_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe hub")

    fake = SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(InputError) as caught:
        read("some/id", "train", "distractor")
    message = str(caught.value)
    assert "some/id (distractor), split train" in message
    assert "--source takes a local file" in message
    assert "\n" not in message


def test_row_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"ok": " x ", "n": 3, "blank": " ", "null": None}])
    (row,) = rows(str(path), split="x")
    assert row.text("ok") == "x"
    for key, message in [
        ("absent", 'missing "absent"'),
        ("null", 'missing "null"'),
        ("n", '"n" must be text, found int'),
        ("blank", '"blank" is empty'),
    ]:
        with pytest.raises(InputError) as caught:
            row.text(key)
        assert str(caught.value) == f"{path}:1: {message}"
