"""Conversations: who speaks, when they end, and many of them at once on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from optima_lite.dialogue import Conversation, Sampling, run, speaking_order, start, trajectory_seed
from optima_lite.engines.base import Completion, Pull, Request
from optima_lite.engines.replay import ReplayEngine
from optima_lite.records import Agent, Task, Team, Trajectory
from optima_lite.teams import load_formats, load_team


def make_task(id: str = "t") -> Task:
    return Task(id, "debate", f"Question {id}?", ("so",), "f1")


def make_team(agents: int = 2, **fields: Any) -> Team:
    names = ("Alice", "Bob", "Carol")[:agents]
    return Team("x", tuple(Agent(n, "{name}: {question}") for n in names), **fields)


def hold(script: Sequence[str | Completion], team: Team | None = None, **sampling) -> Trajectory:
    """One conversation whose turns are taken from `script`, in order."""
    said = iter(script)
    engine = ReplayEngine(lambda request: next(said))
    groups = iter([start(make_task(), team or make_team(), 1, Sampling(**sampling))])
    ((conversation,),) = run(groups, engine)
    assert next(said, None) is None, "the conversation ended before the script"
    return conversation.trajectory("replay", {"n": 1})


# -- how it ends ------------------------------------------------------------------------------


def test_agreement_of_two():
    talk = hold(["Alice says <A>The Quelby</A>", "I agree: <A>quelby.</A>"])
    assert (talk.end, talk.agreed, talk.answer) == ("agreement", True, "quelby.")
    assert [turn.agent for turn in talk.turns] == ["Alice", "Bob"]
    assert talk.tokens == sum(turn.tokens for turn in talk.turns) == 4 + 3


def test_different_answers_do_not_agree():
    talk = hold(["<A>x</A>", "<A>y</A>", "<A>x</A>", "<A>x</A>"])
    assert (talk.end, len(talk.turns)) == ("agreement", 4)


def test_unmarked_turns_between_do_not_matter():
    talk = hold(["<A>x</A>", "really?", "yes", "then <A>x</A>"])
    assert (talk.end, talk.answer) == ("agreement", "x")
    talk = hold(["hm", "<A>x</A>", "hm", "hm", "<A>y</A>", "hm", "<A>y</A>"])
    assert (talk.end, talk.answer) == ("agreement", "y")


def test_three_agents_need_three_equal_answers():
    talk = hold(["<A>x</A>", "<A>x</A>", "<A>y</A>", "<A>y</A>", "<A>y</A>"], make_team(3))
    assert (talk.end, talk.answer, len(talk.turns)) == ("agreement", "y", 5)


@pytest.mark.parametrize(("k", "turns"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_agreement_is_the_teams_number(k, turns):
    talk = hold(["<A>x</A>"] * turns, make_team(3, agreement=k))
    assert (talk.end, len(talk.turns)) == ("agreement", turns)


def test_boxed_teams_read_boxes():
    talk = hold([r"<A>1</A> \boxed{2}", r"\boxed{2}"], make_team(answer_mark="boxed"))
    assert (talk.end, talk.answer) == ("agreement", "2")


def test_the_turn_limit_counts_the_last_answer():
    talk = hold(["<A>x</A>", "<A>y</A>", "hm"], max_turns=3)
    assert (talk.end, talk.agreed, talk.answer) == ("turn_limit", False, "y")
    assert hold(["a", "b"], make_team(max_turns=2)).end == "turn_limit"
    talk = hold(["a"], make_team(max_turns=9), max_turns=1)
    assert (talk.end, talk.answer) == ("turn_limit", None)


def test_agreement_in_the_last_turn_is_agreement():
    assert hold(["<A>x</A>", "<A>x</A>"], max_turns=2).end == "agreement"


def test_a_cut_turn_ends_the_conversation_and_is_kept():
    talk = hold(["<A>x</A>", Completion("and so on and", 4, "length")])
    assert (talk.end, talk.agreed, talk.answer) == ("turn_cut", False, "x")
    assert (talk.turns[1].text, talk.turns[1].stop) == ("and so on and", "length")


def test_a_cut_turn_never_agrees():
    talk = hold(["<A>x</A>", Completion("<A>x</A> and", 2, "length")])
    assert (talk.end, talk.agreed, talk.answer) == ("turn_cut", False, "x")


def test_the_window_fills_within_a_turn():
    talk = hold(["<A>x</A>", Completion("half a", 2, "context")])
    assert (talk.end, talk.agreed, talk.answer) == ("context_full", False, "x")
    assert [(t.text, t.stop) for t in talk.turns][1] == ("half a", "context")
    assert talk.tokens == 3


def test_the_window_is_full_before_a_turn():
    """Nobody said anything: there is no turn to record."""
    talk = hold(["<A>x</A>", Completion("", 0, "context")])
    assert (talk.end, talk.agreed, len(talk.turns)) == ("context_full", False, 1)
    assert hold([Completion("", 0, "context")]).turns == ()


def test_an_engine_error_is_told_and_is_no_turn():
    talk = hold(["<A>x</A>", Completion("Traceback…", 9, "error", "the server went away")])
    assert (talk.end, talk.error, talk.agreed) == ("engine_error", "the server went away", False)
    assert [turn.text for turn in talk.turns] == ["<A>x</A>"]
    assert talk.tokens == 1


def test_an_empty_turn_is_a_turn():
    talk = hold(["", "b"], max_turns=2)
    assert [(t.text, t.tokens) for t in talk.turns] == [("", 0), ("b", 1)]


# -- what is said -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("Alice: hello there", "hello there"),
        ("  Alice:hello there \n", "hello there"),
        ("Bob: hello", "Bob: hello"),  # another's name stays, and is degenerate
        ("ecila: A hello", "ecila: A hello"),  # strip("Alice:") would eat letters
        ("Alice hello", "Alice hello"),
        ("Alice: Alice: hi", "Alice: hi"),
        ("Alice:", ""),
    ],
)
def test_the_own_name_in_front_is_removed(said, text):
    talk = hold([said], max_turns=1)
    assert talk.turns[0].text == text
    assert talk.turns[0].tokens == talk.tokens == len(text.split()), "tokens are those of the text"


def test_speaking_order():
    team = make_team(3, order=("Carol", "Alice", "Carol", "Bob"))
    talk = hold(list("abcdef"), team, max_turns=6)
    assert [t.agent for t in talk.turns] == ["Carol", "Alice", "Carol", "Bob", "Carol", "Alice"]
    assert speaking_order(make_team(3)) == ("Alice", "Bob", "Carol")


def test_the_request_of_a_turn():
    engine = ReplayEngine(lambda request: "hm")
    team = make_team(max_turn_tokens=55)
    list(run(iter([start(make_task(), team, 1, Sampling(0.3, 2))]), engine))
    first, second = engine.requests
    assert (first.temperature, first.max_tokens) == (0.3, 55)
    assert first.messages == [{"role": "system", "content": "Alice: Question t?"}]
    assert second.messages == [
        {"role": "system", "content": "Bob: Question t?"},
        {"role": "user", "content": "Alice: hm"},
    ]
    engine = ReplayEngine(lambda request: "hm")
    list(run(iter([start(make_task(), team, 1, Sampling(max_turns=1, max_turn_tokens=7))]), engine))
    assert engine.requests[0].max_tokens == 7


def test_the_record():
    formats = {"json": "Write JSON."}
    (conversation,) = start(make_task("a/b"), make_team(), 1, Sampling(seed=5), formats)
    ((conversation,),) = run(iter([[conversation]]), ReplayEngine(lambda request: "<A>x</A>"))
    talk = conversation.trajectory("model", {"n": 1})
    assert (talk.id, talk.model, talk.format) == ("a/b#0", "model", "json")
    assert talk.seed == trajectory_seed(5, "a/b#0") < 2**63
    assert (talk.settings, talk.reward, talk.score) == ({"n": 1}, None, None)
    assert Trajectory.from_dict(talk.to_dict() | {"turns": [t.to_dict() for t in talk.turns]})


# -- seeds and formats ------------------------------------------------------------------------


def test_seeds_differ_by_trajectory_turn_and_run():
    engine = ReplayEngine(lambda request: "hm")
    groups = (start(make_task(str(i)), make_team(), 4, Sampling(max_turns=3)) for i in range(5))
    list(run(groups, engine))
    seeds = {request.seed for request in engine.requests}
    assert len(seeds) == len(engine.requests) == 5 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert trajectory_seed(0, "t#0") != trajectory_seed(1, "t#0")
    assert trajectory_seed(1, "1/t#0") != trajectory_seed(11, "/t#0")


def script_of_seeds(request: Request) -> str:
    """A turn that depends on the request's seed and nothing else; it may agree or go on."""
    return f"word {request.seed % 1000} " + f"<A>{request.seed % 3}</A>" * (request.seed % 2)


