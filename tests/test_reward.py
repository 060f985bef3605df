"""Eq. 1 on numbers worked out by hand: R = R_task − λ_token · R_token + λ_loss / R_loss."""

from __future__ import annotations

import doctest

import pytest

from optima_lite import reward
from optima_lite.errors import InputError
from optima_lite.records import Agent, Task, Team, Trajectory, Turn
from optima_lite.reward import Weights, combine, degenerate, score_group, worst

TASK = Task("t", "debate", "Q?", ("Paul Haggis",), "f1")
TEAM = Team("pair", (Agent("Alice", "{question}"), Agent("Bob", "{question}")))


def talk(
    *texts: str, answer: str | None = None, tokens: int | None = None, k: int = 0, **fields
) -> Trajectory:
    """Alice and Bob say `texts` in turn; each text has as many tokens as words."""
    turns = tuple(
        Turn(("Alice", "Bob")[i % 2], text, len(text.split()), "end")
        for i, text in enumerate(texts)
    )
    total = sum(t.tokens for t in turns) if tokens is None else tokens
    values = {"end": "turn_limit", "agreed": False, "model": "m", "seed": 0, **fields}
    return Trajectory(f"t#{k}", TASK, TEAM, turns, tokens=total, answer=answer, **values)


@pytest.mark.parametrize(
    ("task", "tokens", "loss", "token_weight", "loss_weight", "expected"),
    [
        (1.0, 0.5, 2.0, 0.6, 1.0, 1.2),  # 1 − 0.3 + 0.5
        (0.0, 1.0, 4.0, 0.6, 1.0, -0.35),  # 0 − 0.6 + 0.25
        (0.8, 0.25, 3.0, 0.4, 0.9, 1.0),  # 0.8 − 0.1 + 0.3
        (0.8, 0.25, 3.0, 0.0, 0.0, 0.8),  # λ = 0 leaves the task's score
        (0.8, 0.25, 3.0, 0.0, 0.9, 1.1),
        (0.8, 0.25, 3.0, 0.4, 0.0, 0.7),
        (1.0, 0.5, None, 0.6, 1.0, 0.7),  # nothing said that could be read
        (1.0, 0.5, 0.0, 0.6, 1.0, 0.7),  # certain of every token: no division by zero
        (1.0, 0.5, 0.1, 0.6, 1.0, 10.7),  # small losses are not clipped
    ],
)
def test_eq_1(task, tokens, loss, token_weight, loss_weight, expected):
    assert combine(task, tokens, loss, token_weight, loss_weight) == pytest.approx(expected)


def test_the_documented_example():
    assert doctest.testmod(reward).failed == 0
    assert doctest.testmod(reward).attempted > 0


def test_default_weights_are_hotpotqas():
    assert Weights() == Weights(token=0.6, loss=1.0)


def test_r_loss_is_the_worst_turns():
    assert worst([2.0, 3.5, 1.0]) == 3.5
    assert worst([None, 1.5, None]) == 1.5
    assert worst([None, None]) is None
    assert worst([]) is None


def test_group_of_three():
    """Tokens 4, 2 and 8, so R_token = 0.5, 0.25, 1. F1 = 1, 2/3 (P = 1, R = 1/2), 0.

    #0: 1 − 0.6·0.5 + 1/max(2, 4)       = 0.95
    #1: 2/3 − 0.6·0.25 + 1/1            = 1.51667
    #2: 0 − 0.6·1 + 1/5                 = −0.4
    """
    group = [
        talk("one two", "three four", answer="the Paul Haggis"),
        talk("one", "two", answer="Haggis", k=1),
        talk("one two three four", "five six seven eight", k=2),
    ]
    scored = score_group(group, [[2.0, 4.0], [1.0, None], [5.0, 0.5]], Weights(), "base", "none")
    assert [t.reward for t in scored] == pytest.approx([0.95, 2 / 3 - 0.15 + 1, -0.4])
    parts = [t.score for t in scored]
    assert [p.task for p in parts] == pytest.approx([1, 2 / 3, 0])
    assert [p.tokens for p in parts] == [0.5, 0.25, 1.0]
    assert [p.loss for p in parts] == [4.0, 1.0, 5.0]
    assert [p.losses for p in parts] == [(2.0, 4.0), (1.0, None), (5.0, 0.5)]
    assert {(p.lambda_token, p.lambda_loss, p.base, p.loss_context) for p in parts} == {
        (0.6, 1.0, "base", "none")
    }
    assert not any(p.degenerate for p in parts)
    # Nothing but the reward was added.
    assert [t.turns for t in scored] == [t.turns for t in group]
    assert [t.id for t in scored] == ["t#0", "t#1", "t#2"]


def test_tokens_are_normalised_within_the_group_only():
    """10 tokens are the most of one group and a tenth of the other's 100."""
    one = talk("x", tokens=10)
    alone = score_group([one], [[1.0]], Weights(), "b")
    beside = score_group([one, talk("y", tokens=100, k=1)], [[1.0], [1.0]], Weights(), "b")
    assert alone[0].score.tokens == 1.0
    assert beside[0].score.tokens == 0.1
    assert beside[0].reward - alone[0].reward == pytest.approx(0.6 * 0.9)


