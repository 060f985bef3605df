"""The records that flow between commands: one JSON object a line, one dataclass a kind.

These classes are the single definition; docs/records.md is generated from them. Every record is
self-contained (a trajectory embeds its task and its team), so a pipe needs no side files. Fields
that a class does not know are kept in `extra` and written back, at every level.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from optima_lite.errors import InputError

R = TypeVar("R", bound="Record")

SETTINGS = ("exchange", "debate")
METRICS = ("f1", "exact")
ROLES = ("system", "user", "assistant")
#: How a conversation can end; only the first two are whole conversations.
ENDS = ("agreement", "turn_limit", "turn_cut", "context_full", "engine_error")
WHOLE_ENDS = ("agreement", "turn_limit")
#: Why a turn stopped: the model ended it, its token limit, the context window, an engine failure.
STOPS = ("end", "length", "context", "error")


def doc(text: str, **kwargs: Any) -> Any:
    """A dataclass field with its line of documentation."""
    return field(metadata={"doc": text}, **kwargs)


@dataclass(frozen=True)
class Record:
    """Conversion between dataclasses and JSON objects, checked field by field."""

    @classmethod
    def from_dict(cls: type[R], data: Any) -> R:
        """Build a record from a decoded JSON object.

        Raises InputError naming the field (as a path such as `turns[2].text`) that is missing or
        has the wrong type.
        """
        if not isinstance(data, dict):
            raise InputError(f"expected a JSON object, found {_kind(data)}")
        known: dict[str, Any] = {}
        hints = _hints(cls)
        for f in dataclasses.fields(cls):
            if f.name == "extra":
                continue
            if f.name in data:
                known[f.name] = _convert(data[f.name], hints[f.name], f.name)
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise InputError(f'missing "{f.name}"')
        # A foreign field may itself be called "extra".
        rest = {k: v for k, v in data.items() if k not in hints or k == "extra"}
        record = cls(**known, extra=rest)  # type: ignore[call-arg]
        record.check()
        return record

    def check(self) -> None:
        """Raise InputError where values are of the right type but make no sense."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this record; optional fields that are unset (None) are left out."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "extra" or (value is None and f.default is None):
                continue
            out[f.name] = _plain(value)
        out.update(self.extra)  # type: ignore[attr-defined]
        return out


def _extra() -> Any:
    return doc("fields of other tools, passed through", default_factory=dict)


@dataclass(frozen=True)
class Task(Record):
    """A question with its gold answers and, in the exchange setting, each agent's share of text."""

    id: str = doc("`dataset/split/native-id`, unique in a file")
    setting: str = doc("`exchange` (each agent holds a part of the context) or `debate`")
    question: str = doc("the question, as the agents read it")
    answers: tuple[str, ...] = doc("accepted answers (aliases), at least one")
    metric: str = doc("how an answer is scored: `f1` or `exact`")
    contexts: tuple[tuple[str, ...], ...] = doc(
        "one list of paragraphs per agent; empty in debate", default=()
    )
    choices: tuple[str, ...] | None = doc("options of a multiple-choice question", default=None)
    team: str | None = doc(
        "the team used when `--team` is not given (else: `setting`)", default=None
    )
    meta: dict[str, Any] = doc("whatever the dataset tells about the row", default_factory=dict)
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.setting not in SETTINGS:
            raise InputError(f'"setting" is {self.setting!r}, not one of {", ".join(SETTINGS)}')
        if not self.id.strip():
            raise InputError('"id" is empty')
        if self.metric not in METRICS:
            raise InputError(f'"metric" is {self.metric!r}, not one of {", ".join(METRICS)}')
        if not self.answers or not all(a.strip() for a in self.answers):
            raise InputError('"answers" needs at least one answer, none of them empty')
        if not self.question.strip():
            raise InputError('"question" is empty')
        if self.setting == "exchange" and not any(self.contexts):
            raise InputError('"contexts" is empty, but the setting is exchange')


