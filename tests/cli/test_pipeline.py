"""tasks | gen | score | select on a tiny model: records, streaming, resuming, refusing."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from optima_lite.records import Example, Pair, Record, Task, Trajectory, Tree
from optima_lite.selection import history
from optima_lite.teams import load_formats, view

N = 3
TASKS = 5
LIMITS = ["--load", "fp32", "--max-turns", 4, "--max-turn-tokens", 48, "-n", N]


def load(data: bytes | Path, kind: type[Record]) -> list[Any]:
    content = data.read_bytes() if isinstance(data, Path) else data
    assert content == b"" or content.endswith(b"\n")
    return [kind.from_dict(orjson.loads(line)) for line in content.splitlines()]


@pytest.fixture(scope="module")
def made(launcher, tiny_dir, tmp_path_factory) -> SimpleNamespace:
    """The files of one round, made step by step. Tests must not write to them."""
    d = tmp_path_factory.mktemp("round")
    paths = {name: d / f"{name}.jsonl" for name in ("tasks", "talks", "scored", "examples")}
    launcher.ok("tasks", "relay", "--limit", TASKS, "-o", paths["tasks"])
    launcher.ok("gen", paths["tasks"], "--model", tiny_dir, *LIMITS, "-o", paths["talks"])
    launcher.ok(
        "score", paths["talks"], "--model", tiny_dir, "--load", "fp32", "-o", paths["scored"]
    )
    result = launcher.ok("select", paths["scored"], "--theta", -1, "-o", paths["examples"])
    return SimpleNamespace(**paths, select=result)


@pytest.fixture
def copy(made, tmp_path):
    """Copies of the round's files that a test may change."""
    for name in ("tasks", "talks", "scored"):
        shutil.copy(getattr(made, name), tmp_path)
    return SimpleNamespace(
        **{n: tmp_path / f"{n}.jsonl" for n in ("tasks", "talks", "scored")}, dir=tmp_path
    )


# -- what each step writes --------------------------------------------------------------------


def test_gen_writes_n_whole_trajectories_per_task(made, tiny_dir):
    tasks, talks = load(made.tasks, Task), load(made.talks, Trajectory)
    assert [t.id for t in talks] == [f"{task.id}#{k}" for task in tasks for k in range(N)]
    assert [t.task for t in talks] == [task for task in tasks for _ in range(N)]
    assert {t.model for t in talks} == {str(tiny_dir)}
    assert talks[0].settings == {
        "n": N, "temperature": 0.7, "seed": 0, "formats": None, "max_turns": 4,
        "max_turn_tokens": 48, "context": None, "load": "fp32",
    }  # fmt: skip
    for talk in talks:
        assert 1 <= len(talk.turns) <= 4
        assert [t.agent for t in talk.turns] == ["Alice", "Bob", "Alice", "Bob"][: len(talk.turns)]
        assert talk.tokens == sum(turn.tokens for turn in talk.turns)
        assert talk.reward is None
    assert len({repr(t.turns) for t in talks}) == len(talks), "seeds make them differ"
    assert {t.end for t in talks} & {"turn_limit", "agreement"}, "some are whole"


def test_score_adds_the_reward_and_nothing_else(made, tiny_dir):
    talks, scored = load(made.talks, Trajectory), load(made.scored, Trajectory)
    assert [r.to_dict() for r in talks] == [
        {k: v for k, v in r.to_dict().items() if k not in ("reward", "score")} for r in scored
    ]
    for i in range(0, len(scored), N):
        longest = max(t.tokens for t in scored[i : i + N])
        for t in scored[i : i + N]:
            assert len(t.score.losses) == len(t.turns)
            assert t.score.tokens == t.tokens / longest
            assert t.score.base == str(tiny_dir.resolve())
            if not t.score.degenerate:
                # A random model is about as surprised as by a uniform one: ln(vocabulary) ≈ 5.8.
                assert 3 < t.score.loss < 12
                assert t.reward == pytest.approx(-0.6 * t.score.tokens + 1 / t.score.loss)


def test_select_writes_examples(made):
    examples = load(made.examples, Example)
    scored = {t.id: t for t in load(made.scored, Trajectory)}
    assert examples
    chosen = {e.trajectory_id for e in examples}
    assert len(chosen) <= 4, "⌈0.7 · 5⌉ tasks at most"
    assert len({scored[id].task.id for id in chosen}) == len(chosen), "one per task"
    for example in examples:
        assert scored[example.trajectory_id].end in ("agreement", "turn_limit")
        assert example.messages[0]["role"] == "system"
        assert example.messages[-1]["role"] == "assistant"
    assert "select: 5 tasks" in made.select.stderr


