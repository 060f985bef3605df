"""The tree search against trees worked out on paper, and properties of random trees."""

from __future__ import annotations

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optima_lite import tree
from optima_lite.dialogue import Sampling
from optima_lite.engines.base import Completion, Request
from optima_lite.engines.replay import ReplayEngine
from optima_lite.records import Agent, Task, Team, Tree, Turn
from optima_lite.reward import Weights
from optima_lite.teams import view
from optima_lite.tree import Growing, Place, Search, distance, grow

TASK = Task("t/train/1", "exchange", "Where?", ("Rome",), "exact", (("a",), ("b",)))
TEAM = Team(
    "pair",
    (
        Agent("Ann", "You are {name}: {question} {context}"),
        Agent("Ben", "I am {name}: {question} {context}"),
    ),
    max_turns=4,
)


def growing(search: Search | None = None, seed: int = 0, task: Task = TASK) -> Growing:
    return Growing(task, TEAM, Sampling(0.7, seed=seed), search or Search(), Weights(0.6, 1.0))


def shaped(*parents_and_texts: tuple[int, str]) -> Growing:
    """A tree with these turns, in order: (parent, text)."""
    made = growing()
    for parent, text in parents_and_texts:
        made.nodes.append(Place(Turn("Ann", text, len(text.split()), "end"), parent))
        made.nodes[parent].children.append(len(made.nodes) - 1)
    return made


def finish(made: Growing, *rewards_by_leaf: tuple[int, float]) -> Growing:
    """Give it finished conversations: (leaf, reward)."""
    for leaf, reward in rewards_by_leaf:
        made.trajectories.append(SimpleNamespace(reward=reward))  # type: ignore[arg-type]
        made.paths.append(made.path_to(leaf))
    return made


# -- select -----------------------------------------------------------------------------------


def test_distance_is_edits_over_the_longer_length() -> None:
    """kitten -> sitting takes 3 edits, the longer has 7 letters."""
    assert distance("kitten", "sitting") == pytest.approx(3 / 7)
    assert distance("", "") == 0
    assert distance("abc", "abc") == 0
    assert distance("", "abcd") == 1


def test_leaves_and_nodes_before_the_last_turn_are_not_expanded() -> None:
    """root -> 1 -> 2 -> 3, and root -> 4 -> 5.

    Heights: 3 and 5 are 0 (leaves), 2 and 4 are 1 (a leaf follows), 1 is 2. The root always may.
    """
    made = shaped((0, "first one"), (1, "second two"), (2, "third three"), (0, "xyz"), (4, "end"))
    assert made.heights() == [3, 2, 1, 0, 1, 0]
    assert made.eligible() == [0, 1]


def test_turns_like_an_expanded_one_are_not_expanded() -> None:
    """Three first turns of 8 letters, all with two more turns behind them; "aaaaaaaa" was expanded.

    "aaaaaaab" is 1/8 = 0.125 away (too near), "aaaaaabb" 2/8 = 0.25 (just far enough).
    """
    made = shaped(
        *((0, "aaaaaaaa"), (1, "x"), (2, "y")),
        *((0, "aaaaaaab"), (4, "x"), (5, "y")),
        *((0, "aaaaaabb"), (7, "x"), (8, "y")),
    )
    made.expanded = [0, 1]
    assert made.eligible() == [0, 7]


def test_values_are_means_over_the_conversations_through_a_node() -> None:
    """root -> 1 -> 2, root -> 1 -> 3, root -> 4; 3 was reached twice.

    Rewards: 2: 1.0; 3: 0.2 and 0.6; 4: -0.4. Node 3: 0.4. Node 1: 1.8 / 3 = 0.6. Root: 1.4 / 4.
    """
    made = shaped((0, "a"), (1, "b"), (1, "c"), (0, "d"))
    finish(made, (2, 1.0), (3, 0.2), (3, 0.6), (4, -0.4))
    assert made.values() == pytest.approx([0.35, 0.6, 1.0, 0.4, -0.4])
    assert made.visits() == [4, 3, 1, 2, 1]