@dataclass(frozen=True)
class Agent(Record):
    """One speaker: a name and the prompt that tells it what to do."""

    name: str = doc("how the others see it (`NAME: text`)")
    prompt: str = doc(
        "prompt template over `{name}` `{partners}` `{question}` `{context}` `{choices}`"
    )
    role: str | None = doc("a word for people: solver, critic, …", default=None)
    extra: dict[str, Any] = _extra()


@dataclass(frozen=True)
class Team(Record):
    """Who talks, in which order, how an answer is marked, and when the talk ends."""

    name: str = doc("the team's name")
    agents: tuple[Agent, ...] = doc("the agents; they speak in `order`")
    order: tuple[str, ...] | None = doc(
        "names in speaking order, repeated until the end (default: as listed)", default=None
    )
    answer_mark: str = doc(
        "`tag` for `<A>answer</A>`, `boxed` for `\\boxed{answer}`", default="tag"
    )
    agreement: int | None = doc(
        "the talk ends when the last so many marked answers are equal (default: all agents)",
        default=None,
    )
    max_turns: int = doc("turn limit", default=10)
    max_turn_tokens: int = doc("token limit of one turn", default=256)
    extra: dict[str, Any] = _extra()


@dataclass(frozen=True)
class Turn(Record):
    """One message of one agent."""

    agent: str = doc("the speaker's name")
    text: str = doc("what it said, stripped")
    tokens: int = doc("tokens of `text` by the speaker's tokenizer, without end-of-turn")
    stop: str = doc("`end`, `length` (token limit), `context` (window full) or `error`")
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.stop not in STOPS:
            raise InputError(f'"stop" is {self.stop!r}, not one of {", ".join(STOPS)}')
        if self.tokens < 0:
            raise InputError('"tokens" is negative')


@dataclass(frozen=True)
class Score(Record):
    """The parts of the reward, Eq. 1, and the weights that joined them."""

    task: float = doc("R_task in [0, 1]: the metric of the final answer")
    tokens: float = doc("R_token in [0, 1]: tokens / the most tokens in the task's group")
    losses: tuple[float | None, ...] = doc(
        "per turn: mean negative log-likelihood per token (nats) under the base model; "
        "null for a turn without text"
    )
    loss: float | None = doc("R_loss: the largest of `losses`; null where there is none")
    degenerate: bool = doc("an agent spoke for another or said nothing: reward floor")
    lambda_token: float = doc("weight of R_token")
    lambda_loss: float = doc("weight of 1 / R_loss")
    base: str = doc("the model whose losses these are")
    loss_context: str = doc("`none`: each turn on its own; `dialogue`: after the turns before it")
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if any(loss is not None and loss < 0 for loss in self.losses):
            raise InputError('"losses" has a negative one')


@dataclass(frozen=True)
class Trajectory(Record):
    """One conversation of a team about a task."""

    id: str = doc("`task-id#k`, k = 0 … N−1 within the task's group")
    task: Task = doc("the task, whole")
    team: Team = doc("the team, whole")
    turns: tuple[Turn, ...] = doc("what was said, in order")
    end: str = doc("`agreement`, `turn_limit`, `turn_cut`, `context_full` or `engine_error`")
    agreed: bool = doc("whether the agents marked the same answer")
    tokens: int = doc("tokens of all turns, without the prompts")
    answer: str | None = doc("the last marked answer; null when none was marked (invalid)")
    model: str = doc("what generated it")
    seed: int = doc("the trajectory's own seed, derived from the run's seed and `id`")
    settings: dict[str, Any] = doc(
        "the run's settings that shape the text; `--resume` compares them", default_factory=dict
    )
    format: str | None = doc("name of the format text in its prompt (round 0 only)", default=None)
    error: str | None = doc("what failed, when `end` is engine_error", default=None)
    reward: float | None = doc("Eq. 1, written by score", default=None)
    score: Score | None = doc("the reward's parts, written by score", default=None)
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.end not in ENDS:
            raise InputError(f'"end" is {self.end!r}, not one of {", ".join(ENDS)}')
        if self.tokens < 0:
            raise InputError('"tokens" is negative')
        names = {agent.name for agent in self.team.agents}
        for i, turn in enumerate(self.turns):
            if turn.agent not in names:
                raise InputError(f'"turns[{i}].agent" is {turn.agent!r}, who is not in the team')