# -- pipes ------------------------------------------------------------------------------------


def test_the_chain_in_pipes_gives_the_same_as_files(launcher, made, tiny_dir, tmp_path):
    """Greedy: what runs in one batch depends on when lines arrive, and rounding on the batch."""
    greedy, scored = [*LIMITS, "-t", 0], tmp_path / "scored.jsonl"
    talks = tmp_path / "talks.jsonl"
    launcher.ok("gen", made.tasks, "--model", tiny_dir, *greedy, "-o", talks)
    launcher.ok("score", talks, "--model", tiny_dir, "--load", "fp32", "-o", scored)
    examples = launcher.ok("select", scored, "--theta", -1).stdout
    assert examples

    pipes = [tmp_path / f"pipe{i}" for i in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    out = tmp_path / "examples.jsonl"
    chain = [
        launcher.start("tasks", "relay", "--limit", TASKS, stdout=pipes[0]),
        launcher.start("gen", "--model", tiny_dir, *greedy, stdin=pipes[0], stdout=pipes[1]),
        launcher.start(
            "score", "-", "--model", tiny_dir, "--load", "fp32", stdin=pipes[1], stdout=pipes[2]
        ),
        launcher.start("select", "--theta", -1, stdin=pipes[2], stdout=out),
    ]
    assert [process.wait() for process in chain] == [0, 0, 0, 0]
    assert out.read_bytes() == examples
    assert [p.stderr for p in (chain[0], chain[2])] == ["", ""]
    assert re.fullmatch(r"gen: 15 conversations, \d+ tokens; [a-z_0-9, ]+\n", chain[1].stderr)


def test_gen_and_score_stream(launcher, made, tiny_dir, tmp_path):
    """The first scored record comes out while the last task has not gone in."""
    pipes = [tmp_path / f"pipe{i}" for i in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    tasks = made.tasks.read_bytes().splitlines(keepends=True)
    gen = launcher.start(
        "gen", "--model", tiny_dir, *LIMITS, "--batch-size", 2, stdin=pipes[0], stdout=pipes[1]
    )
    score = launcher.start(
        "score", "--model", tiny_dir, "--load", "fp32", stdin=pipes[1], stdout=pipes[2]
    )
    timer = threading.Timer(60, gen.kill)  # a hang becomes an empty read
    timer.start()
    with open(pipes[0], "wb", buffering=0) as into, open(pipes[2], "rb") as out:
        for line in tasks[:-1]:
            into.write(line)
        first = out.readline()
        assert Trajectory.from_dict(orjson.loads(first)).reward is not None
        into.write(tasks[-1])
        into.close()
        rest = out.read()
    timer.cancel()
    assert (gen.wait(), score.wait()) == (0, 0)
    assert [t.id for t in load(first + rest, Trajectory)] == [
        t.id for t in load(made.scored, Trajectory)
    ]


# -- batches and draws ------------------------------------------------------------------------


def said(data: bytes) -> list[tuple[str, list[str]]]:
    return [(t.id, [turn.text for turn in t.turns]) for t in load(data, Trajectory)]


def test_greedy_conversations_do_not_depend_on_the_batch(launcher, made, tiny_dir):
    greedy = ["gen", made.tasks, "--model", tiny_dir, *LIMITS, "-t", 0]
    one = said(launcher.ok(*greedy, "--batch-size", 1).stdout)
    eight = said(launcher.ok(*greedy, "--batch-size", 8).stdout)
    assert one == eight
    assert any(len(turns) > 1 for _, turns in one)
    assert all(turns == one[0][1] for _, turns in one[:N]), "greedy is greedy for every seed"


def test_the_seed_decides(launcher, made, tiny_dir):
    gen = ["gen", made.tasks, "--model", tiny_dir, *LIMITS]
    assert launcher.ok(*gen).stdout == made.talks.read_bytes()
    other = said(launcher.ok(*gen, "--seed", 1).stdout)
    assert [turns for _, turns in other] != [turns for _, turns in said(made.talks.read_bytes())]


def test_formats_are_recorded_and_never_trained(launcher, made, tiny_dir, tmp_path):
    talks, scored = tmp_path / "f.jsonl", tmp_path / "s.jsonl"
    launcher.ok("gen", made.tasks, "--model", tiny_dir, *LIMITS, "--formats", "-o", talks)
    pool = load_formats()
    records = load(talks, Trajectory)
    assert {t.format for t in records} <= set(pool)
    assert len({t.format for t in records}) > 3
    assert records[0].settings["formats"] == "built-in"
    launcher.ok("score", talks, "--model", tiny_dir, "--load", "fp32", "-o", scored)
    examples = launcher.ok("select", scored, "--theta", -9, "--top", 1).stdout.decode()
    assert examples
    assert not any(text in examples for text in pool.values())


def test_a_window_that_is_too_small(launcher, made, tiny_dir, tmp_path):
    """Nothing was said, so there is nothing to reward or to train on: 0 and no examples."""
    talks, scored = tmp_path / "talks.jsonl", tmp_path / "scored.jsonl"
    launcher.ok("gen", made.tasks, "--model", tiny_dir, *LIMITS, "--context", 32, "-o", talks)
    records = load(talks, Trajectory)
    assert len(records) == TASKS * N
    assert {(t.end, t.turns) for t in records} == {("context_full", ())}
    launcher.ok("score", talks, "--model", tiny_dir, "-o", scored)
    assert {t.reward for t in load(scored, Trajectory)} == {0.0}
    result = launcher.ok("select", scored, "--theta", -9)
    assert result.stdout == b""
    assert "15 conversations cut, failed or degenerate, 5 tasks with nothing else" in result.stderr
    assert "every conversation was cut, failed or degenerate" in result.stderr


# -- gen --resume -----------------------------------------------------------------------------


def test_gen_resume_completes_a_part(launcher, made, tiny_dir, tmp_path):
    """Two whole groups, one conversation of the third and half a line: the two groups stay."""
    full = made.talks.read_bytes()
    lines = full.splitlines(keepends=True)
    out = tmp_path / "talks.jsonl"
    out.write_bytes(b"".join(lines[: 2 * N + 1]) + lines[2 * N + 1][:50])
    gen = ["gen", made.tasks, "--model", tiny_dir, *LIMITS, "-o", out]
    result = launcher.ok(*gen, "--resume")
    assert "kept 2 finished tasks" in result.stderr
    again = out.read_bytes()
    assert again.startswith(b"".join(lines[: 2 * N]))
    assert [t.id for t in load(again, Trajectory)] == [t.id for t in load(full, Trajectory)]
    refused = launcher.run(*gen)
    assert refused.code == 1
    assert "--resume goes on after its records, --overwrite replaces it" in refused.stderr
    assert out.read_bytes() == again


def test_gen_resume_of_a_finished_file_needs_no_model(launcher, made, copy):
    """The model is named in the records, but it is gone."""
    lines = [
        orjson.loads(line) | {"model": "gone"} for line in copy.talks.read_bytes().splitlines()
    ]
    copy.talks.write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in lines))
    before = copy.talks.read_bytes()
    gen = ["gen", copy.tasks, "--model", "gone", *LIMITS, "-o", copy.talks, "--resume"]
    assert "kept 5 finished tasks" in launcher.ok(*gen).stderr
    assert copy.talks.read_bytes() == before


