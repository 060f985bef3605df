"""Team files, and the one function that renders what an agent sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from optima_lite import dialogue
from optima_lite.engines.replay import ReplayEngine
from optima_lite.errors import TeamError
from optima_lite.records import Agent, Task, Team, Turn
from optima_lite.selection import examples
from optima_lite.tasks.relay import Relay
from optima_lite.teams import BUILT_IN, check_fits, load_formats, load_team, prompt_for, view
from optima_lite.teams import team as team_module

TRIO = """\
name: trio
order: [Carol, Alice, Bob]
answer_mark: boxed
agreement: 2
max_turns: 7
agents:
  - name: Alice
    role: chair
    prompt: &p |
      {name}, with {partners}: {question}
      {context}
      Write \\boxed{answer}.
  - {name: Bob, prompt: *p}
  - {name: Carol, prompt: *p}
"""


def write(tmp_path: Path, text: str, name: str = "team.yaml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def make_task(agents: int = 2, **fields) -> Task:
    values = {
        "id": "t",
        "setting": "exchange",
        "question": "Who?",
        "answers": ("so",),
        "metric": "f1",
        "contexts": tuple((f"Fact {i}a.", f"Fact {i}b.") for i in range(agents)),
    }
    return Task(**{**values, **fields})


# -- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_teams_load_and_render(name):
    team = load_team(name)
    assert team.name == name
    assert not team.extra, "a misspelt key would pass through unnoticed"
    task = make_task(len(team.agents), question="Is it so?")
    check_fits(team, task)
    for agent in team.agents:
        assert not agent.extra
        prompt = prompt_for(team, task, agent)
        assert "Is it so?" in prompt
        assert "Fact" in prompt
        assert "<A>answer</A>" in prompt
        assert "{" not in prompt
        assert agent.name in prompt or len(team.agents) == 1
        for other in team.agents:
            assert (other.name in prompt) or other is agent


def test_every_file_in_the_package_is_listed():
    files = {path.stem for path in team_module.HERE.glob("*.yaml")} - {"formats"}
    assert files == set(BUILT_IN)


def test_a_custom_team(tmp_path):
    team = load_team(write(tmp_path, TRIO))
    assert team.order == ("Carol", "Alice", "Bob")
    assert (team.answer_mark, team.agreement, team.max_turns) == ("boxed", 2, 7)
    assert team.agents[0].role == "chair"
    assert Team.from_dict(team_as_read(team)) == team


def team_as_read(team: Team) -> dict:
    return orjson.loads(orjson.dumps(team.to_dict()))


def test_all_problems_are_reported_together(tmp_path):
    text = """\
name: bad
answer_mark: stars
agreement: 0
max_turns: 0
order: [Alice, Zoe]
agents:
  - {name: Alice, prompt: "no q, {contexts} and {nam}"}
  - {name: Alice, prompt: "{question}"}
  - {name: "B:b", prompt: "{question}"}
