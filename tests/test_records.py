"""Records: round trips, foreign fields, and messages that say where a record is wrong."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any

import orjson
import pytest

from optima_lite.errors import InputError
from optima_lite.records import (
    KINDS,
    Agent,
    Example,
    Leaf,
    Node,
    Pair,
    Record,
    Score,
    Task,
    Team,
    Trajectory,
    Tree,
    Turn,
)

TASK = {
    "id": "relay/train/x-0",
    "setting": "exchange",
    "question": "In which town was the founder of Orvane born?",
    "answers": ["Quelby", "the town of Quelby"],
    "metric": "exact",
    "contexts": [["Orvane was founded by Tilda Marsk."], ["Tilda Marsk was born in Quelby.", "…"]],
    "choices": ["Quelby", "Zorford"],
    "team": "relay",
    "meta": {"hops": 2, "chain": ["Orvane", "Tilda Marsk", "Quelby"], "share": 0.5, "none": None},
}
AGENT = {"name": "Alice", "prompt": "You are {name}. {question}", "role": "solver"}
TEAM = {
    "name": "pair",
    "agents": [AGENT, {"name": "Bob", "prompt": "{question}"}],
    "order": ["Bob", "Alice"],
    "answer_mark": "boxed",
    "agreement": 2,
    "max_turns": 4,
    "max_turn_tokens": 33,
}
TURN = {"agent": "Alice", "text": "Tilda <A>Quelby</A>", "tokens": 5, "stop": "end"}
SCORE = {
    "task": 1.0,
    "tokens": 0.5,
    "losses": [2.5, None],
    "loss": 2.5,
    "degenerate": False,
    "lambda_token": 0.6,
    "lambda_loss": 1.0,
    "base": "smollm2",
    "loss_context": "none",
}
TRAJECTORY = {
    "id": "relay/train/x-0#3",
    "task": TASK,
    "team": TEAM,
    "turns": [TURN, {"agent": "Bob", "text": "", "tokens": 0, "stop": "length"}],
    "end": "turn_cut",
    "agreed": False,
    "tokens": 5,
    "answer": None,
    "model": "smollm2",
    "seed": 2**63 - 1,
    "settings": {"n": 4, "temperature": 0.7, "context": None},
    "format": "json",
    "error": "no",
    "reward": 1.1,
    "score": SCORE,
}
EXAMPLE = {
    "messages": [
        {"role": "system", "content": "You are Alice."},
        {"role": "user", "content": "Bob: hm", "name": "Bob"},
        {"role": "assistant", "content": "ah"},
    ],
    "agent": "Alice",
    "trajectory_id": "relay/train/x-0#3",
    "reward": 1.1,
}
ROOT = {
    **{"parent": None, "agent": "", "text": "", "tokens": 0, "stop": "end"},
    **{"loss": None, "visits": 1, "value": 0.7},
}
NODE = {**TURN, "parent": 0, "loss": 2.5, "visits": 1, "value": 0.7}
LEAF = {
    **{"node": 1, "end": "agreement", "answer": "Quelby", "tokens": 5, "reward": 0.7},
    **{"task": 1.0, "loss": 2.5, "degenerate": False},
}
TREE = {
    "id": "relay/train/x-0",
    "task": TASK,
    "team": TEAM,
    "nodes": [ROOT, NODE],
    "trajectories": [LEAF],
    "expanded": [0],
    "model": "smollm2",
    "base": "smollm2",
    "seed": 7,
    "settings": {"iterations": 1},
}
PAIR = {
    "prompt": EXAMPLE["messages"][:2],
    "chosen": [{"role": "assistant", "content": "ah"}],
    "rejected": [{"role": "assistant", "content": "oh"}],
    "agent": "Alice",
    "task_id": "relay/train/x-0",
    **{"node": 0, "chosen_node": 1, "rejected_node": 2},
    **{"chosen_value": 0.9, "rejected_value": 0.1, "chosen_visits": 2, "rejected_visits": 1},
}
#: One complete object for each kind, every field set.
FULL: dict[type[Record], dict[str, Any]] = {
    Task: TASK,
    Agent: AGENT,
    Team: TEAM,
    Turn: TURN,
    Score: SCORE,
    Trajectory: TRAJECTORY,
    Example: EXAMPLE,
    Node: NODE,
    Leaf: LEAF,
    Tree: TREE,
    Pair: PAIR,
}
each_kind = pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.__name__)


def through(kind: type[Record], data: dict[str, Any]) -> dict[str, Any]:
    """The record's way through a pipe: bytes, object, bytes, object."""
    return orjson.loads(orjson.dumps(kind.from_dict(orjson.loads(orjson.dumps(data))).to_dict()))