def refuses(launcher, path: Path, *argv: object) -> str:
    """The one line that a refused run says; the file is as it was."""
    before = path.read_bytes()
    result = launcher.run(*argv)
    assert result.code == 1, result.stderr
    assert path.read_bytes() == before
    (line,) = result.stderr.splitlines()
    return line


def test_gen_resume_names_the_settings_that_differ(launcher, copy, tiny_dir):
    gen = ["gen", copy.tasks, "--model", tiny_dir, "-o", copy.talks, "--resume"]
    line = refuses(
        launcher, copy.talks, *gen, *LIMITS, "-n", 4, "-t", 0.5, "--seed", 3, "--load", "bf16"
    )
    assert line == (
        f"error: {copy.talks} was made with other settings: load was 'fp32', now 'bf16'; "
        "n was 3, now 4; seed was 0, now 3; temperature was 0.7, now 0.5"
        " (--overwrite, or removing it, starts anew)"
    )
    line = refuses(launcher, copy.talks, "gen", copy.tasks, "--model", "x/y", *LIMITS, *gen[4:])
    assert f"other settings: model was '{tiny_dir}', now 'x/y'" in line
    line = refuses(launcher, copy.talks, *gen, *LIMITS, "--formats", "--max-turns", 3)
    assert "formats was not given, now 'built-in'; max_turns was 4, now 3" in line
    line = refuses(launcher, copy.talks, *gen, *LIMITS, "--team", "exchange")
    assert "made from other input: team exchange changed in relay/train/" in line


