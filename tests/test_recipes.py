"""The shell loops, with a stub in place of optima-lite: which commands run, and when again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Writes as many lines as --limit says, or as its input file has, to -o (sft and dpo make a
# directory), and logs its command line. Dies in the middle of the command that STUB_KILL names.
STUB = """#!/usr/bin/env bash
line=$(printf '%q ' "$@")
printf '%s\\n' "$line" >> "$STUB_LOG"  # in one write: the commands of a pipe run side by side
command=$1 limit=1 out=/dev/stdout
[ -f "${2:-}" ] && limit=$(wc -l < "$2")
while [ $# -gt 0 ]; do
  case $1 in --limit) limit=$2 ;; -o) out=$2 ;; esac
  shift
done
[ -p /dev/stdin ] && cat > /dev/null
if [ "$command" = "${STUB_KILL:-}" ]; then echo torn > "$out"; kill -9 $$; fi
if [ "$command" = sft ] || [ "$command" = dpo ]; then mkdir "$out"; else seq "$limit" > "$out"; fi
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

    def run(
        name: str | Path, *args: str, **variables: object
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log.write_text("")
        env = os.environ | {k: str(v) for k, v in variables.items()} | {"STUB_LOG": str(log)}
        env["PATH"] = f"{stub.parent}:{env['PATH']}"
        done = subprocess.run(
            ["bash", str(RECIPES / f"{name}.sh"), *args],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done, log.read_text().splitlines()

    return run


def steps(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


SFT_ROUND = ["tasks", "gen", "score", "select", "sft", "gen"]
DPO_ROUND = ["tasks", "tree", "select", "dpo", "gen"]
START = ["tasks", "gen", *SFT_ROUND]
SMALL = {"TASKS": 3, "TREES": 2, "HELD_OUT": 2}


def models(lines: list[str], command: str, option: str = "--model") -> list[str]:
    """What --model each call of a command had, without the directories in front."""
    words = [line.split() for line in lines if line.split()[0] == command]
    return ["/".join(w[w.index(option) + 1].split("/")[-2:]) for w in words]


def test_the_loop_and_what_a_second_call_does(recipe, tmp_path) -> None:
    out = tmp_path / "my runs" / "demo"
    done, lines = recipe("quickstart", OUT=out, ROUNDS=1, **SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(steps(lines)) == sorted([*START, *SFT_ROUND, "eval"])
    starts = [line for line in lines if line.startswith("sft ")]
    assert "--model relay" in starts[0]
    assert f"--model {str(out).replace(' ', chr(92) + ' ')}/init" in starts[1]
    # Measurements are made again only to learn that they are complete; training is not.
    done, lines = recipe("quickstart", OUT=out, ROUNDS=1, **SMALL)
    assert steps(lines) == ["gen", "gen", "gen", "eval"]
    # More rounds and more held-out tasks go on from there.
    done, lines = recipe("quickstart", OUT=out, ROUNDS=2, TASKS=3, HELD_OUT=4)
    assert sorted(steps(lines)) == sorted(["tasks", "gen", "gen", "gen", *SFT_ROUND, "eval"])
    assert len((out / "test.jsonl").read_text().splitlines()) == 4


def test_a_recipe_may_be_edited_while_it_runs(recipe, tmp_path) -> None:
    """bash reads a script as it goes: lines added in place would be run, or torn words of them."""
    recipes = tmp_path / "recipes"
    shutil.copytree(RECIPES, recipes)
    stub = tmp_path / "bin" / "optima-lite"
    stub.write_text(f"{STUB}printf '\\n%200s\\n' 'touch edited' >> {recipes}/relay.sh\n")
    done, _ = recipe(recipes / "relay", "isft", OUT=tmp_path / "out", ROUNDS=0, **SMALL)
    assert done.returncode == 0, done.stderr
    assert "touch edited" in (recipes / "relay.sh").read_text()
    assert not (tmp_path / "edited").exists()


def test_the_three_methods_share_the_initialization(recipe, tmp_path) -> None:
    out = tmp_path / "out"
    done, lines = recipe("relay", "isft", OUT=out, ROUNDS=2, **SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(steps(lines)) == sorted([*START, *SFT_ROUND, *SFT_ROUND, "eval"])
    assert models(lines, "sft") == ["relay", "out/init", "isft/round1"]
    again = ["gen", "gen"]  # looks at the measurements of start and init

    done, lines = recipe("relay", "idpo", OUT=out, ROUNDS=2, **SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(steps(lines)) == sorted([*again, *DPO_ROUND, *DPO_ROUND, "eval"])
    assert models(lines, "tree") == models(lines, "dpo") == ["out/init", "idpo/round1"]
    assert models(lines, "tree", "--base") == ["smollm2", "smollm2"]
    assert not any("--alpha" in line for line in lines)

    done, lines = recipe("relay", "isft_dpo", OUT=out, ROUNDS=3, **SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(steps(lines)) == sorted([*again, *SFT_ROUND, *DPO_ROUND, *SFT_ROUND, "eval"])
    assert models(lines, "sft") == ["out/init", "isft_dpo/round2"]
    assert models(lines, "dpo") == ["isft_dpo/round1"]
    assert all("--alpha 0" in line for line in lines if line.startswith("dpo "))
    (table,) = [line for line in lines if line.startswith("eval ")]
    names = ["start", "init", "iSFT-DPO-1", "iSFT-DPO-2", "iSFT-DPO-3"]
    assert [w for w in table.split() if w in names] == names

    done, lines = recipe("relay", "compare", OUT=out)
    assert steps(lines) == ["eval"]
    files = [word for word in lines[0].split() if word.endswith(".jsonl")]
    assert [file[len(str(out)) + 1 :] for file in files] == [
        "eval-start.jsonl",
        "eval-init.jsonl",
        "isft/eval-round2.jsonl",
        "idpo/eval-round2.jsonl",
        "isft_dpo/eval-round3.jsonl",
    ]


def test_debate_trains_from_the_base_and_prefers_from_the_last_model(recipe, tmp_path) -> None:
    out = tmp_path / "out"
    done, lines = recipe("relay", "isft_dpo", OUT=out, ROUNDS=3, START="base", **SMALL)
    assert done.returncode == 0, done.stderr
    assert models(lines, "sft") == ["relay", "relay", "relay"]
    assert models(lines, "dpo") == ["isft_dpo/round1"]
    talking = [m for m in models(lines, "gen") if m != "relay"]
    assert talking[-2:] == ["isft_dpo/round2", "isft_dpo/round3"]


def test_compare_takes_what_was_run_on_all_tasks(recipe, tmp_path) -> None:
    out = tmp_path / "out"
    done, lines = recipe("relay", "compare", OUT=out)
    assert (done.returncode, lines) == (1, [])
    assert "error: no method was run in" in done.stderr
    recipe("relay", "idpo", OUT=out, ROUNDS=1, **SMALL)
    done, lines = recipe("relay", "compare", OUT=out)
    assert (done.returncode, steps(lines)) == (0, ["eval"]), done.stderr
    assert "idpo/eval-round1.jsonl" in lines[0]
    recipe("relay", "isft", OUT=out, ROUNDS=1, **SMALL | {"HELD_OUT": 5})
    done, lines = recipe("relay", "compare", OUT=out)
    assert (done.returncode, lines) == (1, [])
    assert "idpo was not measured on all 5 tasks" in done.stderr


def test_models_and_files_may_have_spaces_and_numbers_are_checked(recipe, tmp_path) -> None:
    done, lines = recipe(
        "hotpotqa", "idpo", OUT=tmp_path / "o", SCALE="tiny", ROUNDS=1, MODEL="my model",
        TRAIN="a b.json", TEST="c; d.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any("--model my\\ model" in line for line in lines)
    assert any("--base my\\ model" in line for line in lines)
    assert {w for line in lines for w in (r"a\ b.json", r"c\;\ d.json") if w in line} == {
        r"a\ b.json", r"c\;\ d.json",
    }  # fmt: skip
    done, lines = recipe("relay", "isft", OUT=tmp_path / "p", HELD_OUT="abc")
    assert (done.returncode, lines) == (2, [])
    assert "HELD_OUT is a whole number from 1 to 999999999, not abc" in done.stderr


@pytest.mark.parametrize("command", ["gen", "tree", "dpo", "sft"])
def test_a_killed_step_is_resumed(recipe, tmp_path, command) -> None:
    out = tmp_path / "out"
    done, lines = recipe("relay", "isft_dpo", OUT=out, ROUNDS=2, STUB_KILL=command, **SMALL)
    assert done.returncode != 0
    assert steps(lines)[-1] in (command, "select", "tasks")
    whole = recipe("relay", "isft_dpo", OUT=tmp_path / "whole", ROUNDS=2, **SMALL)[1]
    for file in out.rglob("*"):  # what the stub leaves where a directory belongs
        if file.name in ("init", "round1", "round2") and file.is_file():
            file.unlink()
    done, more = recipe("relay", "isft_dpo", OUT=out, ROUNDS=2, **SMALL)
    assert done.returncode == 0, done.stderr
    (killed,) = [line for line in lines if line.startswith(f"{command} ")][-1:]
    assert killed in more, "the same command again"
    assert "--resume" in killed
    trained = [line for line in lines + more if line.split()[0] in ("sft", "dpo")]
    assert len(set(trained)) == 3
    assert len(trained) == 3 + (command in ("sft", "dpo"))
    assert steps(whole)[-1] == steps(more)[-1] == "eval"


def test_unknown_methods_and_other_settings_are_refused(recipe, tmp_path) -> None:
    out = tmp_path / "demo"
    done, lines = recipe("relay", "ppo", OUT=out)
    assert (done.returncode, lines) == (2, [])
    assert "ppo is not a method" in done.stderr
    recipe("quickstart", OUT=out, ROUNDS=0, **SMALL)
    for changed in ({"TASKS": 5}, {"SEED": 1}, {"MODEL": "other"}, {"TUNE": "full"}):
        done, lines = recipe("quickstart", OUT=out, ROUNDS=0, **SMALL | changed)
        assert (done.returncode, lines) == (1, [])
        ((name, value),) = changed.items()
        assert f"{name}={value}" in done.stderr
        assert "was made with other settings" in done.stderr
    # What a method does not use does not concern it.
    assert recipe("relay", "isft", OUT=out, ROUNDS=1, DPO="--beta 0.5", **SMALL)[0].returncode == 0
    assert recipe("relay", "idpo", OUT=out, ROUNDS=1, **SMALL)[0].returncode == 0
    done, _ = recipe("relay", "idpo", OUT=out, ROUNDS=1, DPO="--beta 0.5", **SMALL)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("SEED", value) for value in ("08", "5000000", "-1", "1" * 30)),
        *((number, "0") for number in ("TREES", "TASKS", "N", "HELD_OUT")),
        *(("ROUNDS", "two"), ("TUNE", "bogus"), ("LOAD", "8bit"), ("START", "end")),
    ],
)
def test_values_that_cannot_work_are_refused_at_once(recipe, tmp_path, name, value) -> None:
    done, lines = recipe("relay", OUT=tmp_path / "out", **SMALL | {name: value})
    assert (done.returncode, lines) == (2, [])
    assert done.stderr.startswith(f"error: {name} is ")
    assert value in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["relay", "hotpotqa"])
def test_options_of_single_commands_come_from_outside(recipe, tmp_path, name) -> None:
    given = {"GEN": "-t 0.11", "INIT_GEN": "-t 0.12", "SCORE": "--lambda-token 0.13"}
    given |= {"SELECT": "--theta 0.14", "INIT_SELECT": "--theta 0.15", "SFT": "--epochs 16"}
    given |= {"INIT_SFT": "--epochs 17", "PAIRS": "--theta 0.18", "DPO": "--epochs 19"}
    done, lines = recipe(name, "isft_dpo", OUT=tmp_path / "out", ROUNDS=2, **SMALL | given)
    assert done.returncode == 0, done.stderr
    text = "\n".join(lines)
    for value in given.values():
        assert f" {value} " in f"{text} ".replace("\n", " \n"), value


def test_settings_may_change_until_something_came_of_them(recipe, tmp_path) -> None:
    out = tmp_path / "demo"
    # A mistyped model: nothing was measured. Nor do the test tasks of another seed stay.
    done, _ = recipe("relay", "idpo", OUT=out, STUB_KILL="gen", MODEL="relai", SEED=7, **SMALL)
    assert done.returncode != 0
    (out / "eval-start.jsonl").unlink(missing_ok=True)  # the stub's; gen makes no file on errors
    # "Nothing is left to train on", in the initialization and in the first round.
    done, lines = recipe("relay", "idpo", OUT=out, STUB_KILL="sft", ROUNDS=1, **SMALL)
    assert done.returncode != 0
    assert any(x.startswith("tasks relay --split test --limit 2 --seed 0 ") for x in lines)
    (out / "init").unlink()
    done, lines = recipe(
        "relay", "idpo", OUT=out, STUB_KILL="dpo", INIT_SELECT="--top 1", ROUNDS=1, **SMALL
    )
    assert done.returncode != 0
    assert any("init-scored.jsonl --top 1" in line for line in lines)
    (out / "idpo" / "round1").unlink()
    again = {"INIT_SELECT": "--top 1", "PAIRS": "--theta-diff 0.1", "ROUNDS": 1, **SMALL}
    done, lines = recipe("relay", "idpo", OUT=out, **again)
    assert done.returncode == 0, done.stderr
    assert any("round1-trees.jsonl --theta-diff 0.1" in line for line in lines)
    done, lines = recipe("relay", "idpo", OUT=out, **again | {"PAIRS": ""})
    assert (done.returncode, lines) == (1, [])


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


def test_hotpotqa_has_the_papers_numbers(recipe, tmp_path) -> None:
    """Table 8: iSFT-DPO has an α of 0, another β and fewer epochs; LoRA ten times the rates."""
    numbers = {"idpo": ("0.1", "1"), "isft_dpo": ("0.5", "0")}
    for tune, lr in (("full", "5e-7"), ("lora", "5e-6")):
        out = tmp_path / tune
        for method, (beta, alpha) in numbers.items():
            done, lines = recipe("hotpotqa", method, OUT=out, ROUNDS=2, TUNE=tune, **SMALL)
            assert done.returncode == 0, done.stderr
            found = [line for line in lines if line.startswith("dpo ")]
            wanted = f"--epochs 1 --batch-size 64 --lr {lr} --beta {beta} --alpha {alpha} --resume"
            assert found
            assert all(wanted in line for line in found)
            assert all("--lambda-token 0.6" in x for x in lines if x.startswith("tree "))
            assert all(
                "--theta 0.4 --theta-diff 0.2" in x for x in lines if "-trees.jsonl --th" in x
            )
        sft = [line for line in lines if line.startswith("sft ")]
        assert ["--epochs 2" in line for line in sft] == [True]
