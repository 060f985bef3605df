"""Aggregates on numbers worked out by hand; intervals against a plain loop and the normal law."""

from __future__ import annotations

import gc
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optima_lite import evaluation
from optima_lite.errors import InputError
from optima_lite.evaluation import Tally, compare, percentile, resampled_means, summarize
from optima_lite.jsonl import Reader, dumps
from optima_lite.records import Agent, Score, Task, Team, Trajectory, Turn

TEAM = Team(name="two", agents=(Agent("Alice", "You are {name}."), Agent("Bob", "You too.")))


def trajectory(
    task: str,
    k: int,
    answer: str | None,
    tokens: int = 10,
    *,
    turns: int = 2,
    end: str = "turn_limit",
    agreed: bool = False,
    gold: str = "Paris",
    metric: str = "f1",
    loss: float | None = None,
    reward: float | None = None,
) -> Trajectory:
    score = None
    if loss is not None:
        score = Score(1.0, 1.0, (loss,), loss, False, 0.6, 1.0, "base", "none")
    return Trajectory(
        id=f"{task}#{k}",
        task=Task(task, "debate", "a question?", (gold,), metric),
        team=TEAM,
        turns=(Turn("Alice", "some words", 2, "end"),) * turns,
        end=end,
        agreed=agreed,
        tokens=tokens,
        answer=answer,
        model="m",
        seed=0,
        reward=reward,
        score=score,
    )


def tallied(*trajectories: Trajectory, source: str = "file") -> Tally:
    seen = Tally(source)
    for one in trajectories:
        seen.add(one)
    return seen


def two_tasks() -> list[Trajectory]:
    return [
        trajectory("a", 0, "Paris", 10, turns=2, end="agreement", agreed=True),
        trajectory("a", 1, "Paris France", 30, turns=4),
        trajectory("b", 0, None, 20, turns=1, end="turn_cut", gold="blue", metric="exact"),
        trajectory(
            *("b", 1, "red", 40), turns=3, end="agreement", agreed=True, gold="blue", metric="exact"
        ),
    ]


def test_means_by_hand() -> None:
    """a: "Paris" F1 1, EM 1; "Paris France" precision 1/2, recall 1, F1 2/3, EM 0.
    b: nothing marked, then a wrong answer: 0 and 0.

    score, F1 = ((1 + 2/3)/2 + 0)/2 = 5/12; EM = (1/2 + 0)/2 = 1/4; tokens = (20 + 30)/2;
    turns = (3 + 2)/2; one of four invalid, one of four cut. Two of four agreed, one of them on a
    wrong answer. Of the answers marked (3/4 of the weight) the mean is (5/12)/(3/4) = 5/9.
    """
    s = summarize(tallied(*two_tasks()), resamples=100)
    assert (s.tasks, s.trajectories, s.per_task) == (2, 4, (2, 2))
    assert s.score == pytest.approx(5 / 12)
    assert s.f1 == pytest.approx(5 / 12)
    assert s.exact == pytest.approx(1 / 4)
    assert (s.tokens, s.turns) == (25.0, 2.5)
    assert (s.agreed, s.invalid, s.failed) == (0.5, 0.25, 0.25)
    assert s.answered_score == pytest.approx(5 / 9)
    assert s.ends == {
        **{"agreement": 2, "turn_limit": 1, "turn_cut": 1},
        **{"context_full": 0, "engine_error": 0},
    }
    assert (s.loss, s.reward) == (None, None)


def test_interval_of_two_tasks_by_hand() -> None:
    """Two draws from tasks scoring 5/6 and 0: means 5/6, 5/12, 0 with weights 1/4, 1/2, 1/4, so
    the 2.5th percentile is 0 and the 97.5th 5/6; tokens likewise between 20 and 30."""
    s = summarize(tallied(*two_tasks()), resamples=1000)
    assert s.score_interval == pytest.approx((0, 5 / 6))
    assert s.tokens_interval == (20.0, 30.0)