def test_gen_resume_refuses_other_input(launcher, copy, tiny_dir):
    tasks = [orjson.loads(line) for line in copy.tasks.read_bytes().splitlines()]
    tasks[3]["question"] += " Now?"
    copy.tasks.write_bytes(b"".join(orjson.dumps(task) + b"\n" for task in tasks))
    gen = ["gen", copy.tasks, "--model", tiny_dir, *LIMITS, "-o", copy.talks, "--resume"]
    assert f"made from other input: the task changed in {tasks[3]['id']}" in refuses(
        launcher, copy.talks, *gen
    )


def test_gen_resume_goes_on_with_more_tasks(launcher, copy, tiny_dir):
    before = copy.talks.read_bytes()
    launcher.ok("tasks", "relay", "--limit", TASKS + 2, "-o", copy.tasks, "--overwrite")
    gen = ["gen", copy.tasks, "--model", tiny_dir, *LIMITS, "-o", copy.talks, "--resume"]
    launcher.ok(*gen)
    assert copy.talks.read_bytes().startswith(before)
    assert len(load(copy.talks, Trajectory)) == (TASKS + 2) * N


def test_gen_refuses_an_id_that_comes_twice(launcher, copy, tiny_dir):
    copy.tasks.write_bytes(copy.tasks.read_bytes() * 2)
    result = launcher.run("gen", copy.tasks, "--model", tiny_dir, *LIMITS)
    assert result.code == 1
    assert f"{copy.tasks}:6: relay/train/" in result.stderr
    assert "ids must be unique" in result.stderr


# -- score ------------------------------------------------------------------------------------


def test_score_resume_completes_a_part(launcher, made, copy, tiny_dir):
    full = copy.scored.read_bytes()
    lines = full.splitlines(keepends=True)
    score = ["score", copy.talks, "--model", tiny_dir, "--load", "fp32", "-o", copy.scored]
    for part in (b"", b"".join(lines[:N]), b"".join(lines[: 2 * N + 2]) + lines[8][:99], full):
        copy.scored.write_bytes(part)
        result = launcher.ok(*score, "--resume")
        assert copy.scored.read_bytes() == full
        kept = part.count(b"\n") // N
        assert (f"kept {kept} finished tasks" in result.stderr) is bool(kept)


def test_score_resume_names_the_settings_that_differ(launcher, copy, tiny_dir, tmp_path):
    score = ["score", copy.talks, "-o", copy.scored, "--resume"]
    model = ["--model", tiny_dir, "--load", "fp32"]
    line = refuses(launcher, copy.scored, *score, *model, "--lambda-token", 0.1)
    assert "made with other settings: lambda_token was 0.6, now 0.1" in line
    line = refuses(launcher, copy.scored, *score, *model, "--lambda-loss", 2)
    assert "lambda_loss was 1.0, now 2.0" in line
    line = refuses(launcher, copy.scored, *score, *model, "--loss-context", "dialogue")
    assert "loss_context was 'none', now 'dialogue'" in line
    other = tmp_path / "other"
    shutil.copytree(tiny_dir, other)
    line = refuses(launcher, copy.scored, *score, "--model", other)
    assert f"base was '{tiny_dir.resolve()}', now '{other}'" in line


def test_score_resume_refuses_other_input(launcher, copy, tiny_dir):
    talks = [orjson.loads(line) for line in copy.talks.read_bytes().splitlines()]
    talks[4]["turns"][0]["text"] = "something else"
    copy.talks.write_bytes(b"".join(orjson.dumps(talk) + b"\n" for talk in talks))
    score = ["score", copy.talks, "--model", tiny_dir, "-o", copy.scored, "--resume"]
    line = refuses(launcher, copy.scored, *score)
    assert f"the conversations changed in {talks[4]['task']['id']}" in line
    line = refuses(launcher, copy.talks, "score", copy.scored, "--model", tiny_dir,
                   "-o", copy.talks, "--resume")  # fmt: skip
    assert "records without a score" in line


