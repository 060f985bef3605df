"""JSONL: where a line is wrong, which lines stand together, and what a crash leaves behind."""

from __future__ import annotations

import io
import os
import stat
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optima_lite.errors import InputError, OutputError, SettingError
from optima_lite.jsonl import (
    Reader,
    ResumableOutput,
    atomic_output,
    check_free,
    digest,
    dumps,
    groups,
    refuse_input,
    require_same,
    write_all,
)
from optima_lite.records import Task


def task(id: str, question: str = "Why?", **meta: object) -> Task:
    return Task(id, "debate", question, ("so",), "f1", meta=dict(meta))


def line(id: str) -> bytes:
    return dumps(task(id))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "in.jsonl"


def read(path: Path, **kwargs) -> list[str]:
    return [record.id for record in Reader(str(path), Task, **kwargs)]


# -- writing a line ---------------------------------------------------------------------------


def test_a_line_has_one_newline_and_plain_utf8():
    data = dumps(task("a", "多\nline   end"))
    assert data.count(b"\n") == 1
    assert data.endswith(b"}\n")
    assert "多".encode() in data
    assert b"\\n" in data


# -- reading ----------------------------------------------------------------------------------


def test_line_numbers_count_blank_lines(path):
    path.write_bytes(line("a") + b"\n  \n" + line("b") + b'{"id": 3}\n')
    reader = Reader(str(path), Task)
    records = iter(reader)
    assert [(next(records).id, reader.number), (next(records).id, reader.number)] == [
        ("a", 1),
        ("b", 4),
    ]
    with pytest.raises(InputError) as caught:
        next(records)
    assert str(caught.value) == f'{path}:5: "id" must be text, found a whole number'
    assert (caught.value.source, caught.value.line) == (str(path), 5)


def test_bom_and_crlf_are_read(path):
    path.write_bytes(b"\xef\xbb\xbf" + line("a").replace(b"\n", b"\r\n") + b"\r\n" + line("b"))
    assert read(path) == ["a", "b"]


def test_a_bom_in_the_middle_is_an_error(path):
    path.write_bytes(line("a") + b"\xef\xbb\xbf" + line("b"))
    with pytest.raises(InputError, match=r"in\.jsonl:2: not JSON"):
        read(path)


def test_line_separators_of_unicode_do_not_end_a_line(path):
    path.write_bytes(dumps(task("a", "one two\x85three\x0bfour")) + line("b"))
    assert read(path) == ["a", "b"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"id": "\xff"}\n', "not JSON"),  # not UTF-8
        (b"{'id': 1}\n", "not JSON"),
        (b"[1]\n", "expected a JSON object on each line"),
        (b'"text"\n', "expected a JSON object on each line"),
        (b"{}\n", 'missing "id"'),
        (line("b")[:-1] + line("c"), "not JSON"),  # two objects on one line
    ],
)
def test_bad_lines_say_where(path, bad, message):
    path.write_bytes(line("a") + bad + line("z"))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "torn" not in str(caught.value)


def test_a_torn_last_line_is_called_torn(path):
    path.write_bytes(line("a") + line("b")[:-5])
    with pytest.raises(InputError, match=r"in\.jsonl:2: not JSON: .*the last line is torn"):
        read(path)


def test_a_whole_last_line_needs_no_newline(path):
    path.write_bytes(line("a") + line("b")[:-1])
    assert read(path) == ["a", "b"]


def test_skip_bad_counts_and_tells(path):
    path.write_bytes(b"no\n" + line("a") + b"{}\n\n" + line("b") + line("c")[:-9])
    told: list[InputError] = []
    reader = Reader(str(path), Task, skip_bad=True, on_bad=told.append)
    assert [record.id for record in reader] == ["a", "b"]
    assert reader.skipped == 3
    assert [error.line for error in told] == [1, 3, 6]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: No such file"):
        read(tmp_path / "none.jsonl")


def test_stdin(monkeypatch, path):
    path.write_bytes(line("a") + b"{}\n")
    with path.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        records = iter(Reader("-", Task))
        assert next(records).id == "a"
        with pytest.raises(InputError, match='<stdin>:2: missing "id"'):
            next(records)


# -- groups -----------------------------------------------------------------------------------


def by_question(record: Task) -> str:
    return record.question


def test_groups_are_neighbours(path):
    path.write_bytes(b"".join(dumps(task(f"{q}{i}", q)) for q in "xyz" for i in range(2)))
    found = [[t.id for t in g] for g in groups(Reader(str(path), Task), by_question)]
    assert found == [["x0", "x1"], ["y0", "y1"], ["z0", "z1"]]
    path.write_bytes(b"")
    assert list(groups(Reader(str(path), Task), by_question)) == []


def test_a_group_that_comes_back_is_an_error(path):
    """Lines x, y, x: the second x is on line 3."""
    path.write_bytes(b"".join(dumps(task(f"{i}", q)) for i, q in enumerate("xyx")))
    found = groups(Reader(str(path), Task), by_question)
    assert len(next(found)) == 1
    assert len(next(found)) == 1
    with pytest.raises(InputError, match=r":3: x appeared before: .*must stand together"):
        next(found)


