"""The relay task, checked by a reader that knows English sentences and nothing of relay.py."""

from __future__ import annotations

import re
from itertools import islice

import orjson
import pytest

from optima_lite.errors import SettingError
from optima_lite.records import Task
from optima_lite.tasks import get
from optima_lite.tasks.relay import FAMILIES
from optima_lite.teams import check_fits, load_team

#: What a fact says, sentence by sentence: (pattern, kind of the object).
NAME = r"([A-Z]\w+(?: [A-Z]\w+)?)"
FACTS = [
    (rf"{NAME} was founded by {NAME}\.", "person"),
    (rf"The book {NAME} was written by {NAME}\.", "person"),
    (rf"The ship {NAME} is sailed by captain {NAME}\.", "person"),
    (rf"The painting {NAME} was made by {NAME}\.", "person"),
    (rf"The team {NAME} is coached by {NAME}\.", "person"),
    (rf"The river {NAME} flows into lake {NAME}\.", "lake"),
    (rf"Lake {NAME} lies in the district of {NAME}\.", "district"),
    (rf"The district of {NAME} is governed by {NAME}\.", "person"),
    (rf"{NAME} works with the assistant {NAME}\.", "person"),
    (rf"{NAME} was taught by {NAME}\.", "person"),
    (rf"{NAME} was born in {NAME}\.", "town"),
    (rf"{NAME} lives in {NAME}\.", "town"),
    (rf"{NAME} comes from {NAME}\.", "town"),
    (rf"{NAME} lies in the district of {NAME}\.", "district"),
]


def tasks(count: int, split: str = "train", agents: int = 2, seed: int = 0, **settings: str):
    made = get("relay").tasks(split=split, source=None, agents=agents, seed=seed, settings=settings)
    return list(islice(made, count))


def read(fact: str) -> tuple[str, str, str]:
    """Subject, object and the object's kind."""
    for pattern, kind in FACTS:
        if match := re.fullmatch(pattern, fact):
            return match[1], match[2], kind
    raise AssertionError(f"who says this? {fact}")


def wanted(question: str) -> tuple[str, str]:
    """The one named thing in a question, and the kind of answer it asks for."""
    (start,) = re.findall(r"(?<!^)\b[A-Z]\w+(?: [A-Z]\w+)*", question)
    first = question.split()[:3]
    kind = "person" if first[0] == "Who" else next(w for w in first if w in ("town", "district"))
    return start, kind


def solve(task: Task, facts: list[str]) -> tuple[str | None, int]:
    """Follow the facts from the question's name; (answer, facts used), None at a dead end."""
    known: dict[str, list[tuple[str, str]]] = {}
    for fact in facts:
        subject, object, kind = read(fact)
        known.setdefault(subject, []).append((object, kind))
    name, kind = wanted(task.question)
    here, used = "", 0
    while name in known:
        ((name, here),) = known[name]  # one way only: the answer is unique
        used += 1
    return (name if here == kind else None), used


SHAPES = [(2, 2), (3, 2), (3, 3), (2, 1), (3, 1)]