def test_score_refuses_a_group_with_members_missing(launcher, copy, tiny_dir):
    """R_token compares within the group: without a member the others' rewards would change."""
    lines = copy.talks.read_bytes().splitlines(keepends=True)
    copy.talks.write_bytes(b"".join(lines[:4] + lines[5:]))
    result = launcher.run("score", copy.talks, "--model", tiny_dir, "--load", "fp32")
    assert result.code == 1
    assert "has 2 of 3 trajectories: finish gen --resume" in result.stderr
    assert len(load(result.stdout, Trajectory)) == N, "the group before it is written"


def test_score_refuses_groups_that_are_apart(launcher, copy, tiny_dir):
    lines = copy.scored.read_bytes().splitlines(keepends=True)
    copy.scored.write_bytes(b"".join(lines + lines[:1]))
    result = launcher.run("score", copy.scored, "--reuse")
    assert result.code == 1
    assert f"{copy.scored}:16: relay/train/" in result.stderr
    assert "must stand together" in result.stderr


def test_reuse_reproduces_the_rewards(launcher, made):
    assert launcher.ok("score", made.scored, "--reuse").stdout == made.scored.read_bytes()


@pytest.mark.parametrize(("token", "loss"), [(0, 0), (0.3, 1), (0, 2.5), (5, 0)])
def test_reuse_sweeps_the_weights(launcher, made, token, loss):
    """Eq. 1 again, from the parts that are stored; the parts themselves stay."""
    swept = launcher.ok(
        "score", made.scored, "--reuse", "--lambda-token", token, "--lambda-loss", loss
    ).stdout
    for old, new in zip(load(made.scored, Trajectory), load(swept, Trajectory), strict=True):
        part = new.score
        assert (part.lambda_token, part.lambda_loss) == (token, loss)
        assert (part.task, part.tokens, part.losses) == (
            old.score.task, old.score.tokens, old.score.losses
        )  # fmt: skip
        if part.degenerate:
            assert new.reward == -token
        else:
            assert new.reward == part.task - token * part.tokens + loss / part.loss


def test_reuse_needs_stored_losses(launcher, made):
    result = launcher.run("score", made.talks, "--reuse")
    assert result.code == 1
    assert f"{made.talks}:3: " in result.stderr, "the last line of the group"
    assert "#0 has no stored losses: score it with --model first" in result.stderr


def test_loss_context_changes_all_but_the_first_turn(launcher, made, tiny_dir):
    out = launcher.ok(
        "score", made.talks, "--model", tiny_dir, "--load", "fp32", "--loss-context", "dialogue"
    ).stdout
    pairs = zip(load(made.scored, Trajectory), load(out, Trajectory), strict=True)
    differing = 0
    for alone, within in pairs:
        assert within.score.loss_context == "dialogue"
        for k, (a, b) in enumerate(zip(alone.score.losses, within.score.losses, strict=True)):
            if k == 0:
                assert a == pytest.approx(b, rel=1e-4)
            else:
                differing += a != b
    assert differing


def test_an_output_that_is_the_input_is_refused(launcher, copy, tiny_dir):
    """--overwrite would empty the file before it is read."""
    line = refuses(
        launcher, copy.scored, "score", copy.scored, "--reuse", "-o", copy.scored, "--overwrite"
    )
    assert line == f"error: {copy.scored} is the input: write to another file"
    gen = ["gen", copy.tasks, "--model", tiny_dir, "-o", copy.tasks, "--overwrite"]
    assert "is the input" in refuses(launcher, copy.tasks, *gen)


def test_skip_bad(launcher, copy, tiny_dir):
    copy.tasks.write_bytes(b"no json\n" + copy.tasks.read_bytes() + b'{"id": 1}\n')
    gen = ["gen", copy.tasks, "--model", tiny_dir, *LIMITS]
    result = launcher.run(*gen)
    assert (result.code, result.stdout) == (1, b"")
    assert f"{copy.tasks}:1: not JSON" in result.stderr
    result = launcher.ok(*gen, "--skip-bad")
    assert len(load(result.stdout, Trajectory)) == TASKS * N
    assert result.stderr.count("skipped: ") == 2


# -- tree -------------------------------------------------------------------------------------


