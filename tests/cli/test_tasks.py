"""`optima-lite tasks` as a user runs it: output, exit codes, messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optima_lite.records import Task

ROOT = Path(__file__).resolve().parents[2]


def row(i: int) -> dict:
    return {
        "_id": f"r{i}",
        "question": f"Where does person {i} live?",
        "answer": f"Town {i}",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["Person", 0], ["Town", 0]],
        "context": [[t, [f"{t} {i}.", " More."]] for t in ("Person", "Town", "X", "Y", "Z")],
    }


def run(*args: object, **kwargs) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "optima_lite", "tasks", *map(str, args)],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        **kwargs,
    )


def tasks(result: subprocess.CompletedProcess) -> list[Task]:
    assert result.returncode == 0, result.stderr
    return [Task.from_dict(json.loads(line)) for line in result.stdout.splitlines()]


@pytest.fixture
def official(tmp_path) -> Path:
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([row(i) for i in range(8)]))
    return path


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "own.jsonl"
    lines = [
        {"id": f"own/{i}", "setting": "debate", "question": "Q?", "answers": ["A"], "metric": "f1"}
        | {"mine": i}
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_dataset_from_a_file(official):
    result = run("hotpotqa", "--source", official, "--limit", 3, "--agents", 3, "--split", "dev")
    found = tasks(result)
    assert [task.id for task in found] == [f"hotpotqa/validation/r{i}" for i in range(3)]
    assert all(len(task.contexts) == 3 for task in found)
    assert result.stderr == ""


def test_seed_and_shuffle(official):
    plain = run("hotpotqa", "--source", official)
    other = run("hotpotqa", "--source", official, "--seed", 5)
    mixed = run("hotpotqa", "--source", official, "--shuffle")
    part = run("hotpotqa", "--source", official, "--shuffle", "--limit", 3)
    assert plain.stdout != other.stdout
    assert mixed.stdout != plain.stdout
    assert sorted(mixed.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert tasks(part) == tasks(mixed)[:3]


def test_output_file(official, tmp_path):
    out = tmp_path / "out.jsonl"
    result = run("hotpotqa", "--source", official, "-o", out)
    assert (result.returncode, result.stdout) == (0, "")
    assert "8 tasks" in result.stderr
    content = out.read_bytes()
    assert content.count(b"\n") == 8

    result = run("hotpotqa", "--source", official, "--limit", 1, "-o", out)
    assert result.returncode == 1
    assert "exists: --overwrite" in result.stderr
    assert out.read_bytes() == content

    result = run("hotpotqa", "--source", official, "--limit", 1, "-o", out, "--overwrite")
    assert result.returncode == 0
    assert out.read_bytes() == content.splitlines(keepends=True)[0]


def test_failure_leaves_the_old_output(official, tmp_path):
    bad = row(9)
    del bad["question"]
    official.write_text(json.dumps([row(0), bad]))
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    result = run("hotpotqa", "--source", official, "-o", out, "--overwrite")
    assert result.returncode == 1
    assert result.stderr == f'error: {official}: row 2: missing "question"\n'
    assert out.read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == {"hotpot.json", "out.jsonl"}


def test_own_tasks_pass_through(own):
    result = run(own)
    assert [json.loads(x) for x in result.stdout.splitlines()] == [
        json.loads(x) | {"contexts": [], "meta": {}} for x in own.read_text().splitlines()
    ]
    assert len(tasks(run(own, "--limit", 2))) == 2
    assert len(tasks(run(own, "--shuffle"))) == 4
    assert run("-", input=own.read_text()).stdout == result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x"}', 'own.jsonl:5: missing "setting"'),
        ('{"id": ', "own.jsonl:5: not JSON"),
    ],
)
def test_own_tasks_are_checked(own, line, message):
    own.write_text(own.read_text() + line + "\n")
    result = run(own)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_ids_that_come_twice(own, official):
    own.write_text(own.read_text() * 2)
    result = run(own)
    assert (result.returncode, "own.jsonl:5: id 'own/0' is on line 1" in result.stderr) == (1, True)
    official.write_text(json.dumps([row(0), row(0)]))
    result = run("hotpotqa", "--source", official)
    assert (result.returncode, "hotpotqa/train/r0 appears twice" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "no data set 'nothing'; the data sets are hotpotqa, relay"),
        (["hotpotqa", "--split", "x"], "no split 'x'; its splits are train, validation, dev, test"),
        (["hotpotqa", "--set", "x=1"], "no setting 'x'; its settings: config ("),
        (["hotpotqa", "--set", "config"], "--set takes KEY=VALUE"),
        (["hotpotqa", "--limit", "-1"], "--limit"),
        (["hotpotqa", "--agents", "0"], "--agents"),
        (["relay", "--shuffle"], "relay is endless"),
        (["OWN", "--split", "train"], "--split is for data sets"),
        (["OWN", "--agents", "2"], "--agents is for data sets"),
        (["OWN", "--set", "a=b"], "--set is for data sets"),
        (["OFFICIAL"], "--source"),
        ([], "NAME"),
    ],
)
def test_usage_errors(args, message, own, official):
    places = {"OWN": own, "OFFICIAL": official}
    result = run(*(places.get(arg, arg) for arg in args))
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_input_errors_end_with_1(tmp_path):
    result = run("hotpotqa", "--source", tmp_path / "none.json")
    assert (result.returncode, "no such file" in result.stderr) == (1, True)
    result = run(tmp_path / "none.jsonl")
    assert (result.returncode, "No such file" in result.stderr) == (1, True)
    result = run("hotpotqa", "--source", tmp_path)
    assert (result.returncode, "is a directory" in result.stderr) == (1, True)


def test_offline_hub_is_one_line():
    result = run("hotpotqa", "--source", "nobody/no-such-data")
    assert result.returncode == 1
    assert "nobody/no-such-data (distractor)" in result.stderr
    assert "--source takes a local file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_fewer_than_the_limit_is_said(official):
    result = run("hotpotqa", "--source", official, "--limit", 100)
    assert len(tasks(result)) == 8
    assert "8 tasks, fewer than --limit 100" in result.stderr


def test_endless_into_a_closed_pipe():
    pytest.importorskip("optima_lite.tasks.relay")
    command = f"{sys.executable} -m optima_lite tasks relay | head -n 2"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=env, timeout=60
    )
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == ""


def test_help_has_examples_and_no_heavy_imports():
    result = run("--help")
    assert result.returncode == 0
    assert "optima-lite tasks hotpotqa --limit 1000" in result.stdout
    code = (
        "import sys; from optima_lite.cli.main import run; run(['tasks', '--help']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets', 'pyarrow')))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, env=env).returncode == 0
    )
