"""`optima-lite eval` from the outside: table, JSON, notes, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def line(task: str, k: int, answer: str | None, tokens: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"{task}#{k}",
        "task": {
            "id": task,
            "setting": "debate",
            "question": "Capital of France?",
            "answers": ["Paris"],
            "metric": "exact",
        },
        "team": {"name": "solo", "agents": [{"name": "Alice", "prompt": "{question}"}]},
        "turns": [{"agent": "Alice", "text": "hm", "tokens": 1, "stop": "end"}],
        "end": "agreement",
        "agreed": True,
        "tokens": tokens,
        "answer": answer,
        "model": "m",
        "seed": 0,
        **changes,
    }


#: a: right; b: wrong, then cut without an answer. Score 1/2, tokens (100 + 300)/2 = 200.
BEFORE = [
    line("a", 0, "Paris", 100),
    line("b", 0, "Rome", 200),
    line("b", 1, None, 400, end="turn_cut", agreed=False),
]
#: Both right, half the tokens on each task.
AFTER = [line("b", 0, "Paris", 150), line("a", 0, "Paris", 50)]


def run(*args: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "optima_lite", "eval", *map(str, args)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def encode(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    path = tmp_path / "before.jsonl"
    path.write_bytes(encode(BEFORE))
    return path


@pytest.fixture
def after(tmp_path: Path) -> Path:
    path = tmp_path / "after.jsonl"
    path.write_bytes(encode(AFTER))
    return path


def test_table_by_hand(before: Path, after: Path) -> None:
    """Rates of before: a agreed, half of b: 75 %; half of b invalid and failed: 25 %.

    Resamples of two tasks end at the tasks' own values: scores 0 and 1, tokens 100 and 300;
    differences 0 and +1, −50 and −150; the ratio is 1/2 whatever is drawn.
    """
    done = run(before, after)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    rows = [" ".join(row.split()) for row in done.stdout.decode().splitlines()]
    assert rows[1] == (
        "before.jsonl 2 1-2 50.0 [0.0, 100.0] 50.0 50.0 200.0 [100.0, 300.0] 1.0 75.0 25.0 25.0"
    )
    assert rows[2] == (
        "after.jsonl 2 1 100.0 [100.0, 100.0] 100.0 100.0 100.0 [50.0, 150.0] 1.0 100.0 0.0 0.0"
    )
    assert rows[4].startswith("against before.jsonl tasks Δscore [95 %] token ratio [95 %]")
    assert rows[5] == (
        "after.jsonl 2 +50.0 [+0.0, +100.0] 0.500 [0.500, 0.500] -100.0 [-150.0, -50.0]"
    )


def test_table_is_aligned(before: Path, after: Path) -> None:
    for table in run(before, after).stdout.decode().split("\n\n")[:2]:
        assert len({len(row) for row in table.splitlines()}) == 1


def test_json_by_hand(before: Path, after: Path) -> None:
    done = run(before, after, "--json", "--label", "M0", "--label", "M 1", "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    found = json.loads(done.stdout)
    assert (found["seed"], found["resamples"], found["confidence"]) == (3, 10_000, 0.95)
    assert [f["label"] for f in found["files"]] == ["M0", "M 1"]
    assert found["files"][0]["file"] == str(before)
    first = found["files"][0]
    assert (first["score"], first["score_interval"]) == (0.5, [0, 1])
    assert (first["invalid"], first["failed"], first["agreed"]) == (0.25, 0.25, 0.75)
    assert first["answered_score"] == pytest.approx(0.5 / 0.75)
    assert first["ends"]["turn_cut"] == 1
    assert first["per_task"] == [1, 2]
    assert first["loss"] is None
    (paired,) = found["comparisons"]
    assert (paired["label"], paired["against"], paired["tasks"]) == ("M 1", "M0", 2)
    assert (paired["score"], paired["tokens"], paired["token_ratio"]) == (0.5, -100, 0.5)
    assert paired["notes"] == []


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_stdin(arguments: list[str]) -> None:
    done = run(*arguments, "--json", stdin=encode(BEFORE))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["files"][0]["label"] == "<stdin>"
    assert found["comparisons"] == []


def test_one_task_shows_no_interval() -> None:
    done = run(stdin=encode(BEFORE[:1]))
    assert done.stdout.decode().splitlines()[1].split()[3:5] == ["100.0", "-"]


def test_equal_file_names_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "test.jsonl" for name in ("r0", "r1")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(encode(AFTER))
    found = json.loads(run(*paths, "--json").stdout)
    assert [f["label"] for f in found["files"]] == [str(path) for path in paths]


def test_differing_task_sets_are_noted(before: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(encode([AFTER[0], line("c", 0, "x", 1)]))
    expected = (
        b"note: other.jsonl: the task sets differ: 1 shared, 1 only in the first file, 1 only"
    )
    assert expected in run(before, other).stdout


def test_no_shared_task(before: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(encode([line("c", 0, "x", 1)]))
    done = run(before, other)
    assert (done.returncode, done.stdout) == (1, b"")
    assert f"error: {other}: shares no task with {before}\n".encode() == done.stderr


def test_duplicate_id(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(encode([*BEFORE, BEFORE[0]]))
    done = run(path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"error: {path}:4: trajectory a#0 appeared before\n"


def test_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(encode(BEFORE[:1]) + b"{}\n" + encode(BEFORE[1:]))
    done = run(path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f'error: {path}:2: missing "id"\n'
    done = run(path, "--skip-bad", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["files"][0]["trajectories"] == 3
    assert done.stderr.decode() == f'skipped: {path}:2: missing "id"\nt.jsonl: 1 lines skipped\n'


@pytest.mark.parametrize(
    ("stdin", "arguments", "message"),
    [
        (b"", [], "error: <stdin>: no trajectories\n"),
        (b"\n\n", [], "error: <stdin>: no trajectories\n"),
        (b"{}\n", ["--skip-bad"], "error: <stdin>: no trajectories (1 lines skipped)\n"),
        (b"", ["/no/such/file"], "error: /no/such/file: No such file or directory\n"),
    ],
)
def test_nothing_to_read(stdin: bytes, arguments: list[str], message: str) -> None:
    done = run(*arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().endswith(message)


def test_usage_errors(before: Path, after: Path) -> None:
    cases: list[tuple[list[Any], str]] = [
        (["-", "-"], "stdin (-) can be read only once"),
        ([before, after, "--label", "x"], "1 --label for 2 files"),
        ([before, "--resamples", 0], "--resamples"),
        ([before, "-o", before, "--overwrite"], "is one of the files to read"),
    ]
    for arguments, message in cases:
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, b"")
        assert message in done.stderr.decode()
    assert before.read_bytes() == encode(BEFORE)


def test_output_file(before: Path, tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    done = run(before, "--json", "-o", target)
    assert (done.returncode, done.stdout) == (0, b"")
    assert json.loads(target.read_bytes())["files"][0]["tasks"] == 2
    done = run(before, "-o", target)
    assert done.returncode == 1
    assert b"--overwrite replaces it" in done.stderr
    assert target.read_bytes().startswith(b"{")
    assert run(before, "-o", target, "--overwrite").returncode == 0
    assert b"score %" in target.read_bytes()


def test_a_failed_run_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    assert run("-o", target).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_seed_repeats(before: Path) -> None:
    one, same = (run(before, "--json", "--seed", 5, "--resamples", 20).stdout for _ in range(2))
    assert one == same


def test_starts_without_torch(before: Path) -> None:
    code = (
        "import sys; from optima_lite.cli.main import run;"
        f"code = run(['eval', {str(before)!r}]);"
        "sys.exit(code or 9 * any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
