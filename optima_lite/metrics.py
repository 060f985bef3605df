"""Score an answer against gold aliases: every metric is `f(answer, golds) -> [0, 1]`.

The best alias counts; one answer and a list of them take the same path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from optima_lite.answers import normalize
from optima_lite.errors import InputError

_CLOSED = frozenset({"yes", "no", "noanswer"})


def f1(answer: str, golds: Sequence[str]) -> float:
    """Word F1 of SQuAD and HotpotQA over normalised words, best over `golds`."""
    return max((_f1(answer, gold) for gold in golds), default=0.0)


def exact(answer: str, golds: Sequence[str]) -> float:
    """1.0 where the normalised answer equals a normalised gold, else 0.0."""
    wanted = normalize(answer)
    return float(any(normalize(gold) == wanted for gold in golds))


def _f1(answer: str, gold: str) -> float:
    said, wanted = normalize(answer), normalize(gold)
    # HotpotQA's rule: yes, no and no-answer are right or wrong, never partly right.
    if said != wanted and not _CLOSED.isdisjoint((said, wanted)):
        return 0.0
    ours, theirs = said.split(), wanted.split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"f1": f1, "exact": exact}


def score(metric: str, answer: str | None, golds: Sequence[str]) -> float:
    """R_task: the metric of `answer`, 0.0 where no answer was marked."""
    if metric not in METRICS:
        raise InputError(f"metric {metric!r} is not one of {', '.join(METRICS)}")
    return 0.0 if answer is None else METRICS[metric](answer, golds)