@pytest.mark.parametrize(("hops", "agents"), SHAPES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_gold_follows_from_the_facts_and_only_from_all_of_them(hops, agents, split):
    for task in tasks(60, split, agents, hops=str(hops)):
        assert len(task.contexts) == agents
        facts = [fact for context in task.contexts for fact in context]
        assert len(facts) == len(set(facts)) == hops * 4, "three distractors per hop"
        assert solve(task, facts) == (task.answers[0], hops)
        for context in task.contexts:
            assert solve(task, list(context))[1] < hops or agents == 1
        # Leaving out any fact of the chain loses the answer, leaving out another does not.
        chain = task.meta["chain"]
        for fact in facts:
            rest = [f for f in facts if f != fact]
            on_chain = read(fact)[0] in chain
            assert (solve(task, rest)[1] == hops) is not on_chain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hops", [2, 3])
def test_every_family_asks_what_it_answers(family, hops):
    for task in tasks(10, family=family, hops=str(hops)):
        assert task.meta["family"] == family
        assert solve(task, [f for c in task.contexts for f in c]) == (task.answers[0], hops)


def test_every_six_tasks_have_each_family_once():
    orders = set()
    for seed in range(3):
        drawn = [task.meta["family"] for task in tasks(60, seed=seed)]
        for start in range(0, 60, 6):
            assert sorted(drawn[start : start + 6]) == sorted(FAMILIES)
            orders.add(tuple(drawn[start : start + 6]))
    assert len(orders) > 20


@pytest.mark.parametrize(("hops", "agents"), [(2, 2), (3, 2), (3, 3)])
def test_no_agent_holds_the_whole_chain(hops, agents):
    for task in tasks(100, agents=agents, hops=str(hops)):
        chain = task.meta["chain"]
        for context in task.contexts:
            held = {read(fact)[0] for fact in context}
            assert held & set(chain), "everyone knows something that matters"
            assert not set(chain[:-1]) <= held


def test_each_hop_is_in_one_pair_of_hands():
    for task in tasks(50, agents=2, hops="3"):
        first, second = ({read(f)[0] for f in c} & set(task.meta["chain"]) for c in task.contexts)
        assert (len(first), len(second)) == (2, 1)


def words(made: list[Task]) -> set[str]:
    """Every word of every name, as it stands in the facts."""
    facts = (read(fact)[:2] for task in made for context in task.contexts for fact in context)
    return {word for pair in facts for name in pair for word in name.split()}


def test_train_and_test_share_no_word_of_any_name():
    """300 tasks of each split and each number of hops, two seeds."""
    train, test = (
        words([t for h in "23" for s in (0, 1) for t in tasks(300, split, seed=s, hops=h)])
        for split in ("train", "test")
    )
    assert len(train) > 5000
    assert len(test) > 5000
    assert train.isdisjoint(test)


def test_names_within_a_task_are_distinct_word_by_word():
    for task in tasks(100, hops="3", distractors="20"):
        chains = [task.meta["chain"], *task.meta["others"]]
        parts = [word for chain in chains for name in chain for word in name.split()]
        assert len(chains) == 21
        assert len(parts) == len(set(parts))


def test_a_task_depends_on_seed_split_and_index_alone():
    assert tasks(20) == tasks(40)[:20]
    assert tasks(3, seed=1) != tasks(3)
    assert [t.question for t in tasks(3, "test")] != [t.question for t in tasks(3)]
    # A known one, so that released files stay reproducible across versions and machines.
    first = tasks(1)[0]
    assert first.id == "relay/train/team2x3-0-0"
    assert first.question == "Who is the assistant of the coach of the team Gilton?"
    assert first.answers == ("Glaima Tandow",)


def test_ids_are_unique_across_settings():
    made = [
        task
        for split in ("train", "test")
        for seed in (0, 1, 10)
        for hops, agents in SHAPES
        for distractors in "03"
        for task in tasks(12, split, agents, seed, hops=str(hops), distractors=distractors)
    ]
    assert len({task.id for task in made}) == len(made)
    assert all(task.id.startswith("relay/") for task in made)


def test_one_id_is_one_task():
    """Asking for a family gives the same tasks that a mixed run draws of it."""
    mixed = {task.id: task for task in tasks(60)}
    for family in FAMILIES:
        shared = [task for task in tasks(60, family=family) if task.id in mixed]
        assert shared
        assert all(task == mixed[task.id] for task in shared)


def test_records_are_valid_and_fit_their_team():
    for task in tasks(20):
        assert Task.from_dict(orjson.loads(orjson.dumps(task.to_dict()))) == task
        assert (task.setting, task.metric, task.team) == ("exchange", "exact", "relay")
        check_fits(load_team(task.team), task)


def test_distractors():
    (task,) = tasks(1, distractors="0")
    assert [len(context) for context in task.contexts] == [1, 1]
    (task,) = tasks(1, distractors="6")
    assert [len(context) for context in task.contexts] == [7, 7]


def test_facts_are_shuffled():
    """The fact that matters is not always at the same place: 4 places, 60 tasks."""
    places = {[read(f)[0] for f in t.contexts[0]].index(t.meta["chain"][0]) for t in tasks(60)}
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hops": "4"}, "hops is a whole number from 2 to 3, not '4'"),
        ({"hops": "1"}, "hops is a whole number from 2 to 3, not '1'"),
        ({"hops": "two"}, "hops is a whole number from 2 to 3, not 'two'"),
        ({"hops": "²"}, "hops is a whole number from 2 to 3, not '²'"),
        ({"hops": ""}, "hops is a whole number"),
        ({"distractors": "-1"}, "distractors is a whole number from 0 to 20, not '-1'"),
        ({"distractors": "21"}, "distractors is a whole number from 0 to 20, not '21'"),
        ({"family": "moon"}, "family is one of company, book, ship, painting, river, team"),
        ({"agents": 3}, "2 hops can be split for at most 2 agents, not 3"),
        ({"agents": 4, "hops": "3"}, "3 hops can be split for at most 3 agents, not 4"),
        ({"split": "dev"}, "split is one of train, test, not 'dev'"),
    ],
)
def test_settings_are_checked(kwargs, message):
    with pytest.raises(SettingError) as caught:
        tasks(1, **kwargs)
    assert message in str(caught.value)


def test_there_is_no_source():
    with pytest.raises(SettingError, match="--source does not apply"):
        next(get("relay").tasks(split="train", source="x", agents=2, seed=0, settings={}))