def test_nodes_are_drawn_by_softmax_over_the_best() -> None:
    """Two candidates with values 1 and 0: e / (e + 1) = 0.731 of the draws are the first."""
    made = shaped((0, "left"), (1, "x"), (2, "y"), (0, "right"), (4, "x"), (5, "y"))
    finish(made, (3, 1.0), (6, 0.0))  # the root's value is 0.5
    made.search = Search(candidates=2)
    drawn = Counter(made.choose() for _ in range(4000))
    assert set(drawn) == {1, 0}, "the best two: left (1.0) and the root (0.5)"
    share = math.exp(1.0) / (math.exp(1.0) + math.exp(0.5))
    assert drawn[1] / 4000 == pytest.approx(share, abs=0.03)


# -- simulate and back up ---------------------------------------------------------------------


def scripted(replies: dict[tuple[int, int], str]):
    """Turns by (conversation number, turn number), from the seeds of the requests."""
    from optima_lite.dialogue import trajectory_seed

    known = {}
    for number, turn in replies:
        conversation = trajectory_seed(0, f"{TASK.id}#{number}")
        known[trajectory_seed(conversation, str(turn))] = replies[number, turn]
    return ReplayEngine(lambda request: known[request.seed])


def test_one_iteration_worked_out_on_paper() -> None:
    """Three conversations from the root; words are tokens, every loss is 2.0, λ 0.6 and 1.

    0: "I know it is here"       -> "<A>Rome</A>" -> "<A>Rome</A>"     right, 5 + 1 + 1 = 7 tokens
    1: "I know it is here!"      one edit in 18: merged into 0's turn; "<A>Oslo</A>" twice: wrong, 7
    2: "What do you have on it?" -> "<A>Rome</A>" -> "<A>Rome</A>"     right, 6 + 1 + 1 = 8 tokens
    Longest 8. Rewards: 1 - 0.6 · 7/8 + 0.5 = 0.975; 0 - 0.525 + 0.5 = -0.025; 1 - 0.6 + 0.5 = 0.9.
    Nodes: root; 1 (0's and 1's first turn, mean 0.475); 2 (2's first, 0.9);
    3 Rome after 1; 4 Oslo after 1 ("<A>Rome</A>" to "<A>Oslo</A>": 3 of 11, a node of its own);
    5 Rome after 2; 6, 7, 8 their last turns.
    """
    rome, oslo = "<A>Rome</A>", "<A>Oslo</A>"
    engine = scripted(
        {
            **{(0, 0): "I know it is here", (0, 1): rome, (0, 2): rome},
            **{(1, 0): "I know it is here!", (1, 1): oslo, (1, 2): oslo},
            **{(2, 0): "What do you have on it?", (2, 1): rome, (2, 2): rome},
        }
    )
    base = ReplayEngine(lambda request: "", loss=lambda u: 2.0)
    (made,) = grow(iter([growing(Search(iterations=1))]), engine, base)
    assert [(p.parent, p.turn.text) for p in made.nodes[1:] if p.turn] == [
        (0, "I know it is here"),
        (0, "What do you have on it?"),
        (1, rome),
        (1, oslo),
        (2, rome),
        (3, rome),
        (4, oslo),
        (5, rome),
    ]
    assert [t.reward for t in made.trajectories] == pytest.approx([0.975, -0.025, 0.9])
    assert made.values()[1:6] == pytest.approx([0.475, 0.9, 0.975, -0.025, 0.9])
    record = made.record("m", "b", {})
    assert [leaf.node for leaf in record.trajectories] == [6, 7, 8]
    assert Tree.from_dict(record.to_dict()) == record


def test_a_longer_conversation_changes_older_rewards() -> None:
    """R_token is relative to the longest conversation of the tree so far.

    First iteration: "<A>Rome</A>" twice, 2 tokens, alone: 1 - 0.6 + 0.5 = 0.9. The second says
    "well well well <A>Rome</A>" and "<A>Rome</A>": 5 tokens. Then the first has 2/5:
    1 - 0.24 + 0.5 = 1.26, and the second 0.9.
    """
    rome = "<A>Rome</A>"
    engine = scripted({(0, 0): rome, (0, 1): rome, (1, 0): f"well well well {rome}", (1, 1): rome})
    base = ReplayEngine(lambda request: "", loss=lambda u: 2.0)
    (made,) = grow(iter([growing(Search(iterations=2, simulations=1))]), engine, base)
    assert [t.reward for t in made.trajectories] == pytest.approx([1.26, 0.9])


