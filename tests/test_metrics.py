"""F1 and exact match on numbers worked out by hand."""

from __future__ import annotations

import pytest

from optima_lite.errors import InputError
from optima_lite.metrics import METRICS, exact, f1, score


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        # Said 2 words, wanted 2, none shared.
        ("red house", "blue door", 0.0),
        # 2 of 3 said are wanted (P = 2/3), 2 of 2 wanted are said (R = 1): 2·(2/3)/(5/3) = 0.8
        ("Paul Walter Haggis", "Walter Haggis", 0.8),
        # P = 1/1, R = 1/3: 2·(1/3)/(4/3) = 0.5
        ("Haggis", "Paul Walter Haggis", 0.5),
        # "to" is shared twice of 2 said and 4 wanted ("to be to be"): P = 1, R = 1/2: 2/3
        ("to to", "to be to be", 2 / 3),
        # said "x x x", wanted "x y": one x is shared: P = 1/3, R = 1/2: (1/3)/(5/6) = 0.4
        ("x x x", "x y", 0.4),
        # Order and articles do not count.
        ("Tower of the Eiffel", "The Eiffel tower", 0.8),
        ("the Eiffel Tower", "Eiffel tower", 1.0),
        ("", "x", 0.0),
        # Whole words, not letters or sub-words: a peer lost the m of "mammoth" and gave it 0.
        ("mammoth", "mammoth", 1.0),
        ("mammoth", "ammoth", 0.0),
        # Other scripts.
        ("Лев Николаевич Толстой", "Лев Толстой", 0.8),
        ("МОСКВА", "Москва", 1.0),
        ("伦敦", "伦敦", 1.0),
        ("伦敦", "北京", 0.0),
        # Articles only: kept as words, since nothing else is left of them.
        ("The", "the", 1.0),
        ("The", "a", 0.0),
        ("the", "the Beatles", 0.0),
    ],
)
def test_f1(answer, gold, value):
    assert f1(answer, [gold]) == pytest.approx(value)
    assert f1(gold, [answer]) == pytest.approx(value), "F1 is symmetric"


@pytest.mark.parametrize("closed", ["yes", "no", "noanswer"])
def test_closed_answers_are_right_or_wrong(closed):
    """HotpotQA's rule: "yes, both" shares a word with "yes", and is wrong nevertheless."""
    assert f1(closed, [closed]) == 1.0
    assert f1(closed.upper() + ".", [closed]) == 1.0
    assert f1(f"{closed} indeed", [closed]) == 0.0
    assert f1(closed, [f"{closed} indeed"]) == 0.0
    assert f1(f"oh {closed}", [f"{closed} indeed"]) == 0.5  # no closed answer on either side


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("The  Quelby.", "quelby", 1.0),
        ("Quelby town", "Quelby", 0.0),
        ("1,000", "1000", 1.0),
        ("The", "A", 0.0),
        ("?", "!", 0.0),
        ("Ｑuelby", "Quelby", 1.0),
    ],
)
def test_exact(answer, gold, value):
    assert exact(answer, [gold]) == value


@pytest.mark.parametrize("metric", METRICS)
def test_lists_and_single_answers_take_the_same_path(metric):
    """A peer's exact match failed on a list of aliases, and the failure counted as 0."""
    golds = ["New York City", "NYC", "the Big Apple"]
    for gold in golds:
        assert score(metric, gold, [gold]) == score(metric, gold, golds) == 1.0
        assert score(metric, gold, tuple(reversed(golds))) == 1.0
    assert score(metric, "Boston", golds) == 0.0
    assert score(metric, "Boston", []) == 0.0


def test_the_best_alias_counts():
    """0.5 against the first (see above), 2/3 against the second: P = 1, R = 1/2."""
    assert f1("Haggis", ["Paul Walter Haggis", "Walter Haggis"]) == pytest.approx(2 / 3)


def test_score():
    assert score("f1", "Haggis", ["Paul Walter Haggis"]) == pytest.approx(0.5)
    assert score("exact", "Haggis", ["Paul Walter Haggis"]) == 0.0
    assert score("f1", None, ["x"]) == 0.0
    assert score("exact", "", ["x"]) == 0.0
    for answer in (None, "x"):
        with pytest.raises(InputError, match="metric 'bleu' is not one of f1, exact"):
            score("bleu", answer, ["x"])
