"""The shell loops, with a stub in place of optima-lite: which commands run, and when again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Writes as many lines as --limit says to -o (a directory for sft) and logs its command line.
STUB = """#!/usr/bin/env bash
line=$(printf '%q ' "$@")
printf '%s\\n' "$line" >> "$STUB_LOG"  # in one write: the commands of a pipe run side by side
command=$1 limit=1 out=/dev/stdout
while [ $# -gt 0 ]; do
  case $1 in --limit) limit=$2 ;; -o) out=$2 ;; esac
  shift
done
[ -p /dev/stdin ] && cat > /dev/null
if [ "$command" = sft ]; then mkdir "$out"; else seq "$limit" > "$out"; fi
"""


@pytest.fixture
def recipe(tmp_path: Path):
    """Runs a recipe; gives the finished process and the stub's command lines."""
    if not shutil.which("bash"):
        pytest.skip("recipes are for bash")
    stub = tmp_path / "bin" / "optima-lite"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    log = tmp_path / "log"

    def run(name: str, **variables: object) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log.write_text("")
        env = os.environ | {k: str(v) for k, v in variables.items()} | {"STUB_LOG": str(log)}
        env["PATH"] = f"{stub.parent}:{env['PATH']}"
        done = subprocess.run(
            ["bash", str(RECIPES / f"{name}.sh")],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done, log.read_text().splitlines()

    return run


def steps(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


ROUND = ["tasks", "gen", "score", "select", "sft", "gen"]


def test_the_loop_and_what_a_second_call_does(recipe, tmp_path) -> None:
    out = tmp_path / "my runs" / "demo"
    done, lines = recipe("quickstart", OUT=out, ROUNDS=1, TASKS=3, HELD_OUT=2)
    assert done.returncode == 0, done.stderr
    assert sorted(steps(lines)) == sorted(["tasks", "gen", *ROUND, *ROUND, "eval"])
    starts = [line for line in lines if line.startswith("sft ")]
    assert "--model relay" in starts[0]
    assert f"--model {str(out).replace(' ', chr(92) + ' ')}/round0" in starts[1]
    # Measurements are made again only to learn that they are complete; training is not.
    done, lines = recipe("quickstart", OUT=out, ROUNDS=1, TASKS=3, HELD_OUT=2)
    assert steps(lines) == ["gen", "gen", "gen", "eval"]
    # More rounds and more held-out tasks go on from there.
    done, lines = recipe("quickstart", OUT=out, ROUNDS=2, TASKS=3, HELD_OUT=4)
    assert sorted(steps(lines)) == sorted(["tasks", "gen", "gen", "gen", *ROUND, "eval"])
    assert len((out / "test.jsonl").read_text().splitlines()) == 4


def test_other_settings_do_not_go_on_in_the_same_directory(recipe, tmp_path) -> None:
    out = tmp_path / "demo"
    recipe("quickstart", OUT=out, ROUNDS=0, TASKS=3, HELD_OUT=2)
    done, lines = recipe("quickstart", OUT=out, ROUNDS=0, TASKS=5, HELD_OUT=2)
    assert (done.returncode, lines) == (1, [])
    assert "TASKS=5" in done.stderr
    assert "was made with other settings" in done.stderr


def test_hotpotqa_starts_with_formats(recipe, tmp_path) -> None:
    done, lines = recipe("hotpotqa", OUT=tmp_path / "out", SCALE="tiny", TRAIN="t.json", ROUNDS=1)
    assert done.returncode == 0, done.stderr
    made = [line for line in lines if line.startswith("gen --model")]
    assert [("--formats" in line, "-t 0.3" in line) for line in made] == [
        (True, True),
        (False, False),
    ]
    training = [line for line in lines if line.startswith("tasks hotpotqa --shuffle")]
    assert len(training) == 2
    assert all("--source t.json" in line for line in training)