def test_every_kind_is_tested():
    assert set(FULL) == set(KINDS)
    for kind, data in FULL.items():
        assert {f.name for f in dataclasses.fields(kind)} - {"extra"} == set(data), kind


@each_kind
def test_round_trip(kind):
    assert through(kind, FULL[kind]) == FULL[kind]
    assert kind.from_dict(through(kind, FULL[kind])) == kind.from_dict(FULL[kind])


@each_kind
def test_every_field_is_documented(kind):
    for field in dataclasses.fields(kind):
        assert field.metadata["doc"], field.name


def test_unset_optional_fields_are_left_out_but_required_nulls_stay():
    data = {k: v for k, v in TRAJECTORY.items() if k not in ("format", "error", "reward", "score")}
    out = through(Trajectory, data)
    assert out == data
    assert "answer" in out  # null says: nothing was marked
    assert out["answer"] is None
    assert through(Trajectory, data | {"format": None}) == data


def test_unknown_fields_pass_through_at_every_level():
    """A mark at each level, one of them called `extra`, the name our own field has."""
    data = deepcopy(TRAJECTORY)
    places = [
        data,
        data["task"],
        data["task"]["meta"],
        data["team"],
        *data["team"]["agents"],
        *data["turns"],
        data["score"],
        data["settings"],
    ]
    for i, place in enumerate(places):
        place["zz_mine"] = {"at": [i, None]}
        place["extra"] = f"own {i}"
    assert through(Trajectory, data) == data
    record = Trajectory.from_dict(data)
    assert record.turns[1].extra == {"zz_mine": {"at": [7, None]}, "extra": "own 7"}

    example = deepcopy(EXAMPLE) | {"tag": 1}
    example["messages"][0]["weight"] = 0
    assert through(Example, example) == example


@each_kind
def test_missing_fields_are_named(kind):
    for field in dataclasses.fields(kind):
        if field.name == "extra":
            continue
        data = {k: v for k, v in FULL[kind].items() if k != field.name}
        optional = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if optional and (kind, field.name) != (Task, "contexts"):  # exchange needs them
            kind.from_dict(data)
        else:
            with pytest.raises(InputError, match=f'"{field.name}"'):
                kind.from_dict(data)


def changed(path: str, value: Any) -> dict[str, Any]:
    """TRAJECTORY with the value at a path like `turns.0.text` replaced."""
    data = deepcopy(TRAJECTORY)
    *parents, last = path.split(".")
    place: Any = data
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("id", 7, '"id" must be text, found a whole number'),
        ("id", None, '"id" must be text, found null'),
        ("agreed", "yes", '"agreed" must be true/false, found text'),
        ("agreed", 1, '"agreed" must be true/false, found a whole number'),
        ("tokens", True, '"tokens" must be a whole number, found true/false'),
        ("tokens", 3.5, '"tokens" must be a whole number, found a number'),
        ("tokens", "3", '"tokens" must be a whole number, found text'),
        ("reward", "1", '"reward" must be a number, found text'),
        ("reward", True, '"reward" must be a number, found true/false'),
        ("turns", {}, '"turns" must be a list, found an object'),
        ("turns", None, '"turns" must be a list, found null'),
        ("settings", [], '"settings" must be an object, found a list'),
        ("turns.1", "hi", "in turns[1]: expected a JSON object, found text"),
        ("turns.0.text", None, 'in turns[0]: "text" must be text, found null'),
        ("turns.1.stop", "eos", "in turns[1]: \"stop\" is 'eos', not one of end, length"),
        ("turns.1.tokens", -1, 'in turns[1]: "tokens" is negative'),
        ("turns.1.agent", "Carol", "\"turns[1].agent\" is 'Carol', who is not in the team"),
        ("task", [], "in task: expected a JSON object, found a list"),
        ("task.answers", "Quelby", 'in task: "answers" must be a list, found text'),
        ("task.answers.1", 4, 'in task: "answers[1]" must be text, found a whole number'),
        ("task.contexts.1", "x", 'in task: "contexts[1]" must be a list, found text'),
        ("task.contexts.1.0", 1, 'in task: "contexts[1][0]" must be text, found a whole number'),
        ("task.setting", "quiz", "in task: \"setting\" is 'quiz', not one of exchange, debate"),
        ("team.agents.0.name", 1, 'in team: in agents[0]: "name" must be text'),
        ("team.order.0", 1, 'in team: "order[0]" must be text'),
        ("score.losses.0", "2", 'in score: "losses[0]" must be a number, found text'),
        ("end", "done", "\"end\" is 'done', not one of agreement, turn_limit, turn_cut"),
    ],
)
def test_wrong_values_are_named_with_their_path(path, value, message):
    with pytest.raises(InputError) as caught:
        Trajectory.from_dict(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [[], "x", 1, None, True])