def everything(capacity: int, tasks: int = 9, n: int = 3) -> list[Trajectory]:
    groups = (start(make_task(str(i)), make_team(), n, Sampling(seed=1)) for i in range(tasks))
    engine = ReplayEngine(script_of_seeds, capacity=capacity)
    return [c.trajectory("m", {}) for group in run(groups, engine) for c in group]


def test_a_conversation_does_not_depend_on_its_batch():
    alone = everything(1)
    assert len({len(talk.turns) for talk in alone}) > 2, "the script makes them differ"
    for capacity in (2, 5, 64):
        assert everything(capacity) == alone
    # Nor on which tasks stand beside it, or on how many conversations its task has.
    assert everything(8, tasks=3) == alone[:9]
    assert [t.turns for t in everything(8, n=1)] == [t.turns for t in alone[::3]]


def test_formats_are_drawn_by_seed():
    pool = load_formats()
    one = start(make_task(), make_team(), 200, Sampling(), pool)
    two = start(make_task(), make_team(), 10, Sampling(), dict(reversed(list(pool.items()))))
    other = start(make_task(), make_team(), 10, Sampling(seed=1), pool)
    names = [conversation.format for conversation in one]
    assert [c.format for c in two] == names[:10], "neither N nor the pool's order matters"
    assert [c.format for c in other] != names[:10]
    # 200 draws from 25 miss one with a chance of 25 · 0.96²⁰⁰ = 0.7 %; this seed misses none.
    assert {name for name, _ in names} == set(pool)
    assert all(pool[name] == text for name, text in names)
    assert one[0].request().messages[0]["content"].endswith(f"\n\n{names[0][1]}")
    assert start(make_task(), make_team(), 1, Sampling())[0].format is None