def test_zero_weights_leave_the_task_score():
    (scored,) = score_group([talk("a b", answer="Haggis")], [[3.0]], Weights(0.0, 0.0), "b")
    assert scored.reward == pytest.approx(2 / 3)


def test_nothing_said_costs_nothing():
    """A conversation whose first prompt did not fit: no turns, no tokens, no loss."""
    group = [talk(end="context_full"), talk(end="engine_error", k=1)]
    assert [t.reward for t in score_group(group, [[], []], Weights(), "b")] == [0.0, 0.0]


def test_a_cut_conversation_counts_what_it_marked_before():
    """1 − 0.6 + 1/2 = 0.9"""
    cut = talk("so <A>Paul Haggis</A>", "and", answer="Paul Haggis", end="turn_cut")
    assert score_group([cut], [[2.0, 1.0]], Weights(), "b")[0].reward == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("hello", "hi"), False),
        (("hello", ""), True),
        (("hello", " \n"), True),
        (("hello\nBob: hi", "x"), True),
        (("hello\n\n  Bob : hi", "x"), True),
        (("hello\n**Bob:** hi", "x"), True),
        (("Bob: hi", "x"), True),
        (("x", "Alice: hi"), True),
        (("x", "fine\nAlice: hi"), True),
        (("x", "Bob: hi\nBob: again"), False),  # its own name
        (("I agree with Bob: it is so", "x"), False),  # in a sentence
        (("Bobby: no partner", "x"), False),
        (("Bob, what is it?", "x"), False),
        (("Carol: not in the team", "x"), False),
    ],
)
def test_degenerate(texts, expected):
    assert degenerate(talk(*texts)) is expected


def test_names_are_text_not_patterns():
    team = Team("odd", (Agent("Alice", "{question}"), Agent("B.b (critic", "{question}")))
    for text, expected in [("x\nB.b (critic: y", True), ("x\nBob (critic: y", False)]:
        turn = Turn("Alice", text, 2, "end")
        trajectory = Trajectory("t#0", TASK, team, (turn,), "turn_limit", False, 2, None, "m", 0)
        assert degenerate(trajectory) is expected


def test_one_agent_alone_cannot_speak_for_another():
    team = Team("solo", (Agent("Solver", "{question}"),))
    turn = Turn("Solver", "Bob: hm", 2, "end")
    trajectory = Trajectory("t#0", TASK, team, (turn,), "turn_limit", False, 2, None, "m", 0)
    assert not degenerate(trajectory)


def test_the_floor_of_degenerate_conversations():
    """No task score, the full token price, no readability: −0.6, although the answer is right.

    Its tokens still count for the group: #0 has 2 of 8.  1 − 0.6·0.25 + 1/2 = 1.35
    """
    good = talk("one", "two", answer="Paul Haggis")
    bad = talk("one two three\nBob: four", "six seven", "x", answer="Paul Haggis", k=1)
    assert bad.tokens == 8
    scored = score_group([good, bad], [[2.0, 2.0], [1.0, 1.0, 1.0]], Weights(), "b")
    assert [t.reward for t in scored] == pytest.approx([1.35, -0.6])
    assert [t.score.degenerate for t in scored] == [False, True]
    # The parts are what they would be, so that one can see what was taken away.
    assert scored[1].score.task == 1.0
    assert scored[1].score.loss == 1.0
    # The full price, however short it is: 4 of 8 tokens are not 0.6·0.5.
    short = talk("one\nBob: two", "three", answer="Paul Haggis", k=2)
    pair = score_group([talk(*["a b c d"] * 2), short], [[1.0] * 2] * 2, Weights(), "b")
    assert pair[1].score.tokens == 0.5
    assert pair[1].reward == pytest.approx(-0.6)
    # Without a token price the floor is 0.
    assert score_group([bad], [[1.0] * 3], Weights(0.0, 1.0), "b")[0].reward == 0.0


def test_losses_must_match_the_group():
    with pytest.raises(ValueError, match="zip"):
        score_group([talk("a")], [], Weights(), "b")


def test_an_unknown_metric_is_an_input_error():
    with pytest.raises(InputError, match="bleu"):
        Trajectory.from_dict(talk("a").to_dict() | {"task": TASK.to_dict() | {"metric": "bleu"}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is Tilda Marsk. Bob: She was born in Quelby.", True),
        ("It is Tilda Marsk!\nBob: She was born in Quelby.", True),
        ("**Bob**: She was born in Quelby.", True),
        ("I told Bob: it is Quelby.", False),
        ("Thank you, Bob. It is Quelby.", False),
    ],
)
def test_another_agents_part_on_the_same_line(text: str, expected: bool) -> None:
    team = Team("t", (Agent("Alice", "{question}"), Agent("Bob", "{question}")))
    task = Task("a/b/c", "exchange", "q", ("x",), "exact", (("c",), ("d",)))
    turns = (Turn("Alice", text, 5, "end"),)
    talk = Trajectory("a/b/c#0", task, team, turns, "agreement", True, 5, "x", "m", 0)
    assert degenerate(talk) is expected
