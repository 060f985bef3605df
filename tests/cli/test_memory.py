"""Memory does not grow with the file: peak RSS of model-free commands on few and many records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from optima_lite.records import Score, Task, Trajectory, Turn
from optima_lite.teams import load_team

ROOT = Path(__file__).resolve().parents[2]
N = 10  # trajectories per task
FEW = 1_000
MORE = 1.15  # what may come on top: allocator noise, and a number and an offset per task
#: The child says its own peak: ru_maxrss would count its parent's at the time of the fork.
CODE = """
import sys
from optima_lite.cli.main import run
code = run(sys.argv[1:])
print(open("/proc/self/status").read(), file=sys.stderr)
sys.exit(code)
"""
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)


def write(path: Path, count: int) -> Path:
    """`count` scored trajectories of about 2.5 kB, from one serialised record."""
    team = load_team("relay")
    text = "Tilda Marsk was born in Quelby, so I would say <A>Quelby</A>. " * 2
    turns = tuple(Turn(team.agents[i % 2].name, text, 20, "end") for i in range(4))
    score = Score(1.0, 1.0, (2.0,) * 4, 2.0, False, 0.6, 1.0, "base", "none")
    task = Task(
        "TASK", "exchange", "Where?", ("Quelby",), "exact",
        contexts=(("Orvane was founded by Tilda Marsk.",) * 4, ("She was born in Quelby.",) * 4),
    )  # fmt: skip
    record = Trajectory(
        "TASK#0", task, team, turns, "agreement", True, 80, "Quelby", "m", 0,
        settings={"n": N}, reward=0.9, score=score,
    )  # fmt: skip
    line = orjson.dumps(record.to_dict(), option=orjson.OPT_APPEND_NEWLINE)
    before, middle, after = line.split(b"TASK")
    after = after.replace(b'"reward":0.9', b'"reward":0.%d')
    assert after.count(b"%d") == 1
    middle = middle.replace(b"#0", b"#%d")
    with path.open("wb") as stream:
        for i in range(count):
            name = b"task-%d" % (i // N)
            stream.write(before + name + middle % (i % N) + name + after % (100 + i % 900))
    return path


def peak(*argv: object) -> int:
    """Peak resident memory of `optima-lite ARGV` in kB."""
    result = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, argv)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return int(re.search(r"VmHWM:\s+(\d+) kB", result.stderr)[1])


COMMANDS = {
    "score": ["score", "--reuse", "--lambda-token", 0.3, "IN"],
    "select": ["select", "--theta", 0.1, "--top", 1, "IN", "-o", os.devnull],
}


@pytest.mark.parametrize("many", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", COMMANDS)
def test_peak_memory_does_not_grow(tmp_path, command, many):
    few_kb, many_kb = (
        peak(*(write(tmp_path / f"{n}.jsonl", n) if a == "IN" else a for a in COMMANDS[command]))
        for n in (FEW, many)
    )
    print(f"{command}: {few_kb / 1024:.1f} MiB for {FEW}, {many_kb / 1024:.1f} MiB for {many}")
    assert many_kb < MORE * few_kb


@pytest.mark.parametrize("many", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_resuming_keeps_digests_only(tmp_path, many):
    """A resumed run remembers 16 bytes and an id per finished trajectory, not their text: less
    than 200 bytes each, 4 MB for 20 000 of 2.5 kB."""
    kilobytes = []
    for n in (FEW, many):
        scored, out = write(tmp_path / "in.jsonl", n), tmp_path / "out.jsonl"
        peak("score", "--reuse", scored, "-o", out, "--overwrite")
        kilobytes.append(peak("score", "--reuse", scored, "-o", out, "--resume"))
    print(f"score --resume: {kilobytes[0] / 1024:.1f} and {kilobytes[1] / 1024:.1f} MiB")
    assert (kilobytes[1] - MORE * kilobytes[0]) * 1024 < 200 * many