"""
    with pytest.raises(TeamError) as caught:
        load_team(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/team.yaml: ")
    for part in (
        "two agents are named Alice",
        "'B:b' is no name",
        "Alice's prompt has an unknown {contexts}",
        "Alice's prompt has an unknown {nam}",
        "Alice's prompt never shows the {question}",
        "order names Zoe, who is not an agent",
        "B:b never speaks: add it to order",
        "answer_mark is 'stars', not one of tag, boxed",
        "agreement must be at least 1",
        "max_turns must be at least 1",
    ):
        assert part in message, part
    assert "max_turn_tokens" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "a team file is a mapping"),
        ("name: x", 'missing "agents"'),
        ("name: x\nagents: []", "no agents"),
        ("name: x\nagents: [{name: A}]", 'in agents[0]: missing "prompt"'),
        ("name: x\nagents: {}\n", '"agents" must be a list, found an object'),
        ("name: x\nmax_turns: many\nagents: []", '"max_turns" must be a whole number, found text'),
        ("name: [x", "not YAML"),
        ("name: x\nagents: [{name: '', prompt: '{question}'}]", "'' is no name"),
    ],
)
def test_one_line_for_each_kind_of_mistake(tmp_path, text, message):
    with pytest.raises(TeamError) as caught:
        load_team(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(TeamError, match=r"no team 'exchang': built in are exchange, relay, solo"):
        load_team("exchang")
    with pytest.raises(TeamError, match=r"none\.yaml: No such file"):
        load_team(str(tmp_path / "none.yaml"))


def test_the_format_pool():
    """Optima asks for more than 20 formats, Section 3.2."""
    formats = load_formats()
    assert len(formats) >= 20
    assert len(set(formats.values())) == len(formats)
    assert all(text == text.strip() and "\n" not in text for text in formats.values())


def test_a_pool_of_ones_own(tmp_path):
    assert load_formats(write(tmp_path, "loud: ' Shout. '\n")) == {"loud": "Shout."}
    for text in ("[a]", "{}", "a: ''", "a: 1", "1: a"):
        with pytest.raises(TeamError, match="a format pool is a mapping"):
            load_formats(write(tmp_path, text))


# -- rendering --------------------------------------------------------------------------------


def render(prompt: str, agents: int = 2, **fields) -> str:
    names = ("Alice", "Bob", "Carol")[:agents]
    team = Team("x", tuple(Agent(name, prompt) for name in names))
    return prompt_for(team, make_task(agents, **fields), team.agents[0])


@pytest.mark.parametrize(
    "question",
    ["{context}", "$name ${name}", "{{", "{{context}}", "{name}", r"\1 \g<0>", "%s", "<|im_end|>"],
)
def test_substitution_is_one_pass(question):
    """What a question or a paragraph holds is text, whatever it looks like."""
    said = render(
        "[{question}|{context}|{name}]", question=question, contexts=((question,), ("x",))
    )
    assert said == f"[{question}|{question}|Alice]"


def test_all_placeholders():
    prompt = "{name}/{partners}/{question}/{context}/{choices}"
    assert render(prompt, choices=("red", "blue")) == (
        "Alice/Bob/Who?/Fact 0a.\nFact 0b./A. red\nB. blue"
    )
    assert render("{partners}", agents=1) == ""
    assert render("{partners}", agents=3) == "Bob and Carol"
    assert render(r"\boxed{answer} {question}") == r"\boxed{answer} Who?"
    assert render("{{question}}") == "{Who?}"


def test_one_agent_sees_all_contexts_in_order():
    team = Team("solo", (Agent("S", "{context}"),))
    assert prompt_for(team, make_task(3), team.agents[0]) == (
        "Fact 0a.\nFact 0b.\nFact 1a.\nFact 1b.\nFact 2a.\nFact 2b."
    )


def test_partners_are_the_others_by_name():
    """The agent may come from another copy of the team, as one read from a file does."""
    team = load_team("relay")
    copy = Team.from_dict(team_as_read(team))
    assert prompt_for(team, make_task(), copy.agents[1]) == (
        prompt_for(team, make_task(), team.agents[1])
    )


def test_the_format_text_comes_last():
    team = load_team("relay")
    plain = prompt_for(team, make_task(), team.agents[0])
    assert prompt_for(team, make_task(), team.agents[0], "As JSON.") == f"{plain}\n\nAs JSON."


def test_view():
    team = load_team("relay")
    turns = [Turn("Alice", "one\ntwo", 2, "end"), Turn("Bob", "Alice: no", 2, "end")]
    prompt = {"role": "system", "content": prompt_for(team, make_task(), team.agents[0])}
    assert view(team, make_task(), team.agents[0], turns) == [
        prompt,
        {"role": "assistant", "content": "one\ntwo"},
        {"role": "user", "content": "Bob: Alice: no"},
    ]
    assert view(team, make_task(), team.agents[0], []) == [prompt]


@pytest.mark.parametrize(("agents", "contexts", "fits"), [
    (2, 2, True), (1, 2, True), (3, 3, True), (2, 0, True), (2, 3, False), (3, 2, False),
    (2, 1, False),
])  # fmt: skip
def test_check_fits(agents, contexts, fits):
    team = Team("x", tuple(Agent(n, "{question}") for n in "ABC"[:agents]))
    task = make_task(contexts, setting="exchange" if contexts else "debate")
    if fits:
        check_fits(team, task)
    else:
        with pytest.raises(TeamError) as caught:
            check_fits(team, task)
        assert str(caught.value) == (
            f"t is split for {contexts} agents, but team x has {agents}: "
            f"make the tasks with --agents {agents}"
        )


@pytest.mark.parametrize("name", ["relay", "exchange", "solo", "trio"])
@pytest.mark.parametrize("formats", [None, {"json": "Write JSON."}], ids=["plain", "formats"])
def test_what_was_seen_is_what_is_trained(tmp_path, name, formats):
    """Each request's messages, byte for byte, are what stands before that turn in its agent's
    example; with a format, up to the format text at the end of the prompt."""
    team = load_team(write(tmp_path, TRIO) if name == "trio" else name)
    agents = len(team.agents)
    task = next(Relay().tasks(split="train", agents=agents, settings={"hops": "3"}))
    task = replace(task, question="Where is {context} of $name, {{x}}?")
    engine = ReplayEngine(lambda request: f"say {len(request.messages)} of {request.seed % 97}")
    sampling = dialogue.Sampling(max_turns=2 * agents + 1)
    groups = [dialogue.start(task, team, 3, sampling, formats)]
    (group,) = dialogue.run(iter(groups), engine)
    seen = {request.seed: request.messages for request in engine.requests}
    checked = 0
    for conversation in group:
        trajectory = conversation.trajectory("replay", {})
        assert trajectory.end == "turn_limit"
        made = {example.agent: list(example.messages) for example in examples(trajectory)}
        own = dict.fromkeys(made, 0)
        for k, turn in enumerate(trajectory.turns):
            messages = made[turn.agent]
            answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            at = answers[own[turn.agent]]
            own[turn.agent] += 1
            asked = seen[dialogue.trajectory_seed(trajectory.seed, str(k))]
            if formats:
                prompt = asked[0]["content"].removesuffix("\n\nWrite JSON.")
                assert prompt != asked[0]["content"]
                asked = [{"role": "system", "content": prompt}, *asked[1:]]
            assert asked == messages[:at]
            assert messages[at] == {"role": "assistant", "content": turn.text}
            checked += 1
        assert own == {a: sum(m["role"] == "assistant" for m in ms) for a, ms in made.items()}, (
            "no turn is trained that was not generated"
        )
    assert checked == 3 * (2 * agents + 1) == len(engine.requests)


def test_misspelt_keys_of_a_team_file_are_named(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(
        "name: x\nmax_turn: 3\nagents:\n- {name: A, prompt: '{question}', roll: critic}\n"
    )
    with pytest.raises(TeamError, match=r"unknown key 'max_turn'; unknown key 'roll' of A"):
        load_team(str(file))
