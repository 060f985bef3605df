"""The command line as a whole: help, what is imported, and how commands end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from optima_lite import __version__
from optima_lite.cli import main
from optima_lite.cli.main import COMMANDS
from optima_lite.records import Score, Task, Trajectory, Turn
from optima_lite.teams import load_team

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "peft", "pyarrow")
ENV = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
ENV.pop("OPTIMA_LITE_DEBUG", None)
PROGRAM = [sys.executable, "-m", "optima_lite"]


def run(*argv: object, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, argv)], capture_output=True, text=True, env=ENV, timeout=60, **kwargs
    )


@pytest.fixture
def inline(capsys, monkeypatch, tmp_path_factory) -> Callable[..., SimpleNamespace]:
    """The same without a new process, for what does not depend on one."""
    monkeypatch.delenv("OPTIMA_LITE_DEBUG", raising=False)

    stdin = tmp_path_factory.mktemp("inline") / "stdin"

    def call(*argv: object, input: bytes = b"") -> SimpleNamespace:
        stdin.write_bytes(input)
        with stdin.open() as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            code = main.run([str(a) for a in argv])
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


def imports(*command_lines: list[object]) -> subprocess.CompletedProcess[str]:
    """Run command lines in one process; it fails, naming them, if one imported a heavy module."""
    code = (
        "import sys, json\n"
        "from optima_lite.cli.main import run\n"
        f"for argv in {[[str(a) for a in line] for line in command_lines]!r}:\n"
        "    assert run(argv) == 0, argv\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, (argv, heavy)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60
    )


def trajectory(task: str, k: int, reward: float | None = 1.0, **fields) -> bytes:
    team = load_team("relay")
    turns = tuple(Turn(a.name, f"<A>{task}</A>", 3, "end") for a in team.agents)
    score = Score(1.0, 1.0, (2.0, 2.0), 2.0, False, 0.6, 1.0, "base", "none")
    record = Trajectory(
        f"{task}#{k}",
        Task(task, "exchange", "Q?", (task,), "exact", contexts=(("a",), ("b",))),
        team, turns, "agreement", True, 6, task, "m", k,
        **{"reward": reward, "score": score if reward is not None else None, **fields},
    )  # fmt: skip
    return orjson.dumps(record.to_dict(), option=orjson.OPT_APPEND_NEWLINE)


@pytest.fixture
def scored(tmp_path) -> Path:
    path = tmp_path / "scored.jsonl"
    path.write_bytes(b"".join(trajectory(task, k) for task in "xyz" for k in range(2)))
    return path


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_fast_to_import(command):
    start = [command] if command else []
    result = imports([*start, "--help"], [*start, "-h"])
    assert result.returncode == 0, result.stderr
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:], "-h is --help"
    name = f"optima-lite {command}" if command else "optima-lite"
    assert result.stdout.startswith(f"Usage: {name} ")
    assert result.stdout.count(f"  {name} ") >= 2, "examples"
    assert "--debug" in result.stdout
    assert "-h, --help" in result.stdout


def test_the_list_of_commands(inline):
    listed = inline("--help").stdout.partition("Commands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
    assert all(len(line.split()) > 3 for line in listed.splitlines()), "each says what it does"


def test_no_command_shows_the_help(inline):
    result = inline()
    assert result.returncode == 2
    assert "Usage: optima-lite" in result.stderr + result.stdout


def test_version(inline):
    assert inline("--version").stdout.strip() == f"optima-lite, version {__version__}"


def test_commands_without_a_model_never_import_one(scored, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    result = imports(
        ["tasks", "relay", "--limit", 3, "-o", tasks],
        ["tasks", tasks, "--limit", 1],
        ["gen", tasks, "--model", "relay", "--show-prompt"],
        ["score", scored, "--reuse", "--lambda-token", 0.1, "-o", tmp_path / "reweighed.jsonl"],
        ["select", scored, "-o", tmp_path / "examples.jsonl"],
        ["eval", scored],
        ["eval", scored, tmp_path / "reweighed.jsonl", "--json"],
    )
    assert result.returncode == 0, result.stderr
    assert "You are Alice." in result.stdout
    assert (tmp_path / "examples.jsonl").read_bytes().count(b"\n") == 6


# -- how it ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "no command 'frobnicate'; the commands are tasks, gen, score"),
        (["--frobnicate"], "--frobnicate"),
        (["tasks"], "NAME"),
        (["tasks", "relay", "--frobnicate"], "--frobnicate"),
        (["gen"], "--model"),
        (["gen", "--model", "relay", "-n", "0"], "0 is not in the range"),
        (["gen", "--model", "relay", "-t", "-1"], "range"),
        (["gen", "--model", "relay", "--load", "8bit"], "'8bit' is not one of"),
        (["score"], "give either --model (compute losses) or --reuse (keep them)"),
        (["score", "--model", "relay", "--reuse"], "either --model"),
        (["score", "--reuse", "--lambda-token", "-1"], "range"),
        (["select", "--top", "0"], "range"),
        (["select", "--top", "1.1"], "range"),
        (["select", "--theta", "high"], "'high' is not a valid float"),
        (["select", "a.jsonl", "b.jsonl"], "unexpected extra argument"),
        (["sft", "x.jsonl"], "--model"),
    ],
)
def test_wrong_usage_is_2(inline, argv, message):
    result = inline(*argv)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Usage: optima-lite" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "x"}\n', 'missing "task"'),
        (b"{oops\n", "not JSON"),
        (b"[]\n", "expected a JSON object on each line"),
        (trajectory("w", 0).replace(b'"stop":"end"', b'"stop":7', 1),
         'in turns[0]: "stop" must be text, found a whole number'),
        (trajectory("w", 0)[:-20], "the last line is torn"),
        (trajectory("w", 0, None), "w has trajectories without a reward: run score first"),
        (trajectory("x", 9), "x appeared before: the lines of one task must stand together"),
    ],
)  # fmt: skip
def test_bad_input_is_1_with_file_and_line(inline, scored, line, message):
    content = scored.read_bytes() + b"\n" + line  # the blank line counts: line 8
    scored.write_bytes(content)
    result = inline("select", scored)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {scored}:8: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = inline("select", input=content)
    assert result.stderr.startswith("error: <stdin>:8: ")


def test_other_errors_are_one_line_too(inline, scored, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    for argv, message in [
        (["select", tmp_path / "none.jsonl"], f"error: {tmp_path}/none.jsonl: No such file"),
        (["select", tmp_path], f"error: {tmp_path}: Is a directory"),
        (["select", scored, "-o", out], f"error: {out} exists: --overwrite replaces it"),
        (["select", scored, "-o", tmp_path], f"error: {tmp_path} is a directory"),
        (["select", scored, "-o", tmp_path / "no/o"], "does not exist: mkdir -p it first"),
        (["score", scored, "--model", "nothing"], "error: nothing: no such directory"),
        (["gen", scored, "--model", "relay", "--team", "x"], "error: no team 'x'"),
    ]:
        result = inline(*argv)
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert out.read_text() == "old"


def test_options_that_cannot_work_are_wrong_usage(inline, scored, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    both = "--resume and --overwrite exclude each other"
    for argv, message in [
        (["tasks", "relay", "--set", "hops=9"], "error: hops is a whole number from 2 to 3"),
        (["score", scored, "--reuse", "--resume"], "error: --resume needs a file: add -o FILE"),
        (["score", scored, "--reuse", "-o", out, "--resume", "--overwrite"], both),
        (["score", scored, "--reuse", "--lambda-token", "nan"], "not a finite number"),
        (["score", scored, "--reuse", "--lambda-loss", "inf"], "not a finite number"),
        (["score", scored, "--reuse", "--loss-context", "dialogue"], "--reuse keeps the losses"),
        (["select", scored, "--theta", "nan"], "not a finite number"),
        (["select", scored, "--top", "nan"], "not a finite number"),
    ]:
        result = inline(*argv)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
    assert out.read_text() == "old"


def test_a_line_of_another_kind_is_named(inline, scored):
    record = orjson.loads(scored.read_bytes().splitlines()[0])
    scored.write_bytes(orjson.dumps(record["task"]) + b"\n")
    result = inline("select", scored)
    assert result.returncode == 1
    assert "this is a line of Task" in result.stderr


def test_skip_bad_goes_on(inline, scored):
    scored.write_bytes(b"{oops\n" + scored.read_bytes() + b"{}\n")
    result = inline("select", scored, "--skip-bad")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 6
    assert f"skipped: {scored}:1: not JSON" in result.stderr
    assert f'skipped: {scored}:8: missing "id"' in result.stderr


@pytest.mark.parametrize("argv", [["--debug", "select"], ["select", "--debug"]])
def test_debug_shows_the_traceback(argv, tmp_path):
    result = run(*argv, tmp_path / "none.jsonl")
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "none.jsonl: No such file" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_called_a_bug(debug, scored):
    code = (
        "from optima_lite.cli import main, select\n"
        "def broken(*a): raise ZeroDivisionError('oh')\n"
        "select.best_of = broken\n"
        f"main.main(['select', {str(scored)!r}] + ['--debug'] * {debug})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60
    )
    assert result.returncode == 1
    if debug:
        assert "Traceback" in result.stderr
    else:
        assert result.stderr == "error: ZeroDivisionError: oh (a bug? --debug shows where)\n"


@contextmanager
def endless(*argv: str, **kwargs) -> Iterator[subprocess.Popen[bytes]]:
    """A run without --limit, which heeds Ctrl-C also where the tests run in the background (the
    shell has such jobs ignore it), and which does not outlive the test."""
    process = subprocess.Popen(
        [*PROGRAM, "tasks", "relay", *argv],
        env=ENV,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_is_130():
    with endless(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # it is running
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.decode().strip() == "interrupted"


def test_ctrl_c_leaves_no_half_file(tmp_path):
    with endless("-o", str(tmp_path / "tasks.jsonl"), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        # Wait for bytes: in the instant after the file's birth nobody could remove it yet.
        while not any(p.stat().st_size for p in tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The lock and the file to be.
        assert [p.name.startswith(".tasks.jsonl.") for p in tmp_path.iterdir()] == [True, True]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["tasks relay", "--help", "eval SCORED", "score SCORED --reuse"]
)
def test_a_closed_pipe_is_quiet(command, scored, tmp_path):
    """`| head -1` for many lines, `| true` for any; the shell's exit code for SIGPIPE is 141."""
    scored.write_bytes(b"".join(trajectory(str(i), 0) for i in range(200)))
    reader = "head -1" if command != "--help" else "true"
    line = " ".join(PROGRAM) + " " + command.replace("SCORED", str(scored))
    script = f"(sleep 0.2; {line}) | {reader}; echo ${{PIPESTATUS[0]}} > {tmp_path}/code"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=ENV, timeout=60
    )
    assert result.stderr == ""
    code = (tmp_path / "code").read_text().strip()
    # The eval table may fit into the pipe before head leaves.
    assert code == "141" or (code == "0" and command.startswith("eval"))
    if reader != "true":
        assert len(result.stdout.splitlines()) == 1


def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*PROGRAM, "tasks", "relay", "--limit", "3"],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, timeout=60,
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device\n"


def test_nothing_but_records_goes_to_stdout(scored):
    for argv in (
        ["tasks", "relay", "--limit", 3],
        ["select", scored],
        ["score", scored, "--reuse"],
    ):
        result = run(*argv)
        assert result.returncode == 0
        assert all(orjson.loads(line) for line in result.stdout.splitlines())
        assert not re.search(r"\x1b", result.stderr), "no colours, no progress bars"