def test_only_objects_are_records(data):
    with pytest.raises(InputError, match="expected a JSON object"):
        Task.from_dict(data)


def test_whole_numbers_are_numbers():
    record = Trajectory.from_dict(TRAJECTORY | {"reward": 1})
    assert type(record.reward) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, '"answers" needs at least one answer'),
        ({"answers": ["a", "  "]}, "none of them empty"),
        ({"question": " \n"}, '"question" is empty'),
        ({"contexts": []}, '"contexts" is empty, but the setting is exchange'),
    ],
)
def test_task_checks(change, message):
    with pytest.raises(InputError) as caught:
        Task.from_dict(TASK | change)
    assert message in str(caught.value)


def test_a_debate_task_needs_no_contexts():
    assert Task.from_dict(TASK | {"setting": "debate", "contexts": []}).contexts == ()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, '"messages[1].role" is missing or not text'),
        ({"role": "user"}, '"messages[1].content" is missing or not text'),
        ({"role": "user", "content": ["x"]}, '"messages[1].content" is missing or not text'),
        ({"role": "tool", "content": "x"}, "\"messages[1].role\" is 'tool'"),
    ],
)
def test_example_checks(message, said):
    data = EXAMPLE | {"messages": [EXAMPLE["messages"][0], message]}
    with pytest.raises(InputError) as caught:
        Example.from_dict(data)
    assert said in str(caught.value)


def test_an_example_without_a_turn_is_none():
    for content in ("", " \n"):
        message = {"role": "assistant", "content": content}
        with pytest.raises(InputError, match="this would train nothing"):
            Example.from_dict(EXAMPLE | {"messages": [EXAMPLE["messages"][0], message]})


OH = {"role": "assistant", "content": "oh"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rejected": [OH, OH, OH]}, '"rejected" must be one message, of the role assistant'),
        ({"chosen": [{**OH, "role": "user"}]}, '"chosen" must be one message'),
        ({"chosen": []}, '"chosen" is empty'),
        ({"chosen": [{**OH, "content": " \n"}]}, '"chosen" is a turn without text'),
        ({"chosen": [{**OH, "content": " oh\n"}]}, '"chosen" and "rejected" are the same turn'),
        ({"prompt": [{**OH, "role": "tool"}]}, "\"prompt[0].role\" is 'tool'"),
        ({"prompt": [{"role": "user"}]}, '"prompt[0]" needs role and content'),
    ],
)
def test_pair_checks(change, said):
    with pytest.raises(InputError) as caught:
        Pair.from_dict(PAIR | change)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "other"}, "\"id\" is 'other', but the task is 'relay/train/x-0'"),
        ({"nodes": [NODE]}, '"nodes" must begin with the root'),
        ({"nodes": [ROOT, {**NODE, "parent": 1}]}, '"nodes[1].parent" must be an earlier node'),
        ({"nodes": [ROOT, {**NODE, "visits": -1}]}, 'in nodes[1]: "tokens" or "visits"'),
        ({"nodes": [ROOT, {**NODE, "agent": "Eve"}]}, "'Eve', who is not in the team"),
        (
            {"nodes": [ROOT, NODE, {**NODE, "agent": "Bob"}]},
            "\"nodes[2].agent\" is 'Bob', but a sibling is by 'Alice'",
        ),
        ({"trajectories": [{**LEAF, "node": 2}]}, '"trajectories[0].node" is no node'),
    ],
)
def test_tree_checks(change, said):
    with pytest.raises(InputError) as caught:
        Tree.from_dict(TREE | change)
    assert said in str(caught.value)


def test_messages_must_be_objects():
    with pytest.raises(InputError, match=r'"messages\[0\]" must be an object, found text'):
        Example.from_dict(EXAMPLE | {"messages": ["hello"]})


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Task.from_dict(TASK).id = "other"  # type: ignore[misc]