def test_an_error_about_a_group_points_into_the_group(path):
    """Groups of lines 1-2, 3 and 4-5; each is yielded after the next one's first line was read."""
    path.write_bytes(b"".join(dumps(task(f"{i}", q)) for i, q in enumerate("xxyzz")))
    reader = Reader(str(path), Task)
    assert [reader.error("bad").line for _ in groups(reader, by_question)] == [2, 3, 5]


def test_groups_hold_one_group_only(tmp_path):
    """2 000 groups of 20 kB are 40 MB; a handful of groups may be alive at once."""
    path = tmp_path / "many.jsonl"
    with path.open("wb") as stream:
        for i in range(2000):
            stream.write(dumps(task(str(i), f"q{i}", text="x" * 20_000)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in groups(Reader(str(path), Task), by_question)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


# -- refusing ---------------------------------------------------------------------------------


def test_check_free(tmp_path):
    old = tmp_path / "old.jsonl"
    old.write_text("x")
    with pytest.raises(OutputError, match=r"old\.jsonl exists: --overwrite replaces it"):
        check_free(str(old))
    check_free(str(old), overwrite=True)
    check_free(str(old), resume=True)
    check_free("-")
    check_free(os.devnull)
    with pytest.raises(OutputError, match="is a directory"):
        check_free(str(tmp_path), overwrite=True)
    with pytest.raises(OutputError, match=r"nowhere does not exist: mkdir -p"):
        check_free(str(tmp_path / "nowhere" / "x.jsonl"))


def test_an_output_that_is_the_input_is_refused(tmp_path, monkeypatch):
    file, other, link = (tmp_path / name for name in ("in.jsonl", "other.jsonl", "link.jsonl"))
    file.write_bytes(line("a"))
    other.write_bytes(line("a"))
    link.symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for output in (str(file), "in.jsonl", "./in.jsonl", str(link)):
        with pytest.raises(OutputError, match="is the input"):
            refuse_input(str(file), output)
    refuse_input(str(file), str(other))
    refuse_input(str(file), str(tmp_path / "new.jsonl"))
    refuse_input(str(tmp_path / "none.jsonl"), str(other))
    refuse_input(str(file), "-")
    refuse_input("-", str(other))  # pytest's stdin has no file number
    with file.open("rb") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(OutputError, match="is the input"):
            refuse_input("-", str(file))
        refuse_input("-", str(other))


def test_require_same_names_each_difference():
    require_same({"n": 4, "t": None}, {"t": None, "n": 4}, "f")
    with pytest.raises(OutputError) as caught:
        require_same({"n": 4, "t": 0.7, "old": 1}, {"n": 6, "t": 0.7, "new": "x"}, "f.jsonl")
    assert str(caught.value) == (
        "f.jsonl was made with other settings: "
        "n was 4, now 6; new was not given, now 'x'; old was 1, now not given "
        "(--overwrite, or removing it, starts anew)"
    )


def test_digest_tells_records_apart_and_knows_them_again():
    one = task("a", x=1, y=[2])
    assert digest(one) == digest(Task.from_dict(one.to_dict())) == digest(task("a", y=[2], x=1))
    assert digest(one) != digest(task("a", x=1, y=[3]))
    assert len(digest(one)) == 16


# -- whole or not at all ----------------------------------------------------------------------


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def test_atomic_output_appears_at_the_end(tmp_path):
    out = tmp_path / "out.jsonl"
    with atomic_output(str(out)) as write:
        assert write_all(write, [task("a"), task("b")]) == 2
        assert not out.exists()
    assert out.read_bytes() == line("a") + line("b")
    assert names(tmp_path) == {"out.jsonl"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("error", [InputError("bad"), KeyboardInterrupt(), SystemExit(1)])
def test_atomic_output_keeps_the_old_file_on_failure(tmp_path, error):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with pytest.raises(type(error)), atomic_output(str(out), overwrite=True) as write:  # noqa: PT012
        write(line("a"))
        raise error
    assert out.read_text() == "old"
    assert names(tmp_path) == {"out.jsonl"}
    with pytest.raises(OutputError, match="--overwrite"), atomic_output(str(out)):
        pass
    assert out.read_text() == "old"


def test_atomic_output_to_a_device():
    with atomic_output(os.devnull) as write:
        write(line("a"))
    assert not os.path.isfile(os.devnull)


def test_atomic_output_to_stdout_flushes_each_line(monkeypatch):
    class Stream(io.BytesIO):
        flushed: list[bytes] = []  # noqa: RUF012

        def flush(self):
            self.flushed.append(self.getvalue())

    stream = Stream()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=stream))
    with atomic_output("-") as write:
        write(b"1\n")
        write(b"2\n")
    assert Stream.flushed == [b"1\n", b"1\n2\n"]


# -- going on ---------------------------------------------------------------------------------


def save(path: Path, ids: list[str], **kwargs: bool) -> list[str]:
    """Write what of `ids` the file lacks; returns the ids that were there, as gen does."""
    with ResumableOutput(str(path), **kwargs) as out:
        kept = [record.id for record in out.kept(Task)]
        for id in ids:
            if id not in kept:
                out.write(task(id))
    return kept


def test_resume_keeps_whole_lines_and_cuts_a_torn_one(path):
    # Kept byte for byte: spaces and field order as another writer left them.
    odd = b'{"setting":"debate", "id":"a", "metric":"f1", "question":"q", "answers":["x"]}\n'
    path.write_bytes(odd + line("b") + line("c")[:-1])
    assert save(path, ["a", "b", "c", "d"], resume=True) == ["a", "b"]
    assert path.read_bytes() == odd + line("b") + line("c") + line("d")


def test_resume_with_nothing_to_add_still_cuts_the_torn_line(path):
    path.write_bytes(line("a") + line("b")[:-3])
    assert save(path, ["a"], resume=True) == ["a"]
    assert path.read_bytes() == line("a")


def test_a_pipe_cannot_be_resumed(path):
    os.mkfifo(path)
    with pytest.raises(SettingError, match="is a pipe or device"):
        save(path, ["a"], resume=True)


def test_resume_without_a_file_starts_one(path):
    assert save(path, ["a"], resume=True) == []
    assert path.read_bytes() == line("a")


def test_resume_refuses_a_file_with_a_broken_line(path):
    content = line("a") + b"garbage\n" + line("b")
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"in\.jsonl:2: not JSON"):
        save(path, ["c"], resume=True)
    path.write_bytes(line("a") + b"{}\n")
    with pytest.raises(InputError, match=r'in\.jsonl:2: missing "id"'):
        save(path, ["c"], resume=True)
    assert path.read_bytes() == line("a") + b"{}\n"