@dataclass(frozen=True)
class Example(Record):
    """One agent's view of a selected conversation: an SFT example in TRL's conversational format.

    Every `assistant` message is trained, nothing else is. Only `messages` is needed for training.
    """

    messages: tuple[dict[str, Any], ...] = doc("`[{role, content}]`: system, user, assistant, …")
    agent: str = doc("whose view it is", default="")
    trajectory_id: str = doc("where it comes from", default="")
    reward: float | None = doc("the trajectory's reward", default=None)
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        for i, message in enumerate(self.messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InputError(f'"messages[{i}].{key}" is missing or not text')
            if message["role"] not in ROLES:
                raise InputError(f'"messages[{i}].role" is {message["role"]!r}')
        if not any(m["role"] == "assistant" and m["content"].strip() for m in self.messages):
            raise InputError("no assistant message with text: this would train nothing")


@dataclass(frozen=True)
class Node(Record):
    """A turn in a conversation tree. Node 0 is the root: no turn has been said."""

    parent: int | None = doc("index of the node before it; null for the root")
    agent: str = doc("who said it; empty for the root")
    text: str = doc("what was said, stripped")
    tokens: int = doc("tokens of `text`")
    stop: str = doc("as in turns")
    loss: float | None = doc("its loss under the base model (nats a token); null without text")
    visits: int = doc("how many of the tree's conversations go through it")
    value: float = doc("mean reward of these conversations")
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.stop not in STOPS:
            raise InputError(f'"stop" is {self.stop!r}, not one of {", ".join(STOPS)}')
        if self.tokens < 0 or self.visits < 0:
            raise InputError('"tokens" or "visits" is negative')


@dataclass(frozen=True)
class Leaf(Record):
    """One conversation of a tree: where it ends, and its reward with its parts."""

    node: int = doc("index of its last turn; the turns are those on the way from the root")
    end: str = doc("as in trajectories")
    answer: str | None = doc("the last marked answer; null when none was marked")
    tokens: int = doc("tokens of all its turns")
    reward: float = doc("Eq. 1, R_token relative to the tree's longest conversation")
    task: float = doc("R_task in [0, 1]")
    loss: float | None = doc("R_loss: the largest loss of its turns; null where there is none")
    degenerate: bool = doc("an agent spoke for another or said nothing: reward floor")
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.end not in ENDS:
            raise InputError(f'"end" is {self.end!r}, not one of {", ".join(ENDS)}')


@dataclass(frozen=True)
class Tree(Record):
    """The conversation tree of one task (iDPO)."""

    id: str = doc("the task's id")
    task: Task = doc("the task, whole")
    team: Team = doc("the team, whole")
    nodes: tuple[Node, ...] = doc("the root, then turns, each after its parent")
    trajectories: tuple[Leaf, ...] = doc("the completed conversations, in order")
    expanded: tuple[int, ...] = doc("the node that each iteration began from")
    model: str = doc("what generated it")
    base: str = doc("the model of the losses")
    seed: int = doc("the tree's own seed, derived from the run's seed and the task's id")
    settings: dict[str, Any] = doc("settings that shape the tree; `--resume` compares them")
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        if self.id != self.task.id:
            raise InputError(f'"id" is {self.id!r}, but the task is {self.task.id!r}')
        if not self.nodes or self.nodes[0].parent is not None:
            raise InputError('"nodes" must begin with the root, whose parent is null')
        names = {agent.name for agent in self.team.agents}
        speakers: dict[int, str] = {}  # who speaks after a node
        for i, node in enumerate(self.nodes[1:], start=1):
            if node.parent is None or not 0 <= node.parent < i:
                raise InputError(f'"nodes[{i}].parent" must be an earlier node')
            if node.agent not in names:
                raise InputError(f'"nodes[{i}].agent" is {node.agent!r}, who is not in the team')
            if speakers.setdefault(node.parent, node.agent) != node.agent:
                raise InputError(
                    f'"nodes[{i}].agent" is {node.agent!r}, but a sibling is by '
                    f"{speakers[node.parent]!r}"
                )
        for i, leaf in enumerate(self.trajectories):
            if not 0 <= leaf.node < len(self.nodes):
                raise InputError(f'"trajectories[{i}].node" is no node')


@dataclass(frozen=True)
class Pair(Record):
    """Two turns that could follow the same conversation: a DPO pair in TRL's conversational format.

    `prompt` is the speaker's view of the conversation so far. The rest says where the pair comes
    from and is not needed for training.
    """

    prompt: tuple[dict[str, Any], ...] = doc("`[{role, content}]`")
    chosen: tuple[dict[str, Any], ...] = doc("the better turn, one `assistant` message")
    rejected: tuple[dict[str, Any], ...] = doc("the worse turn, one `assistant` message")
    agent: str = doc("who speaks", default="")
    task_id: str = doc("the tree it comes from", default="")
    node: int | None = doc("the node that both turns follow", default=None)
    chosen_node: int | None = doc("the better turn's node", default=None)
    rejected_node: int | None = doc("the worse turn's node", default=None)
    chosen_value: float | None = doc("the better turn's value", default=None)
    rejected_value: float | None = doc("the worse turn's value", default=None)
    chosen_visits: int | None = doc("conversations through the better turn", default=None)
    rejected_visits: int | None = doc("conversations through the worse turn", default=None)
    extra: dict[str, Any] = _extra()

    def check(self) -> None:
        for name in ("prompt", "chosen", "rejected"):
            messages = getattr(self, name)
            if not messages:
                raise InputError(f'"{name}" is empty')
            for i, message in enumerate(messages):
                if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                    raise InputError(f'"{name}[{i}]" needs role and content, both text')
                if message["role"] not in ROLES:
                    raise InputError(f'"{name}[{i}].role" is {message["role"]!r}')
        if self.prompt[0]["role"] == "assistant":
            raise InputError('"prompt" begins with an assistant message: nothing leads to it')
        for name in ("chosen", "rejected"):
            messages = getattr(self, name)
            if len(messages) != 1 or messages[0]["role"] != "assistant":
                raise InputError(f'"{name}" must be one message, of the role assistant')
            if not messages[0]["content"].strip():
                raise InputError(f'"{name}" is a turn without text')
        if self.chosen[0]["content"].strip() == self.rejected[0]["content"].strip():
            raise InputError('"chosen" and "rejected" are the same turn')


_HINTS: dict[type[Record], dict[str, Any]] = {}  # resolved once: it is most of the parsing time

#: The kinds in the order of the pipeline; docs/records.md lists them so.
KINDS: tuple[type[Record], ...] = (
    *(Task, Team, Agent, Trajectory, Turn, Score, Example),
    *(Tree, Node, Leaf, Pair),
)


def kind_of(data: dict[str, Any]) -> type[Record] | None:
    """The record kind that an object looks like by its fields, None where it looks like none."""
    marks: dict[type[Record], set[str]] = {
        Task: {"question", "answers"},
        Trajectory: {"task", "turns"},
        Example: {"messages"},
        Tree: {"nodes"},
        Pair: {"chosen", "rejected"},
    }
    return next((kind for kind, keys in marks.items() if keys <= {*data}), None)


def _hints(cls: type[Record]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false"}
    names |= {int: "a whole number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`; only the types used in the records above are understood."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _convert(value, inner, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f'"{path}" must be a list, found {_kind(value)}')
        return tuple(_convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise InputError(f'"{path}" must be an object, found {_kind(value)}')
        return value
    if isinstance(hint, type) and issubclass(hint, Record):
        try:
            return hint.from_dict(value)
        except InputError as error:
            raise InputError(f"in {path}: {error.reason}") from None
    if hint is float and type(value) in (int, float):
        return float(value)
    if type(value) is not hint:
        raise InputError(f'"{path}" must be {_kind(hint())}, found {_kind(value)}')
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