def test_tasks_tree_and_pairs(launcher, made, tiny_dir, tmp_path):
    """Trees of a random model: whole, in order, resumable, and pairs whose prompts are views."""
    trees, pairs = tmp_path / "trees.jsonl", tmp_path / "pairs.jsonl"
    argv = ["tree", made.tasks, "--model", tiny_dir, *LIMITS[:6], "-o", trees]
    argv += ["--iterations", 3, "--simulations", 2]
    result = launcher.ok(*argv)
    assert f"tree: {TASKS} trees, {TASKS * 6} conversations" in result.stderr
    ends = result.stderr.partition(" tokens generated; ")[2]
    assert sum(int(word) for word in ends.split() if word.isdigit()) == TASKS * 6
    grown = load(trees, Tree)
    assert [tree.task for tree in grown] == load(made.tasks, Task)
    for tree in grown:
        assert len(tree.trajectories) == 6
        assert len(tree.expanded) == 3
        assert tree.nodes[0].visits == 6
    kept = trees.read_bytes()
    assert "kept 5 finished trees" in launcher.ok(*argv, "--resume").stderr
    assert trees.read_bytes() == kept
    assert "iterations was 3, now 4" in refuses(
        launcher, trees, *argv[:-4], "--iterations", 4, "--simulations", 2, "--resume"
    )
    select = ["select", trees, "--theta", -9, "--theta-diff", 0, "--top", 1, "-o", pairs]
    assert f"select: {TASKS} trees, " in launcher.ok(*select).stderr
    by_id = {tree.id: tree for tree in grown}
    for pair in load(pairs, Pair):
        tree = by_id[pair.task_id]
        agent = next(a for a in tree.team.agents if a.name == pair.agent)
        assert list(pair.prompt) == view(tree.team, tree.task, agent, history(tree, pair.node))
        assert pair.chosen_value > pair.rejected_value


def test_trees_and_trajectories_do_not_mix(launcher, made, tiny_dir, tmp_path):
    trees = tmp_path / "trees.jsonl"
    argv = ["tree", made.tasks, "--model", tiny_dir, *LIMITS[:6], "--iterations", 1]
    launcher.ok(*argv, "--simulations", 1, "-o", trees)
    mixed = tmp_path / "mixed.jsonl"
    lines = trees.read_bytes().splitlines(keepends=True)
    other = made.scored.read_bytes().replace(b"relay/train/", b"relay/other/")
    one_task = made.scored.read_bytes().splitlines(keepends=True)[:N] + lines[:1]
    for content in (other + trees.read_bytes(), b"".join(one_task), b"".join(one_task[::-1])):
        mixed.write_bytes(content)
        result = launcher.run("select", mixed, "--theta", -9)
        assert result.code == 1
        assert "trajectories and trees in one file" in result.stderr
    # What two runs on one output would have left.
    trees.write_bytes(b"".join(lines[:2] + lines[:1]))
    line = refuses(launcher, trees, *argv, "--simulations", 1, "-o", trees, "--resume")
    assert f"{trees}:3: the tree of " in line
    assert "appeared before" in line


def test_a_tree_whose_prompts_cannot_be_shown(launcher, made, tiny_dir, tmp_path):
    trees, bad = tmp_path / "trees.jsonl", tmp_path / "bad.jsonl"
    argv = ["tree", made.tasks, "--model", tiny_dir, *LIMITS[:6], "--iterations", 2]
    launcher.ok(*argv, "--simulations", 2, "-o", trees)
    lines = trees.read_bytes().splitlines(keepends=True)
    for number, change in (
        (1, lambda tree: tree["task"]["contexts"].append(["more"])),
        (2, lambda tree: tree["team"]["agents"][0].update(prompt="{what}")),
    ):
        tree = orjson.loads(lines[number])
        change(tree)
        lines[number] = orjson.dumps(tree) + b"\n"
    bad.write_bytes(b"".join(lines))
    select = ["select", bad, "--theta", -9, "--theta-diff", 0, "--top", 1]
    result = launcher.run(*select)
    assert (result.code, result.stdout) == (1, b"")
    assert f"{bad}:2: " in result.stderr
    assert "is split for 3 agents" in result.stderr
    result = launcher.ok(*select, "--skip-bad")
    assert f"{bad}:2: " in result.stderr
    assert f"{bad}:3: " in result.stderr
    assert "unknown {what}" in result.stderr
    skipped = {orjson.loads(lines[number])["id"] for number in (1, 2)}
    assert not skipped & {pair.task_id for pair in load(result.stdout, Pair)}


