"""What a file of trajectories is worth: means per task, intervals over tasks, paired differences.

The unit is the task: first a mean over the task's trajectories, then the mean over tasks, so a
task with more trajectories weighs no more than another. Tasks are also what the bootstrap draws:
trajectories of one task are alike, and drawing them one by one would make intervals too narrow.

Every trajectory counts, cut and failed ones too. Leaving them out would let a team that breaks
down on hard tasks look better than one that tries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optima_lite import metrics
from optima_lite.errors import InputError
from optima_lite.jsonl import Reader
from optima_lite.records import ENDS, WHOLE_ENDS, Trajectory

#: A 95 % percentile interval, (low, high); None where a single task leaves nothing to resample.
Interval = tuple[float, float] | None
Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 10_000
#: Drawn task numbers held at once: 2^20 of 8 bytes, and as many values a column.
_CHUNK = 1 << 20


@dataclass(slots=True)
class TaskSums:
    """Sums over one task's trajectories; numbers only, so a file of any length fits in memory."""

    golds: int  #: hash of the metric and the accepted answers
    n: int = 0
    score: float = 0.0
    f1: float = 0.0
    exact: float = 0.0
    tokens: int = 0
    turns: int = 0
    agreed: int = 0
    answered: int = 0
    invalid: int = 0
    failed: int = 0
    loss: float = 0.0
    losses: int = 0  #: how many trajectories have a loss
    reward: float = 0.0
    rewards: int = 0

    def mean(self, name: str) -> float:
        """The field's mean over the task's trajectories."""
        return float(getattr(self, name)) / self.n


@dataclass
class Tally:
    """One file, seen trajectory by trajectory, in any order."""

    source: str
    tasks: dict[str, TaskSums] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    _seen: set[int] = field(default_factory=set)

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory.

        Raises InputError for an id that was there before, for a task whose metric or accepted
        answers differ from those on its earlier lines, and for an unknown metric.
        """
        task, answer = trajectory.task, trajectory.answer
        # 8 bytes an id instead of its text, as in jsonl.groups.
        identity = hash(trajectory.id)
        if identity in self._seen:
            raise InputError(f"trajectory {trajectory.id} appeared before")
        self._seen.add(identity)
        golds = hash((task.metric, task.answers))
        sums = self.tasks.setdefault(task.id, TaskSums(golds))
        if sums.golds != golds:
            raise InputError(f"task {task.id} has another metric or other answers than before")

        own = {name: metrics.score(name, answer, task.answers) for name in ("f1", "exact")}
        if task.metric not in own:
            own[task.metric] = metrics.score(task.metric, answer, task.answers)
        sums.n += 1
        sums.score += own[task.metric]
        sums.f1 += own["f1"]
        sums.exact += own["exact"]
        sums.tokens += trajectory.tokens
        sums.turns += len(trajectory.turns)
        sums.agreed += trajectory.agreed
        sums.answered += answer is not None
        sums.invalid += answer is None
        sums.failed += trajectory.end not in WHOLE_ENDS
        self.ends[trajectory.end] += 1
        if trajectory.score is not None and trajectory.score.loss is not None:
            sums.loss += trajectory.score.loss
            sums.losses += 1
        if trajectory.reward is not None:
            sums.reward += trajectory.reward
            sums.rewards += 1


def tally(
    reader: Reader[Trajectory],
    watch: Callable[[Iterable[Trajectory]], Iterable[Trajectory]] = iter,
) -> Tally:
    """Read a file to its end; `watch` may wrap the records (a progress bar).

    Raises InputError with file and line for what `Tally.add` refuses, and for a file without
    trajectories.
    """
    seen = Tally(reader.source)
    for trajectory in watch(reader):
        try:
            seen.add(trajectory)
        except InputError as error:
            raise reader.error(error.reason) from None
    if not seen.tasks:
        skipped = f" ({reader.skipped} lines skipped)" if reader.skipped else ""
        raise InputError(f"no trajectories{skipped}", reader.source)
    return seen


@dataclass(frozen=True)
class Summary:
    """A file's numbers. Scores and rates are fractions in [0, 1], means over tasks."""

    tasks: int
    trajectories: int
    #: Fewest and most trajectories of a task.
    per_task: tuple[int, int]
    #: The task's own metric; 0 where no answer was marked.
    score: float
    score_interval: Interval
    f1: float
    f1_interval: Interval
    exact: float
    exact_interval: Interval
    #: Tokens and turns of a conversation, prompts not counted.
    tokens: float
    tokens_interval: Interval
    turns: float
    #: Share whose agents marked the same answer, right or wrong.
    agreed: float
    #: Share in which no answer was marked: the format failed, not the knowledge.
    invalid: float
    #: Mean score of the answers that were marked, score / (1 − invalid); null where there is none.
    answered_score: float | None
    #: Share that was cut or broke down (turn_cut, context_full, engine_error), answered or not.
    failed: float
    #: Trajectories by `end`: a count each.
    ends: dict[str, int]
    #: Mean R_loss (nats a token) and mean reward, over the tasks that have any; null without.
    loss: float | None
    reward: float | None