WORDS = ["river", "<A>Rome</A>", "<A>Oslo</A>", "I see", "what else", "the town", "no", "yes it is"]


def talker(seed: int):
    """An engine that says random words, sometimes cut, sometimes broken."""

    def say(request: Request) -> Completion:
        rng = random.Random(f"{seed}/{request.seed}")
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
        kind = rng.random()
        if kind < 0.05:
            return Completion("", 0, "error", "broke")
        return Completion(text, len(text.split()), "length" if kind < 0.1 else "end")

    return say


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_random_trees(seed: int) -> None:
    """Values are means, turns are merged or apart, every prompt is the true history."""
    tasks = [TASK, Task("t/train/2", "exchange", "Who?", ("Oslo",), "exact", (("c",), ("d",)))]
    engine = ReplayEngine(talker(seed), capacity=1 + seed % 7)
    base = ReplayEngine(lambda request: "", loss=lambda u: 1.0 + len(u.text) / 10)
    made = list(grow((growing(seed=seed, task=t) for t in tasks), engine, base))
    assert [m.task.id for m in made] == [t.id for t in tasks]
    told = {repr(request.messages) for request in engine.requests}
    for one in made:
        assert len(one.trajectories) == 24
        assert len(one.expanded) == 8
        for i, value in enumerate(one.values()):
            through = [
                t.reward for t, path in zip(one.trajectories, one.paths, strict=True) if i in path
            ]
            assert value == pytest.approx(sum(through) / max(len(through), 1))
        for place in one.nodes:
            texts = [one.turn(child).text for child in place.children]
            for k, text in enumerate(texts):
                assert all(distance(text, other) >= 0.1 for other in texts[:k])
        for trajectory, path in zip(one.trajectories, one.paths, strict=True):
            assert [one.turn(i) for i in path[1:]] == list(trajectory.turns)
        for i, place in enumerate(one.nodes[1:], start=1):
            assert place.turn
            assert place.parent is not None
            agent = next(a for a in TEAM.agents if a.name == place.turn.agent)
            history = [one.turn(k) for k in one.path_to(place.parent)[1:]]
            assert len(history) % 2 == TEAM.agents.index(agent), "speakers take turns"
            assert repr(view(TEAM, one.task, agent, history)) in told
            assert i in {n for path in one.paths for n in path}


def test_a_tree_does_not_depend_on_what_grows_beside_it() -> None:
    """Nor on the order in which turns come back."""
    base = ReplayEngine(lambda request: "", loss=lambda u: 1.5)
    alone = list(grow(iter([growing()]), ReplayEngine(talker(3), capacity=1), base))
    other = Task("t/train/9", "exchange", "Who?", ("Oslo",), "exact", (("c",), ("d",)))
    beside = list(
        grow(iter([growing(task=other), growing()]), ReplayEngine(talker(3), capacity=5), base)
    )
    assert alone[0].record("m", "b", {}) == beside[1].record("m", "b", {})


def test_identical_turns_are_scored_once() -> None:
    scored: list[str] = []

    def loss(utterance) -> float:
        scored.append(utterance.text)
        return 2.0

    engine = ReplayEngine(lambda request: "<A>Rome</A>")
    list(grow(iter([growing()]), engine, ReplayEngine(lambda request: "", loss=loss)))
    assert scored == ["<A>Rome</A>"]


def test_lost_turns_are_an_error() -> None:
    class Loses(ReplayEngine):
        def generate(self, pull):
            yield from list(super().generate(pull))[:-1]

    with pytest.raises(RuntimeError, match="lost"):
        list(grow(iter([growing()]), Loses(lambda r: "x"), ReplayEngine(lambda r: "")))


def test_the_paper_s_numbers() -> None:
    assert tree.Search() == Search(8, 3, 10, 0.25, 0.1)