# -- select -----------------------------------------------------------------------------------


def test_options_of_trees_are_not_for_trajectories(launcher, made):
    result = launcher.run("select", made.scored, "--theta-diff", 0.1)
    assert result.code == 2
    assert "--theta-diff is for trees" in result.stderr


def test_nothing_selects_nothing(launcher):
    result = launcher.ok("select", "/dev/null")
    assert (result.stdout, result.stderr) == (b"", "select: nothing to read\n")


def test_select_refuses_what_is_not_scored(launcher, made, copy):
    result = launcher.run("select", made.talks)
    assert result.code == 1
    assert f"{made.talks}:3: relay/train/" in result.stderr
    assert "without a reward: run score first" in result.stderr


def test_select_does_not_replace_its_input(launcher, copy):
    """It could, but hours of conversations would be gone for a few examples."""
    select = ["select", copy.scored, "-o", copy.scored, "--overwrite"]
    assert "is the input" in refuses(launcher, copy.scored, *select)


def test_an_incomplete_group_is_refused_or_passed_over(launcher, copy):
    lines = copy.scored.read_bytes().splitlines(keepends=True)
    copy.scored.write_bytes(b"".join(lines[:N] + lines[N + 1 :]))
    refused = launcher.run("select", copy.scored)
    assert refused.code == 1
    assert "has 2 of 3 trajectories" in refused.stderr
    for command in (["select", "--theta", -9], ["score", "--reuse"]):
        result = launcher.ok(command[0], copy.scored, *command[1:], "--skip-bad")
        assert "skipped: " in result.stderr
    assert len(load(result.stdout, Trajectory)) == (TASKS - 1) * N


@pytest.mark.parametrize("command", ["gen", "score"])
def test_resume_refuses_a_hole_in_the_middle(launcher, copy, tiny_dir, command):
    """Somebody deleted a line: to go on would write the others of its group twice."""
    source, out = (copy.tasks, copy.talks) if command == "gen" else (copy.talks, copy.scored)
    more = LIMITS if command == "gen" else ["--load", "fp32"]
    lines = out.read_bytes().splitlines(keepends=True)
    argv = [command, source, "--model", tiny_dir, *more, "-o", out, "--resume"]
    out.write_bytes(b"".join(lines[: N + 1] + lines[N + 2 :]))
    line = refuses(launcher, out, *argv)
    assert f"{out}:{N + 1}: " in line
    assert f"`head -n {N}`" in line
    out.write_bytes(b"".join(lines[:N]))
    launcher.ok(*argv)
    assert out.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("command", ["gen", "score"])
def test_resume_refuses_a_group_that_comes_twice(launcher, copy, tiny_dir, command):
    source, out = (copy.tasks, copy.talks) if command == "gen" else (copy.talks, copy.scored)
    more = LIMITS if command == "gen" else ["--load", "fp32"]
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[: 2 * N] + lines[:N]))
    line = refuses(
        launcher, out, command, source, "--model", tiny_dir, *more, "-o", out, "--resume"
    )
    assert f"{out}:{2 * N + 1}: " in line
    assert "appeared before" in line


@pytest.mark.parametrize("command", ["gen", "score"])
def test_resume_refuses_other_input(launcher, copy, tiny_dir, command):
    """Fewer tasks, or the same ones in another order."""
    source, out = (copy.tasks, copy.talks) if command == "gen" else (copy.talks, copy.scored)
    size, more = (1, LIMITS) if command == "gen" else (N, ["--load", "fp32"])
    argv = [command, source, "--model", tiny_dir, *more, "-o", out, "--resume"]
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines[: 2 * size]))
    assert "it also has relay/train/" in refuses(launcher, out, *argv)
    source.write_bytes(b"".join(lines[size : 2 * size] + lines[:size]))
    assert "it goes on with relay/train/" in refuses(launcher, out, *argv)


def test_resume_keeps_its_hands_off_other_files(launcher, copy, tiny_dir):
    copy.talks.write_text("my notes, without a newline")
    gen = ["gen", copy.tasks, "--model", tiny_dir, *LIMITS, "-o", copy.talks, "--resume"]
    assert ":1: not a torn record" in refuses(launcher, copy.talks, *gen)