def summarize(seen: Tally, *, resamples: int = RESAMPLES, seed: int = 0) -> Summary:
    """The numbers of one file; the same for any order of its lines, up to rounding."""
    ids = sorted(seen.tasks)
    sums = [seen.tasks[id_] for id_ in ids]
    bounded = ("score", "f1", "exact", "tokens")
    rows = _rows(seen, ids, bounded)
    means = dict(zip(bounded, rows.mean(axis=0).tolist(), strict=True))
    intervals = dict(zip(bounded, _intervals(rows, resamples, seed), strict=True))
    plain = ("turns", "agreed", "answered", "invalid", "failed")
    rates = dict(zip(plain, _rows(seen, ids, plain).mean(axis=0).tolist(), strict=True))
    answered = rates.pop("answered")
    return Summary(
        tasks=len(sums),
        trajectories=sum(s.n for s in sums),
        per_task=(min(s.n for s in sums), max(s.n for s in sums)),
        score=means["score"],
        score_interval=intervals["score"],
        f1=means["f1"],
        f1_interval=intervals["f1"],
        exact=means["exact"],
        exact_interval=intervals["exact"],
        tokens=means["tokens"],
        tokens_interval=intervals["tokens"],
        **rates,
        answered_score=means["score"] / answered if answered else None,
        ends=dict(seen.ends),
        loss=_mean_of_means((s.loss, s.losses) for s in sums),
        reward=_mean_of_means((s.reward, s.rewards) for s in sums),
    )


@dataclass(frozen=True)
class Comparison:
    """A file against another over the tasks they share; differences are `new − old`."""

    #: Shared tasks, and the tasks that only one of the files has.
    tasks: int
    only_old: int
    only_new: int
    #: Difference of the mean score (fraction) and of the mean tokens.
    score: float
    score_interval: Interval
    tokens: float
    tokens_interval: Interval
    #: Mean tokens of new / mean tokens of old; null where old said nothing. Its interval is null
    #: too where old said nothing in one of the resamples.
    token_ratio: float | None
    token_ratio_interval: Interval
    #: What a reader must know before believing the numbers.
    notes: tuple[str, ...]


def compare(old: Tally, new: Tally, *, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Compare task by task: how hard a task is cancels, so small differences show.

    Raises InputError where the files share no task.
    """
    ids = sorted(old.tasks.keys() & new.tasks.keys())
    if not ids:
        raise InputError(f"shares no task with {old.source}", new.source)
    only_old, only_new = len(old.tasks) - len(ids), len(new.tasks) - len(ids)
    notes = []
    if only_old or only_new:
        notes.append(
            f"the task sets differ: {len(ids)} shared, {only_old} only in the first file, "
            f"{only_new} only in this one"
        )
    changed = sum(old.tasks[id_].golds != new.tasks[id_].golds for id_ in ids)
    if changed:
        notes.append(
            f"{changed} shared tasks have another metric or other answers in the two files"
        )

    before, after = (_rows(seen, ids, ("score", "tokens")) for seen in (old, new))
    columns = np.column_stack([after - before, after[:, 1], before[:, 1]])
    score, tokens, top, bottom = columns.mean(axis=0).tolist()
    score_interval, tokens_interval, ratio_interval = None, None, None
    if len(ids) > 1:
        drawn = resampled_means(columns, resamples, seed)
        score_interval, tokens_interval = percentile(drawn[:, 0]), percentile(drawn[:, 1])
        if drawn[:, 3].all():
            ratio_interval = percentile(drawn[:, 2] / drawn[:, 3])
    return Comparison(
        tasks=len(ids),
        only_old=only_old,
        only_new=only_new,
        score=score,
        score_interval=score_interval,
        tokens=tokens,
        tokens_interval=tokens_interval,
        token_ratio=top / bottom if bottom else None,
        token_ratio_interval=ratio_interval,
        notes=tuple(notes),
    )


def resampled_means(rows: Floats, resamples: int, seed: int) -> Floats:
    """Column means of `resamples` draws of the rows with replacement.

    rows: (tasks, columns) → (resamples, columns). All columns of a draw come from the same rows,
    so ratios and differences of columns stay paired. Memory does not grow with `resamples` beyond
    the result.
    """
    count = len(rows)
    columns = np.ascontiguousarray(rows.T)
    means = np.empty((resamples, len(columns)))
    for start, picks in draws(count, resamples, seed):
        for c, column in enumerate(columns):
            means[start : start + len(picks), c] = column[picks].mean(axis=1)
    return means


def draws(count: int, resamples: int, seed: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The bootstrap's row numbers in chunks: (first resample, (resamples in chunk, count))."""
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // count)
    for start in range(0, resamples, step):
        yield start, rng.integers(count, size=(min(step, resamples - start), count))


def percentile(values: Floats) -> tuple[float, float]:
    """The central 95 % of resampled values, (low, high)."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail]).tolist()
    return low, high


def _intervals(rows: Floats, resamples: int, seed: int) -> list[Interval]:
    if len(rows) < 2:
        return [None] * rows.shape[1]
    return [percentile(column) for column in resampled_means(rows, resamples, seed).T]


def _rows(seen: Tally, ids: list[str], names: tuple[str, ...]) -> Floats:
    """Per-task means, (tasks, names). Sorted ids make a draw the same for any order of lines."""
    return np.array([[seen.tasks[id_].mean(name) for name in names] for id_ in ids])


def _mean_of_means(sums: Iterable[tuple[float, int]]) -> float | None:
    means = [total / n for total, n in sums if n]
    return sum(means) / len(means) if means else None
