"""Load a team and render what one of its agents sees.

`view` is the only function that turns a task and the turns so far into messages. Generation,
scoring and training call it, so a prompt cannot differ between them (docs/fidelity.md, "views").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from optima_lite.answers import MARKS
from optima_lite.errors import InputError, TeamError
from optima_lite.records import Agent, Task, Team, Turn

#: A chat message, {"role": system|user|assistant, "content": text}.
Message = dict[str, str]

HERE = Path(__file__).parent
BUILT_IN = ("exchange", "relay", "solo")
PLACEHOLDERS = ("name", "partners", "question", "context", "choices")
# Not after a letter, so that the \boxed{answer} of a prompt is text.
_PLACEHOLDER = re.compile(r"(?<![A-Za-z])\{([a-z_]+)\}")


def load_team(name_or_path: str) -> Team:
    """A built-in team by name, or a team file (YAML) by path.

    Raises TeamError that lists everything wrong with the file at once.
    """
    path = HERE / f"{name_or_path}.yaml" if name_or_path in BUILT_IN else Path(name_or_path)
    if name_or_path not in BUILT_IN and path.suffix not in (".yaml", ".yml"):
        raise TeamError(
            f"no team {name_or_path!r}: built in are {', '.join(BUILT_IN)}; "
            "a file of yours ends in .yaml"
        )
    data = _read_yaml(path)
    if not isinstance(data, dict):
        raise TeamError(f"{path}: a team file is a mapping with name and agents")
    try:
        team = Team.from_dict(data)
    except InputError as error:
        raise TeamError(f"{path}: {error.reason}") from None
    problems = _problems(team)
    if problems:
        raise TeamError(f"{path}: {'; '.join(problems)}")
    return team


def load_formats(path: str | None = None) -> dict[str, str]:
    """The pool of format texts (name -> text), the built-in one by default."""
    source = Path(path) if path else HERE / "formats.yaml"
    data = _read_yaml(source)
    if (
        not isinstance(data, dict)
        or not data
        or not all(isinstance(k, str) and isinstance(v, str) and v.strip() for k, v in data.items())
    ):
        raise TeamError(f"{source}: a format pool is a mapping from a name to a text")
    return {name: text.strip() for name, text in data.items()}


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TeamError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise TeamError(f"{path}: nested too deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TeamError(f"{path}: not YAML: {reason}") from None


def _problems(team: Team) -> list[str]:
    names = [agent.name for agent in team.agents]
    found = []
    if not names:
        found.append("no agents")
    found += [f"two agents are named {n}" for n in sorted({n for n in names if names.count(n) > 1})]
    found += [f"{n!r} is no name" for n in names if not n.strip() or ":" in n or "\n" in n]
    # Records pass unknown fields on; in a file that a person wrote they are slips of the pen.
    found += [f"unknown key {key!r}" for key in team.extra]
    for agent in team.agents:
        found += [f"unknown key {key!r} of {agent.name}" for key in agent.extra]
        unknown = set(_PLACEHOLDER.findall(agent.prompt)) - set(PLACEHOLDERS)
        found += [f"{agent.name}'s prompt has an unknown {{{word}}}" for word in sorted(unknown)]
        if "{question}" not in agent.prompt:
            found.append(f"{agent.name}'s prompt never shows the {{question}}")
    if team.order is not None:
        found += [f"order names {n}, who is not an agent" for n in set(team.order) - set(names)]
        found += [f"{n} never speaks: add it to order" for n in names if n not in team.order]
    if team.answer_mark not in MARKS:
        found.append(f"answer_mark is {team.answer_mark!r}, not one of {', '.join(MARKS)}")
    if team.agreement is not None and not team.agreement >= 1:
        found.append("agreement must be at least 1")
    if team.agreement is not None and team.agreement > max(team.max_turns, 1):
        found.append(f"agreement of {team.agreement} answers needs more turns than max_turns")
    found += [
        f"{key} must be at least 1"
        for key in ("max_turns", "max_turn_tokens")
        if getattr(team, key) < 1
    ]
    return found


def check_fits(team: Team, task: Task) -> None:
    """Raise TeamError where the task's contexts do not match the agents.

    One context per agent; a team of one sees them all; a debate task has none.
    """
    if task.contexts and len(team.agents) not in (1, len(task.contexts)):
        raise TeamError(
            f"{task.id} is split for {len(task.contexts)} agents, but team {team.name} has "
            f"{len(team.agents)}: make the tasks with --agents {len(team.agents)}"
        )


def prompt_for(team: Team, task: Task, agent: Agent, format_text: str | None = None) -> str:
    """An agent's prompt about a task; `format_text` is appended in the initialization round.

    Substitution is one pass over the template: a question that contains `{context}` stays as it is.
    """
    index = team.agents.index(agent)
    if len(team.agents) == 1:
        paragraphs: Iterable[str] = (p for context in task.contexts for p in context)
    else:
        paragraphs = task.contexts[index] if task.contexts else ()
    values: Mapping[str, str] = {
        "name": agent.name,
        "partners": _join([a.name for a in team.agents if a.name != agent.name]),
        "question": task.question,
        "context": "\n".join(paragraphs),
        "choices": "\n".join(
            f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(task.choices or ())
        ),
    }
    unknown = set(_PLACEHOLDER.findall(agent.prompt)) - {*values}
    if unknown:  # in a record that others made; load_team refuses such a file
        raise TeamError(f"{agent.name}'s prompt has an unknown {{{min(unknown)}}}")
    prompt = _PLACEHOLDER.sub(lambda match: values[match[1]], agent.prompt).strip()
    return f"{prompt}\n\n{format_text}" if format_text else prompt


def view(
    team: Team,
    task: Task,
    agent: Agent,
    turns: Sequence[Turn],
    format_text: str | None = None,
) -> list[Message]:
    """The conversation as `agent` sees it: its prompt, then one message per turn.

    Its own turns are `assistant` messages as it said them; the others' are `user` messages that
    begin with the speaker's name.
    """
    messages = [{"role": "system", "content": prompt_for(team, task, agent, format_text)}]
    for turn in turns:
        if turn.agent == agent.name:
            messages.append({"role": "assistant", "content": turn.text})
        else:
            messages.append({"role": "user", "content": f"{turn.agent}: {turn.text}"})
    return messages


def _join(names: list[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
