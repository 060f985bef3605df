"""Conversations: whose turn it is, when the agents agree, and many of them running at once.

Nothing here knows of devices, batches or tokenizers. `hold` keeps a pool of conversations going on
an engine: whenever the engine has room it is handed the next turns that are due, and a finished
conversation is replaced by a new one at once.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from optima_lite.answers import extract, normalize
from optima_lite.engines.base import Completion, Engine, Request
from optima_lite.records import Agent, Task, Team, Trajectory, Turn
from optima_lite.teams import view


@dataclass(frozen=True)
class Sampling:
    """How turns are drawn. `temperature` 0 is greedy; limits of None leave it to the team."""

    temperature: float = 0.7
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    seed: int = 0


def trajectory_seed(seed: int, trajectory_id: str) -> int:
    """The seed of one trajectory, 63 bits: a function of the run's seed and its id alone."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def speaking_order(team: Team) -> tuple[str, ...]:
    """Names in speaking order; repeated until the conversation ends."""
    return team.order or tuple(agent.name for agent in team.agents)


@dataclass
class Conversation:
    """A conversation under way."""

    task: Task
    team: Team
    number: int
    sampling: Sampling
    format: tuple[str, str] | None = None  # name, text
    turns: list[Turn] = field(default_factory=list)
    end: str | None = None
    error: str | None = None

    @property
    def id(self) -> str:
        return f"{self.task.id}#{self.number}"

    @property
    def seed(self) -> int:
        return trajectory_seed(self.sampling.seed, self.id)

    @property
    def speaker(self) -> Agent:
        """The agent whose turn it is."""
        order = speaking_order(self.team)
        name = order[len(self.turns) % len(order)]
        return next(agent for agent in self.team.agents if agent.name == name)

    def request(self) -> Request:
        """The turn that is due, as the engine needs it."""
        return Request(
            messages=view(
                self.team,
                self.task,
                self.speaker,
                self.turns,
                self.format[1] if self.format else None,
            ),
            max_tokens=self.sampling.max_turn_tokens or self.team.max_turn_tokens,
            temperature=self.sampling.temperature,
            # A turn's draws depend on its trajectory and its place, not on its neighbours.
            seed=trajectory_seed(self.seed, str(len(self.turns))),
        )

    def add(self, completion: Completion, count_tokens: Callable[[str], int]) -> None:
        """Take the turn that was due; sets `end` when the conversation is over."""
        if completion.stop == "error":
            self.end, self.error = "engine_error", completion.error
            return
        if completion.stop == "context" and not completion.text:
            self.end = "context_full"
            return
        speaker = self.speaker
        # Models like to repeat the name that the transcript shows in front of a turn.
        said = completion.text.strip()
        text = said.removeprefix(f"{speaker.name}:").strip()
        tokens = completion.tokens if text == said else count_tokens(text)
        self.turns.append(Turn(speaker.name, text, tokens, completion.stop))
        self.end = self._end()

    def replace_last(self, turn: Turn) -> None:
        """Put another turn in place of the last one; `end` follows from it."""
        self.turns[-1] = turn
        self.end = self._end()

    def _end(self) -> str | None:
        """How the conversation ends with its last turn; None where it goes on."""
        if self.turns[-1].stop == "length":
            return "turn_cut"
        if self.turns[-1].stop == "context":
            return "context_full"
        if self.agreed:
            return "agreement"
        if len(self.turns) >= (self.sampling.max_turns or self.team.max_turns):
            return "turn_limit"
        return None

    @property
    def answers(self) -> list[str]:
        """The marked answers in speaking order, at most one a turn."""
        found = (extract(turn.text, self.team.answer_mark) for turn in self.turns)
        return [answer for answer in found if answer is not None]

    @property
    def agreed(self) -> bool:
        """Whether the last k marked answers, in speaking order, are equal after normalisation."""
        needed = self.team.agreement or len(self.team.agents)
        last = self.answers[-needed:]
        return len(last) == needed and len({normalize(a) for a in last}) == 1

    @property
    def answer(self) -> str | None:
        """The answer that counts: the last one marked."""
        answers = self.answers
        return answers[-1] if answers else None

    def trajectory(self, model: str, settings: Mapping[str, object]) -> Trajectory:
        """The finished conversation as a record."""
        assert self.end is not None
        return Trajectory(
            id=self.id,
            task=self.task,
            team=self.team,
            turns=tuple(self.turns),
            end=self.end,
            agreed=self.end == "agreement",
            tokens=sum(turn.tokens for turn in self.turns),
            answer=self.answer,
            model=model,
            seed=self.seed,
            settings=dict(settings),
            format=self.format[0] if self.format else None,
            error=self.error,
        )