def test_a_failing_resume_leaves_the_file_alone(path):
    """Nothing is cut before there is something to write."""
    content = line("a") + line("b")[:-3]
    path.write_bytes(content)
    with pytest.raises(InputError, match="bad"), ResumableOutput(str(path), resume=True) as out:  # noqa: PT012
        assert len(list(out.kept(Task))) == 1
        raise InputError("the input is bad")
    assert path.read_bytes() == content


def test_truncate_to(path):
    path.write_bytes(b"".join(map(line, "abcd")) + b"{to")
    with ResumableOutput(str(path), resume=True) as out:
        assert len(list(out.kept(Task))) == 4
        out.truncate_to(3)
        out.write(task("z"))
    assert path.read_bytes() == b"".join(map(line, "abcz"))
    with ResumableOutput(str(path), resume=True) as out:
        list(out.kept(Task))
        out.truncate_to(0)
    assert path.read_bytes() == b""


def test_overwrite_keeps_the_old_file_until_the_first_record(path):
    path.write_bytes(b"old\n")
    with pytest.raises(InputError), ResumableOutput(str(path), overwrite=True):
        raise InputError("the model cannot be loaded")
    assert path.read_bytes() == b"old\n"
    with ResumableOutput(str(path), overwrite=True) as out:
        assert path.read_bytes() == b"old\n"
        out.write(task("a"))
        assert path.read_bytes() == line("a"), "every record is flushed"
    assert path.read_bytes() == line("a")


def test_an_empty_input_makes_an_empty_file(path):
    with ResumableOutput(str(path)):
        pass
    assert path.read_bytes() == b""


def test_existing_and_contradicting(path):
    path.write_bytes(b"old\n")
    with pytest.raises(OutputError, match=r"exists: --resume goes on .*--overwrite replaces it"):
        save(path, ["a"])
    with pytest.raises(SettingError, match="exclude each other"):
        ResumableOutput(str(path), resume=True, overwrite=True)
    with pytest.raises(SettingError, match="needs a file"):
        ResumableOutput("-", resume=True)
    assert path.read_bytes() == b"old\n"


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    questions=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4),
    cut=st.floats(0, 1),
)
def test_resuming_any_prefix_gives_the_full_file(tmp_path, questions, cut):
    """A crash may cut the file at any byte, inside a character too."""
    path = tmp_path / "x.jsonl"
    records = [task(str(i), question) for i, question in enumerate(questions)]
    full = b"".join(map(dumps, records))
    whole = full[: round(cut * len(full))]
    path.write_bytes(whole)
    with ResumableOutput(str(path), resume=True) as out:
        kept = {record.id for record in out.kept(Task)}
        assert len(kept) == whole.count(b"\n")
        for record in records:
            if record.id not in kept:
                out.write(record)
    assert path.read_bytes() == full


def test_resuming_at_every_byte(path):
    """The same without luck: three records, every cut."""
    full = b"".join(map(line, "aöc"))
    for cut in range(len(full) + 1):
        path.write_bytes(full[:cut])
        save(path, ["a", "ö", "c"], resume=True)
        assert path.read_bytes() == full, cut