def test_score_is_the_tasks_own_metric() -> None:
    """ "Paris France" for "Paris": 2/3 by F1, 0 by exact; F1 is reported for both."""
    s = summarize(tallied(trajectory("a", 0, "Paris France", metric="exact")))
    assert s.score == s.exact == 0.0
    assert s.f1 == pytest.approx(2 / 3)


def test_tasks_weigh_the_same_whatever_their_number_of_trajectories() -> None:
    """a: one right of one, b: none right of three. 1/2 over tasks, not 1/4 over lines."""
    s = summarize(
        tallied(trajectory("a", 0, "Paris"), *(trajectory("b", k, "x") for k in range(3)))
    )
    assert s.score == 0.5
    assert s.per_task == (1, 3)


def test_invalid_is_not_wrong() -> None:
    """Both score 0; only the one without a mark is invalid."""
    wrong = summarize(tallied(trajectory("a", 0, "Rome")))
    invalid = summarize(tallied(trajectory("a", 0, None)))
    assert wrong.score == invalid.score == 0.0
    assert (wrong.invalid, wrong.answered_score) == (0.0, 0.0)
    assert (invalid.invalid, invalid.answered_score) == (1.0, None)


def test_answered_score_is_exactly_one_when_every_answer_is_right() -> None:
    """Thirds do not add up in floats; the ratio must not come out as 1.0000000000000002."""
    parts = [trajectory("a", k, None if k else "Paris") for k in range(3)]
    parts += [trajectory("b", k, None if k else "Paris") for k in range(7)]
    assert summarize(tallied(*parts)).answered_score == 1.0


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("agreement", 0.0),
        ("turn_limit", 0.0),
        ("turn_cut", 1.0),
        ("context_full", 1.0),
        ("engine_error", 1.0),
    ],
)
def test_a_failed_conversation_counts_with_the_answer_it_marked(end: str, failed: float) -> None:
    s = summarize(tallied(trajectory("a", 0, "Paris", end=end)))
    assert (s.failed, s.score) == (failed, 1.0)
    assert s.ends[end] == 1


def test_loss_and_reward_over_tasks_that_have_them() -> None:
    """a: losses 1 and 3, mean 2 (a third has none); b: 4; c: none. Loss 3; reward (0.5 + 1)/2."""
    s = summarize(
        tallied(
            trajectory("a", 0, None, loss=1.0, reward=0.25),
            trajectory("a", 1, None, loss=3.0, reward=0.75),
            trajectory("a", 2, None),
            trajectory("b", 0, None, loss=4.0, reward=1.0),
            trajectory("c", 0, None),
        )
    )
    assert (s.loss, s.reward) == (3.0, 0.75)


def test_one_task_has_no_interval() -> None:
    s = summarize(tallied(trajectory("a", 0, "Paris")))
    assert s.score_interval is s.tokens_interval is s.f1_interval is s.exact_interval is None


def test_order_of_lines_does_not_matter() -> None:
    parts = [
        trajectory(f"t{i}", k, random.Random(9 * i + k).choice(["Paris", "x", None]), 10 * i + k)
        for i in range(12)
        for k in range(3)
    ]
    expected = summarize(tallied(*parts), resamples=200)
    random.Random(1).shuffle(parts)
    assert summarize(tallied(*parts), resamples=200) == expected


