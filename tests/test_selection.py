"""Which conversations are trained on, and as which examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optima_lite.records import Agent, Node, Score, Task, Team, Trajectory, Tree, Turn
from optima_lite.selection import best_of, eligible, examples, pairs, top_share
from optima_lite.teams import view

TASK = Task("t", "exchange", "Who?", ("so",), "f1", contexts=(("A fact.",), ("B fact.",)))
PROMPT = "You are {name}. {question}\n{context}"
TEAM = Team("pair", (Agent("Alice", PROMPT), Agent("Bob", PROMPT)))
SCORE = Score(1.0, 1.0, (), 2.0, False, 0.6, 1.0, "base", "none")


def talk(
    reward: float | None, *texts: str, k: int = 0, degenerate: bool = False, **fields
) -> Trajectory:
    turns = tuple(
        Turn(("Alice", "Bob")[i % 2], text, 1, "end") for i, text in enumerate(texts or ("a", "b"))
    )
    values = {"end": "agreement", "agreed": True, "answer": "so", "model": "m", "seed": 0}
    if reward is not None:
        values |= {"reward": reward, "score": replace(SCORE, degenerate=degenerate)}
    return Trajectory(f"t#{k}", TASK, TEAM, turns, tokens=2, **{**values, **fields})


# -- the best of N ----------------------------------------------------------------------------


def test_the_highest_reward_of_the_group():
    group = [talk(r, k=k) for k, r in enumerate([0.1, 0.9, -2.0, 0.7])]
    assert best_of(group).id == "t#1"


def test_the_first_of_equals():
    group = [talk(r, k=k) for k, r in enumerate([0.1, 0.9, 0.9])]
    assert best_of(group).id == "t#1"


def test_negative_rewards_have_a_best_too():
    assert best_of([talk(-0.5), talk(-0.2, k=1), talk(-0.3, k=2)]).id == "t#1"


@pytest.mark.parametrize(
    "bad",
    [
        talk(9.0, end="turn_cut"),
        talk(9.0, end="context_full"),
        talk(9.0, end="engine_error", error="out of memory"),
        talk(9.0, degenerate=True),
        talk(None),
    ],
    ids=["cut", "full", "failed", "degenerate", "unscored"],
)
def test_broken_conversations_are_never_selected(bad):
    assert not eligible(bad)
    assert best_of([bad]) is None
    assert best_of([bad, talk(-1.0, k=1)]).id == "t#1"


def test_whole_conversations_without_agreement_may_be():
    assert eligible(talk(0.1, end="turn_limit", agreed=False))


def test_no_conversation_no_best():
    assert best_of([]) is None


# -- the top share ----------------------------------------------------------------------------


def test_seventy_percent_of_ten_are_seven():
    rewards = [0.3, 0.9, 0.1, 0.5, 0.8, 0.2, 0.7, 0.4, 1.0, 0.6]
    # The three lowest are 0.1, 0.2 and 0.3, at 2, 5 and 0.
    assert top_share(rewards, 0.7) == [1, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("n", "share", "kept"),
    [
        (10, 0.7, 7),
        (100, 0.7, 70),
        (100, 0.07, 7),  # 0.07 · 100 = 7.000000000000001, and ⌈·⌉ must not make 8 of it
        (100, 0.55, 55),  # 55.00000000000001
        (3, 0.7, 3),  # ⌈2.1⌉
        (1, 0.7, 1),
        (1, 0.01, 1),
        (0, 0.7, 0),
        (10, 1.0, 10),
        (10, 0.71, 8),
        (10, 0.5, 5),
        (3, 1 / 3, 1),
        (10, 1e-300, 1),
    ],
)
def test_how_many_are_kept(n, share, kept):
    assert len(top_share([float(i) for i in range(n)], share)) == kept


def test_of_equals_the_earlier_ones():
    assert top_share([0.5] * 10, 0.3) == [0, 1, 2]
    assert top_share([0.5, 0.9, 0.5, 0.5], 0.5) == [0, 1]


def test_the_order_of_the_input_stays():
    assert top_share([0.1, 0.9, 0.2, 0.8], 0.5) == [1, 3]


# -- examples ---------------------------------------------------------------------------------


def test_one_example_per_agent_with_its_own_view():
    trajectory = talk(1.5, "a1", "b1", "a2", "b2")
    alice, bob = examples(trajectory)
    assert alice.messages == (
        {"role": "system", "content": "You are Alice. Who?\nA fact."},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "Bob: b1"},
        {"role": "assistant", "content": "a2"},
    )
    assert bob.messages == (
        {"role": "system", "content": "You are Bob. Who?\nB fact."},
        {"role": "user", "content": "Alice: a1"},
        {"role": "assistant", "content": "b1"},
        {"role": "user", "content": "Alice: a2"},
        {"role": "assistant", "content": "b2"},
    )
    assert [(e.agent, e.trajectory_id, e.reward) for e in (alice, bob)] == [
        ("Alice", "t#0", 1.5),
        ("Bob", "t#0", 1.5),
    ]


def test_partner_turns_after_the_last_own_one_are_removed():
    alice, bob = examples(talk(1.0, "a1", "b1", "a2"))
    assert alice.messages[-1] == {"role": "assistant", "content": "a2"}
    assert bob.messages[-1] == {"role": "assistant", "content": "b1"}
    assert len(bob.messages) == 3


def test_an_agent_that_never_spoke_has_no_example():
    assert [e.agent for e in examples(talk(1.0, "a1"))] == ["Alice"]
    assert examples(replace(talk(1.0), turns=())) == []


def test_the_format_text_is_dropped():
    """The record names the format; the view that is trained is the one without it."""
    trajectory = talk(1.0, "a1", "b1", format="json")
    for example, agent in zip(examples(trajectory), TEAM.agents, strict=True):
        plain = view(TEAM, TASK, agent, trajectory.turns)
        spoken = view(TEAM, TASK, agent, trajectory.turns, "Write every message as one object.")
        assert plain[0] != spoken[0]
        assert list(example.messages) == plain[: len(example.messages)]


# -- pairs of siblings ------------------------------------------------------------------------


def tree(*nodes: tuple[int, str, str, float], stop: dict[int, str] | None = None) -> Tree:
    """Nodes after the root: (parent, agent, text, value)."""
    made = [Node(None, "", "", 0, "end", None, 1, 0.0)]
    for i, (parent, agent, text, value) in enumerate(nodes, start=1):
        made.append(Node(parent, agent, text, 1, (stop or {}).get(i, "end"), 2.0, 1, value))
    return Tree("t", TASK, TEAM, tuple(made), (), (), "m", "b", 0, {})


def found(made: Tree, *thetas: float, **kwargs) -> list[tuple[int, int]]:
    return [(p.chosen_node, p.rejected_node) for p in pairs(made, *thetas, **kwargs)]


FAMILY = tree(
    (0, "Alice", "a", 0.9),
    (0, "Alice", "b", 0.6),
    (0, "Alice", "c", 0.3),
    (1, "Bob", "d", 1.2),
    (1, "Bob", "e", 0.35),
    (2, "Bob", "f", 0.2),
)


def test_pairs_worked_out_on_paper():
    """First turns 0.9, 0.6, 0.3; after the first of them 1.2 and 0.35; after the second one child.

    θ_filter 0.4, θ_diff 0.2: (1,2), (1,3), (2,3) and (4,5). 0.9 - 0.6 is 0.3 > 0.2. With θ_diff
    0.3 the difference 0.9 - 0.6 = 0.30000000000000004 stays, that of 0.6 and 0.3 (0.3) does not.
    With θ_filter 0.7 the pair led by 0.6 goes.
    """
    assert found(FAMILY, 0.4, 0.2) == [(1, 2), (1, 3), (2, 3), (4, 5)]
    assert found(FAMILY, 0.4, 0.31) == [(1, 3), (4, 5)]
    assert found(FAMILY, 0.7, 0.2) == [(1, 2), (1, 3), (4, 5)]
    assert found(FAMILY, 0.4, 0.2, extremes=True) == [(1, 3), (4, 5)]


def test_blanks_at_the_ends_make_no_other_turn():
    """A tree of others; pairs that dpo would refuse."""
    made = tree((0, "Alice", "a", 0.9), (0, "Alice", "a ", 0.1), (0, "Alice", "\nb", 0.2))
    assert found(made, 0.4, 0.2) == [(1, 3)]


def test_the_prompt_is_the_speaker_s_view_of_the_conversation_so_far():
    pair = pairs(FAMILY, 0.4, 0.2)[-1]
    bob = TEAM.agents[1]
    assert list(pair.prompt) == view(TEAM, TASK, bob, [Turn("Alice", "a", 1, "end")])
    assert pair.chosen == ({"role": "assistant", "content": "d"},)
    assert pair.rejected == ({"role": "assistant", "content": "e"},)
    assert (pair.agent, pair.node, pair.task_id) == ("Bob", 1, "t")
    assert (pair.chosen_value, pair.rejected_value) == (1.2, 0.35)


def test_cut_turns_are_in_no_pair_and_degenerate_ones_are_not_chosen():
    made = tree(
        (0, "Alice", "long", 0.9),
        (0, "Alice", "Fine. Bob: I agree", 0.8),
        (0, "Alice", "good", 0.6),
        (0, "Alice", "", 0.0),
        (0, "Alice", "bad", 0.1),
        stop={1: "length"},
    )
    assert found(made, 0.4, 0.2) == [(3, 5)]


def test_equal_texts_are_no_pair():
    assert found(tree((0, "Alice", "same", 0.9), (0, "Alice", "same", 0.1)), 0.4, 0.2) == []
