"""kill -9 at seeded moments, then --resume until done: nothing is lost, doubled or changed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
from safetensors.torch import load_file

from optima_lite.records import Trajectory

TASKS = 40
N = 4
KILLS = 5
LIMITS = ["--load", "fp32", "--max-turns", 4, "--max-turn-tokens", 32, "-n", N, "--batch-size", 8]


@pytest.fixture(scope="module")
def whole(launcher, tiny_dir, tmp_path_factory) -> SimpleNamespace:
    """The files of a run that nobody stopped."""
    d = tmp_path_factory.mktemp("whole")
    paths = {name: d / f"{name}.jsonl" for name in ("tasks", "talks", "scored")}
    launcher.ok("tasks", "relay", "--limit", TASKS, "-o", paths["tasks"])
    launcher.ok("gen", paths["tasks"], "--model", tiny_dir, *LIMITS, "-o", paths["talks"])
    launcher.ok(
        "score", paths["talks"], "--model", tiny_dir, "--load", "fp32", "-o", paths["scored"]
    )
    return SimpleNamespace(**paths)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def groups(data: bytes, group: int) -> bytes:
    """The whole groups that a file begins with: what a resumed run must keep."""
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    return b"".join(lines[: len(lines) - len(lines) % group])


def kill_again_and_again(
    launcher, out: Path, goal: int, seed: int, *argv: object, group: int = N
) -> int:
    """Start, kill when the file has reached a drawn size (of `goal` bytes), and so on.

    Returns how many runs were killed while they ran; checks after each that what was finished
    before stands unchanged.
    """
    rng = random.Random(seed)
    moments = sorted(rng.uniform(0, goal) for _ in range(KILLS - 1))
    killed = 0
    for moment in [0, *moments]:  # the first one before anything is written
        kept = groups(out.read_bytes(), group) if out.exists() else b""
        process = launcher.start(*argv, "-o", out, "--resume")
        deadline = time.monotonic() + 60
        while size(out) < moment and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        code = process.wait()
        assert code in (-9, 0), process.stderr
        killed += code == -9
        after = out.read_bytes() if out.exists() else b""
        assert after.startswith(kept)
        if rng.random() < 0.5 and after:
            # What a power cut leaves besides: the file ends anywhere in its last line.
            with out.open("r+b") as stream:
                stream.truncate(len(after) - rng.randrange(1, 200))
    kept = groups(out.read_bytes(), group) if out.exists() else b""
    launcher.ok(*argv, "-o", out, "--resume")
    assert out.read_bytes().startswith(kept)
    return killed


@pytest.mark.parametrize("seed", [0, 1])
def test_gen_survives(launcher, whole, tiny_dir, tmp_path, seed):
    """A resumed run batches other turns together, and rounding may then flip a draw: of the
    conversations, 2 % may differ in their text. Order, ids and kept bytes may not."""
    out = tmp_path / "talks.jsonl"
    goal = size(whole.talks)
    argv = ["gen", whole.tasks, "--model", tiny_dir, *LIMITS]
    assert kill_again_and_again(launcher, out, goal, seed, *argv) >= KILLS - 1
    wanted, found = (path.read_bytes().splitlines() for path in (whole.talks, out))
    ids = [[Trajectory.from_dict(orjson.loads(x)).id for x in lines] for lines in (wanted, found)]
    assert ids[0] == ids[1]
    assert len(set(ids[1])) == TASKS * N
    different = sum(a != b for a, b in zip(wanted, found, strict=True))
    print(f"{different} conversations differ")
    assert different <= 0.02 * TASKS * N


@pytest.mark.parametrize("seed", [0, 1])
def test_score_survives(launcher, whole, tiny_dir, tmp_path, seed):
    """A group's losses are computed together and apart from others: byte for byte the same."""
    out = tmp_path / "scored.jsonl"
    goal = size(whole.scored)
    argv = ["score", whole.talks, "--model", tiny_dir, "--load", "fp32"]
    assert kill_again_and_again(launcher, out, goal, seed, *argv) >= KILLS - 1
    assert out.read_bytes() == whole.scored.read_bytes()