# -- many at once -----------------------------------------------------------------------------


def numbered(count: int, n: int, pulled: list[int] | None = None) -> Iterator[list[Conversation]]:
    for i in range(count):
        if pulled is not None:
            pulled.append(i)
        yield start(make_task(str(i)), make_team(), n, Sampling(max_turns=2))


@pytest.mark.parametrize("capacity", [1, 3, 8, 1000])
def test_groups_come_in_order_and_none_is_lost(capacity):
    """ReplayEngine finishes each batch in reverse; every third conversation is longer."""

    def script(request: Request) -> str:
        return "hm" if request.seed % 3 else "<A>x</A>"

    groups = list(run(numbered(20, 3), ReplayEngine(script, capacity=capacity)))
    ids = [c.id for group in groups for c in group]
    assert ids == [f"{i}#{k}" for i in range(20) for k in range(3)]
    assert all(c.end is not None for group in groups for c in group)


def test_a_late_first_group_holds_the_others_back_but_is_first():
    class LastFirst:
        """Answers the very first request only when nothing else is left."""

        name = "last-first"

        def count_tokens(self, text: str) -> int:
            return len(text.split())

        def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
            first, *rest = pull(4)
            while rest:
                for request in rest:
                    yield request, Completion("<A>x</A>", 1, "end")
                rest = list(pull(3))
            while first:
                yield first, Completion("<A>x</A>", 1, "end")
                (first,) = pull(1) or (None,)

    groups = list(run(numbered(6, 1), LastFirst()))  # type: ignore[arg-type]
    assert [c.id for (c,) in groups] == [f"{i}#0" for i in range(6)]


def test_running_conversations_go_first():
    """With one place, each of a group's three conversations is finished before the next begins:
    it has its prefix in the engine's cache."""
    engine = ReplayEngine(lambda request: "hm", capacity=1)
    (group,) = run(numbered(1, 3), engine)
    turns = [trajectory_seed(c.seed, str(k)) for c in group for k in range(2)]
    assert [request.seed for request in engine.requests] == turns


@pytest.mark.parametrize(
    ("capacity", "n", "groups"), [(1, 4, 1), (8, 4, 2), (9, 4, 3), (64, 1, 64)]
)
def test_no_more_groups_are_asked_for_than_are_needed(capacity, n, groups):
    """⌈capacity / n⌉ groups fill the engine; the first one is yielded before any more are read.

    Each conversation has one turn here, so that a batch finishes groups at once.
    """
    pulled: list[int] = []
    source = (
        start(c[0].task, c[0].team, n, Sampling(max_turns=1)) for c in numbered(10**6, n, pulled)
    )
    finished = run(source, ReplayEngine(lambda request: "hm", capacity=capacity))
    assert pulled == []
    assert [c.id for c in next(finished)] == [f"0#{k}" for k in range(n)]
    # With one slot, each of the n conversations was pulled from the one group.
    assert len(pulled) == groups
    next(finished)
    assert len(pulled) <= groups + 1


def test_an_engine_that_loses_a_turn_is_found_out():
    def lossy(pull: Pull, keep: Callable[[int], bool]) -> Iterator[tuple[Request, Completion]]:
        number = 0
        while batch := pull(4):
            for request in batch:
                number += 1
                if keep(number):
                    yield request, Completion("hm", 1, "end")

    class Lossy(ReplayEngine):
        def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
            return lossy(pull, lambda number: number != 5)

    with pytest.raises(RuntimeError, match="lost 1 of the turns"):
        list(run(numbered(4, 2), Lossy(lambda request: "")))


def test_failures_do_not_stop_the_others():
    def script(request: Request) -> Completion | str:
        if "1?" in request.messages[0]["content"]:
            return Completion("", 0, "error", "boom")
        return "<A>x</A>"

    groups = list(run(numbered(3, 2), ReplayEngine(script)))
    assert [[c.end for c in group] for group in groups] == [
        ["agreement"] * 2,
        ["engine_error"] * 2,
        ["agreement"] * 2,
    ]


def test_no_tasks_no_groups():
    assert list(run(iter([]), ReplayEngine(lambda request: "hm"))) == []


def test_built_in_limits_hold():
    """The relay team stops after 6 turns when nobody answers."""
    task = make_task()
    groups = iter([start(task, load_team("relay"), 1, Sampling())])
    ((conversation,),) = run(groups, ReplayEngine(lambda request: "hm"))
    assert (len(conversation.turns), conversation.end) == (6, "turn_limit")