def test_seed_decides_the_intervals() -> None:
    seen = tallied(*(trajectory(f"t{i}", 0, None, i * i) for i in range(30)))
    one, same, other = (summarize(seen, resamples=50, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.tokens_interval != other.tokens_interval


# --- bootstrap ---


def test_bootstrap_equals_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws, summed one by one; a chunk of 3 resamples leaves a short last chunk."""
    rows = np.random.default_rng(5).random((7, 2))
    monkeypatch.setattr(evaluation, "_CHUNK", 21)
    means = resampled_means(rows, 20, seed=3)
    picks = np.random.default_rng(3).integers(7, size=(20, 7)).tolist()
    for resample, pick in enumerate(picks):
        for column in range(2):
            total = 0.0
            for row in pick:
                total += float(rows[row, column])
            assert means[resample, column] == pytest.approx(total / 7)


def test_percentile_by_hand() -> None:
    """0 … 200: 2.5 % of the way is 5, 97.5 % is 195."""
    assert percentile(np.arange(201.0)) == pytest.approx((5, 195))


def test_big_sample_agrees_with_the_normal_law() -> None:
    """Mean ± 1.96 s/√n for 1500 tasks; 5 % slack on the width for 4000 resamples."""
    draw = random.Random(0)
    tokens = [draw.randrange(1000) for _ in range(1500)]
    s = summarize(
        tallied(*(trajectory(f"t{i}", 0, None, n) for i, n in enumerate(tokens))), resamples=4000
    )
    half = 1.96 * statistics.stdev(tokens) / math.sqrt(len(tokens))
    assert s.tokens_interval is not None
    low, high = s.tokens_interval
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert (high + low) / 2 == pytest.approx(statistics.fmean(tokens), abs=half / 10)


# --- comparison ---


def test_pairing_cancels_the_difficulty_of_tasks() -> None:
    """Tokens 100, 500, 900 → 90, 490, 890: always −10, so [−10, −10], although each file's own
    interval is hundreds wide. Ratio 1470/1500 = 0.98, between 90/100 and 890/900.

    Scores of two trajectories a task: (0, 0), (1, 0), (1, 0) → (1, 0), (1, 1), (1, 1): always
    +1/2.
    """
    old = tallied(
        *(trajectory("a", 0, "x", 100), trajectory("a", 1, "x", 100)),
        *(trajectory("b", 0, "Paris", 500), trajectory("b", 1, "x", 500)),
        *(trajectory("c", 0, "Paris", 900), trajectory("c", 1, "x", 900)),
    )
    new = tallied(
        *(trajectory("c", 0, "Paris", 890), trajectory("c", 1, "Paris", 890)),
        *(trajectory("a", 0, "Paris", 90), trajectory("a", 1, "x", 90)),
        *(trajectory("b", 0, "Paris", 490), trajectory("b", 1, "Paris", 490)),
    )
    c = compare(old, new, resamples=500)
    assert (c.tasks, c.only_old, c.only_new, c.notes) == (3, 0, 0, ())
    assert (c.score, c.score_interval) == (0.5, (0.5, 0.5))
    assert (c.tokens, c.tokens_interval) == (-10.0, (-10.0, -10.0))
    assert c.token_ratio == pytest.approx(0.98)
    assert c.token_ratio_interval is not None
    assert 0.9 <= c.token_ratio_interval[0] < 0.98 < c.token_ratio_interval[1] <= 890 / 900
    unpaired = summarize(old, resamples=500).tokens_interval
    assert unpaired is not None
    assert unpaired[1] - unpaired[0] > 400


def test_a_constant_ratio_has_a_zero_width_interval() -> None:
    """Half the tokens on every task: ratio 1/2 in every resample, differences −5 … −50."""
    old = tallied(*(trajectory(f"t{i}", 0, None, 10 * i) for i in range(1, 11)))
    new = tallied(*(trajectory(f"t{i}", 0, None, 5 * i) for i in range(1, 11)))
    c = compare(old, new, resamples=300)
    assert c.token_ratio == 0.5
    assert c.token_ratio_interval == pytest.approx((0.5, 0.5))
    assert c.tokens == -27.5
    assert c.tokens_interval is not None
    assert c.tokens_interval[0] < -27.5 < c.tokens_interval[1]


def test_only_shared_tasks_are_compared() -> None:
    """b is shared: 20 → 5 tokens. a and c would make it 510 → 252.5."""
    old = tallied(trajectory("a", 0, None, 1000), trajectory("b", 0, "x", 20))
    new = tallied(trajectory("b", 0, "Paris", 5), trajectory("c", 0, None, 500))
    c = compare(old, new)
    assert (c.tasks, c.only_old, c.only_new) == (1, 1, 1)
    assert (c.score, c.tokens, c.token_ratio) == (1.0, -15.0, 0.25)
    assert c.score_interval is c.tokens_interval is c.token_ratio_interval is None
    assert c.notes == (
        "the task sets differ: 1 shared, 1 only in the first file, 1 only in this one",
    )


def test_changed_gold_answers_are_noted() -> None:
    c = compare(tallied(trajectory("a", 0, "x")), tallied(trajectory("a", 0, "x", gold="Rome")))
    assert c.notes == ("1 shared tasks have another metric or other answers in the two files",)


def test_no_shared_task() -> None:
    old = tallied(trajectory("a", 0, "x"), source="old.jsonl")
    new = tallied(trajectory("b", 0, "x"), source="new.jsonl")
    with pytest.raises(InputError, match=r"new\.jsonl: shares no task with old\.jsonl"):
        compare(old, new)


def test_no_ratio_to_silence() -> None:
    """Both files silent: 0/0. Silent on one of two tasks: 10/5 = 2, but a resample may be 0/0."""
    silent = tallied(trajectory("a", 0, None, 0), trajectory("b", 0, None, 0))
    assert compare(silent, silent, resamples=20).token_ratio is None
    half = tallied(trajectory("a", 0, None, 0), trajectory("b", 0, None, 10))
    double = tallied(trajectory("a", 0, None, 10), trajectory("b", 0, None, 10))
    c = compare(half, double, resamples=200)
    assert (c.token_ratio, c.token_ratio_interval) == (2.0, None)


# --- reading ---


def write(path: Path, *trajectories: Trajectory) -> Reader[Trajectory]:
    path.write_bytes(b"".join(map(dumps, trajectories)))
    return Reader(str(path), Trajectory)


def test_lines_of_a_task_need_not_stand_together(tmp_path: Path) -> None:
    one, two = trajectory("a", 0, "Paris"), trajectory("a", 1, "x")
    seen = evaluation.tally(write(tmp_path / "t.jsonl", one, trajectory("b", 0, None), two))
    assert {name: sums.n for name, sums in seen.tasks.items()} == {"a": 2, "b": 1}


def test_duplicate_id_is_named_with_its_line(tmp_path: Path) -> None:
    one = trajectory("a", 0, "Paris")
    reader = write(tmp_path / "t.jsonl", one, trajectory("b", 0, None), one)
    with pytest.raises(InputError, match=r"t\.jsonl:3: trajectory a#0 appeared before"):
        evaluation.tally(reader)


def test_a_task_with_two_gold_answers_is_refused(tmp_path: Path) -> None:
    reader = write(
        tmp_path / "t.jsonl", trajectory("a", 0, "x"), trajectory("a", 1, "x", gold="Rome")
    )
    with pytest.raises(InputError, match=r"t\.jsonl:2: task a has another metric"):
        evaluation.tally(reader)


def test_unknown_metric_is_named_with_its_line(tmp_path: Path) -> None:
    reader = write(tmp_path / "t.jsonl", trajectory("a", 0, "x", metric="taste"))
    with pytest.raises(InputError, match=r"t\.jsonl:1: .*'taste'"):
        evaluation.tally(reader)


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.jsonl: no trajectories$"):
        evaluation.tally(write(tmp_path / "t.jsonl"))


def test_only_numbers_are_kept() -> None:
    """Everything reachable from the tally: task ids and names of ends are its only texts."""
    seen = tallied(*two_tasks())
    found: list[Any] = []
    todo: list[Any] = [seen.source, seen.tasks, seen.ends, seen._seen]
    while todo:
        item = todo.pop()
        found.append(item)
        if isinstance(item, dict):
            todo += [*item, *item.values()]
        elif isinstance(item, set):
            todo += item
        elif not isinstance(item, str | int | float):
            assert isinstance(item, evaluation.TaskSums)
            todo += [part for part in gc.get_referents(item) if not isinstance(part, type)]
    texts = {item for item in found if isinstance(item, str)}
    assert texts == {"file", "a", "b", *seen.ends}