@pytest.mark.parametrize("seed", [0, 1])
def test_tree_survives(launcher, whole, tiny_dir, tmp_path, seed):
    """As gen: order, ids and kept bytes are exact, and rounding may flip a draw in 2 % of them."""
    argv = ["tree", whole.tasks, "--model", tiny_dir, *LIMITS[:6], "--batch-size", 8]
    argv += ["--iterations", 2, "--simulations", 2]
    straight, out = tmp_path / "straight.jsonl", tmp_path / "trees.jsonl"
    launcher.ok(*argv, "-o", straight)
    goal = size(straight)
    assert kill_again_and_again(launcher, out, goal, seed, *argv, group=1) >= KILLS - 1
    wanted, found = (path.read_bytes().splitlines() for path in (straight, out))
    assert [orjson.loads(x)["id"] for x in wanted] == [orjson.loads(x)["id"] for x in found]
    assert sum(a != b for a, b in zip(wanted, found, strict=True)) <= 0.02 * TASKS + 1


STEPS = ["--load", "fp32", "--batch-size", 4, "--lora-r", 4, "--checkpoint-every", 2]


def sft_on_examples(launcher, whole: SimpleNamespace, tiny_dir: Path, d: Path) -> list[object]:
    data = d / "examples.jsonl"
    launcher.ok("select", whole.scored, "--theta", "-9", "--top", "0.1", "-o", data)
    return ["sft", data, "--model", tiny_dir, *STEPS, "--epochs", 6]


def dpo_on_pairs(launcher, whole: SimpleNamespace, tiny_dir: Path, d: Path) -> list[object]:
    tasks, trees, data = d / "tasks.jsonl", d / "trees.jsonl", d / "pairs.jsonl"
    launcher.ok("tasks", "relay", "--limit", 3, "-o", tasks)
    search = ["--iterations", 2, "--simulations", 2]
    launcher.ok("tree", tasks, "--model", tiny_dir, *LIMITS[:6], *search, "-o", trees)
    launcher.ok("select", trees, "--theta", "-9", "--theta-diff", 0, "-o", data)
    lines = data.read_bytes().splitlines(keepends=True)
    data.write_bytes(b"".join(lines[:8]))
    argv = ["dpo", data, "--model", tiny_dir, *STEPS, "--lr", "1e-3", "--alpha", 0.5]
    return [*argv, "--epochs", 48 // len(lines[:8])]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("prepare", [sft_on_examples, dpo_on_pairs])
def test_training_survives(launcher, whole, tiny_dir, tmp_path, prepare, seed):
    """Killed at drawn steps, resumed from checkpoints: the adapter of a run that nobody stopped.

    Before it is finished there is no output directory, and afterwards nothing else.
    """
    argv = prepare(launcher, whole, tiny_dir, tmp_path)
    launcher.ok(*argv, "-o", tmp_path / "straight")
    out = tmp_path / "out"
    log = out.with_name("out.partial") / "training.jsonl"
    wanted = lines_of(tmp_path / "straight")
    assert len(wanted) > 10
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(1, len(wanted) - 4), KILLS - 1))
    killed = 0
    for moment in [0, *moments]:
        process = launcher.start(*argv, "-o", out, "--resume")
        deadline = time.monotonic() + 60
        while not reached(log, moment) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        code = process.wait()
        assert code in (-9, 0), process.stderr
        assert out.exists() == (code == 0)
        killed += code == -9
    assert killed >= KILLS - 1
    launcher.ok(*argv, "-o", out, "--resume")
    assert not log.parent.exists()
    found = lines_of(out)
    assert [e["step"] for e in found] == [e["step"] for e in wanted]
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in wanted], abs=1e-5)
    straight = load_file(tmp_path / "straight" / "adapter_model.safetensors")
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, straight[name], rtol=1e-4, atol=1e-6)


def lines_of(directory: Path) -> list[dict]:
    data = (directory / "training.jsonl").read_bytes()
    return [orjson.loads(line) for line in data.splitlines()]


def reached(log: Path, step: int) -> bool:
    """Whether the log, which may be in the middle of being written, has come to a step."""
    return step == 0 or (log.exists() and f'"step":{step}}}'.encode() in log.read_bytes())