def start(
    task: Task, team: Team, n: int, sampling: Sampling, formats: Mapping[str, str] | None = None
) -> list[Conversation]:
    """The N conversations of one task; with `formats` each draws one by its own seed."""
    conversations = []
    for number in range(n):
        conversation = Conversation(task, team, number, sampling)
        if formats:
            name = random.Random(conversation.seed).choice(sorted(formats))
            conversation.format = (name, formats[name])
        conversations.append(conversation)
    return conversations


def run(
    groups: Iterator[Sequence[Conversation]],
    engine: Engine,
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Sequence[Conversation]]:
    """Hold all conversations of all groups; yield each group, in order, when it is finished."""
    for job in hold((_Group(group) for group in groups), engine, ready):
        yield job.conversations


@dataclass(eq=False)
class _Group:
    """Conversations that know nothing of each other."""

    conversations: Sequence[Conversation]

    def begin(self) -> Sequence[Conversation]:
        return self.conversations

    def take(
        self, talk: Conversation, completion: Completion, count_tokens: Callable[[str], int]
    ) -> Sequence[Conversation]:
        talk.add(completion, count_tokens)
        return [] if talk.end else [talk]

    @property
    def finished(self) -> bool:
        return all(conversation.end is not None for conversation in self.conversations)


class Job(Protocol):
    """What `hold` works on: talks (whatever has a `request`) that go on from turn to turn."""

    def begin(self) -> Sequence[Any]:
        """The talks whose first turn is due."""
        ...

    def take(
        self, talk: Any, completion: Completion, count_tokens: Callable[[str], int]
    ) -> Sequence[Any]:
        """Take the turn that a talk was waiting for; gives the talks whose next turn is due."""
        ...

    @property
    def finished(self) -> bool: ...


J = TypeVar("J", bound=Job)


def hold(jobs: Iterator[J], engine: Engine, ready: Callable[[], bool]) -> Iterator[J]:
    """Work on jobs, as many at once as the engine has room for; yield each, in order, when it is
    finished.

    `jobs` is consumed as the engine finds room, so that a long input streams: at most the jobs in
    flight, and finished ones that wait for an earlier one, are in memory. While turns are running,
    a job is taken only if `ready()` says that it can be had at once.
    """
    due: deque[tuple[J, Any]] = deque()
    waiting: deque[J] = deque()
    asked: dict[int, tuple[J, Any]] = {}  # by id of the request object
    exhausted = False

    def pull(room: int) -> list[Request]:
        nonlocal exhausted
        while len(due) < room and not exhausted and (ready() or not (due or asked)):
            job = next(jobs, None)
            if job is None:
                exhausted = True
            else:
                waiting.append(job)
                due.extend((job, talk) for talk in job.begin())
        requests: list[Request] = []
        while due and len(requests) < room:
            job, talk = due.popleft()
            request = talk.request()
            asked[id(request)] = (job, talk)
            requests.append(request)
        return requests

    for request, completion in engine.generate(pull):
        job, talk = asked.pop(id(request))
        more = job.take(talk, completion, engine.count_tokens)
        # Before anything new: what goes on has its prefix in the engine's cache.
        due.extendleft((job, talk) for talk in reversed(more))
        while waiting and waiting[0].finished:
            yield waiting.popleft()
    if asked or waiting:
        raise RuntimeError(f"the engine lost {len(asked)} of the turns it was asked for")
