"""The conversation tree of iDPO (Optima, Section 3.2, Algorithm 3): select, simulate, back up.

A node is a turn, the root is the empty conversation. One iteration picks a node, completes a few
conversations from it, and gives every node the mean reward of the conversations through it. Nothing
here knows of models: `grow` hands turns to an engine and texts to a base model, many trees at once.

Rewards are those of a flat group (reward.py), over the tree's conversations so far: R_token is
relative to the longest of them, so a longer one that is found later changes all values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rapidfuzz.distance import Levenshtein

from optima_lite.dialogue import Conversation, Sampling, hold, trajectory_seed
from optima_lite.engines.base import Completion, Engine, Request, Utterance
from optima_lite.records import Leaf, Node, Task, Team, Trajectory, Tree, Turn
from optima_lite.reward import Weights, score_group

ROOT = 0


@dataclass(frozen=True)
class Search:
    """The search's numbers; the defaults are the paper's.

    `distance` is the edit distance of two turns over the length of the longer, from 0 to 1.
    """

    iterations: int = 8
    simulations: int = 3  # conversations completed in an iteration
    candidates: int = 10  # of the nodes that may be expanded, so many with the highest values
    expand_distance: float = 0.25  # a node closer than this to an expanded one is not expanded
    merge_distance: float = 0.1  # a turn closer than this to a sibling becomes that sibling


def distance(a: str, b: str) -> float:
    """Levenshtein distance in characters over the length of the longer text; 0 for two empty."""
    return float(Levenshtein.normalized_distance(a, b))


@dataclass
class Place:
    """A node while its tree grows. The root has neither turn nor parent."""

    turn: Turn | None
    parent: int | None
    children: list[int] = field(default_factory=list)
    loss: float | None = None
    scored: bool = False


@dataclass(eq=False)
class Simulation:
    """A conversation that goes on from some node; `path` are its nodes, the root first."""

    conversation: Conversation
    path: list[int]
    completion: Completion | None = None  # said, but not yet part of the tree

    def request(self) -> Request:
        """The turn that is due."""
        return self.conversation.request()


class Growing:
    """One task's tree under way: whose turns are due, and what becomes of them."""

    def __init__(
        self, task: Task, team: Team, sampling: Sampling, search: Search, weights: Weights
    ):
        self.task = task
        self.team = team
        self.sampling = sampling
        self.search = search
        self.weights = weights
        self.seed = trajectory_seed(sampling.seed, f"{task.id} tree")
        self.nodes = [Place(None, None)]
        self.expanded: list[int] = []  # one entry an iteration
        self.trajectories: list[Trajectory] = []  # finished, with rewards once `back_up` ran
        self.paths: list[list[int]] = []  # their nodes
        self.generated = 0  # tokens said, those of merged turns too
        self._rng = random.Random(self.seed)
        self._running: list[Simulation] = []

    @property
    def finished(self) -> bool:
        """Whether all iterations are done."""
        return len(self.expanded) == self.search.iterations and not self._running

    # -- select -----------------------------------------------------------------------------

    def begin(self) -> list[Simulation]:
        """Select a node and start its conversations."""
        node = self.choose()
        self.expanded.append(node)
        path = self.path_to(node)
        for _ in range(self.search.simulations):
            number = len(self.trajectories) + len(self._running)
            conversation = Conversation(self.task, self.team, number, self.sampling)
            conversation.turns = [self.turn(i) for i in path[1:]]
            self._running.append(Simulation(conversation, list(path)))
        return list(self._running)

    def choose(self) -> int:
        """The node to expand: one of the best eligible ones, drawn by softmax over values."""
        eligible = self.eligible()
        values = self.values()
        best = sorted(eligible, key=lambda i: (-values[i], i))[: self.search.candidates]
        # Rewards are of the order of 1; the largest is taken off so that exp cannot overflow.
        top = max(values[i] for i in best)
        weights = [math.exp(values[i] - top) for i in best]
        return self._rng.choices(best, weights)[0]

    def eligible(self) -> list[int]:
        """Nodes that may be expanded: not leaves, not the nodes right before the last turn, and no
        turn that is like one expanded before. The root is always one of them: it has no text that
        could be like another."""
        heights = self.heights()
        texts = [self.turn(i).text for i in self.expanded if i != ROOT]
        inner = [i for i in range(1, len(self.nodes)) if heights[i] > 1]
        fresh = [
            i
            for i in inner
            if all(
                distance(self.turn(i).text, text) >= self.search.expand_distance for text in texts
            )
        ]
        return [ROOT, *fresh]

    # -- simulate ---------------------------------------------------------------------------

    def take(
        self, simulation: Simulation, completion: Completion, count_tokens: Callable[[str], int]
    ) -> list[Simulation]:
        """Take the turn that a simulation was waiting for; gives the simulations whose next turn
        is due. They go step by step together, so that what merges with what does not depend on
        which turn came first out of a batch."""
        simulation.completion = completion
        open_ = [s for s in self._running if s.conversation.end is None]
        if any(s.completion is None for s in open_):
            return []
        for waiting in open_:
            assert waiting.completion is not None
            self._add(waiting, waiting.completion, count_tokens)
            waiting.completion = None
        due = [s for s in self._running if s.conversation.end is None]
        if not due:
            for done in self._running:
                self.trajectories.append(done.conversation.trajectory("", {}))
                self.paths.append(done.path)
            self._running = []
        return due

    @property
    def simulating(self) -> bool:
        """Whether conversations of the present iteration are still going on."""
        return bool(self._running)

    def _add(
        self, simulation: Simulation, completion: Completion, count_tokens: Callable[[str], int]
    ) -> None:
        """Append a turn to its conversation and to the tree, or merge it into a sibling."""
        conversation, parent = simulation.conversation, simulation.path[-1]
        self.generated += completion.tokens
        before = len(conversation.turns)
        conversation.add(completion, count_tokens)
        if len(conversation.turns) == before:
            return  # nothing was said: an engine error, or a full window
        turn = conversation.turns[-1]
        siblings = self.nodes[parent].children
        apart = [(distance(turn.text, self.turn(i).text), i) for i in siblings]
        nearest, sibling = min(apart, default=(1.0, ROOT))
        if nearest < self.search.merge_distance:
            conversation.replace_last(self.turn(sibling))
            simulation.path.append(sibling)
            return
        self.nodes.append(Place(turn, parent))
        siblings.append(len(self.nodes) - 1)
        simulation.path.append(len(self.nodes) - 1)

    # -- back up ----------------------------------------------------------------------------

    def back_up(self, base: Engine) -> None:
        """Score the new turns under the base model, and all conversations anew."""
        new = [place for place in self.nodes if place.turn and not place.scored]
        texts = list(dict.fromkeys(Utterance(place.turn.text) for place in new if place.turn))
        losses = dict(zip(texts, base.losses(texts), strict=True))
        for place in new:
            assert place.turn is not None
            place.loss, place.scored = losses[Utterance(place.turn.text)], True
        rows = [[self.nodes[i].loss for i in path[1:]] for path in self.paths]
        self.trajectories = score_group(self.trajectories, rows, self.weights, base.name)

    def values(self) -> list[float]:
        """Per node: the mean reward of the conversations through it. The root of an empty tree has
        value 0."""
        sums, visits = [0.0] * len(self.nodes), self.visits()
        for trajectory, path in zip(self.trajectories, self.paths, strict=True):
            for node in path:
                sums[node] += trajectory.reward or 0.0
        return [total / count if count else 0.0 for total, count in zip(sums, visits, strict=True)]

    def visits(self) -> list[int]:
        """Per node: how many conversations go through it."""
        counts = [0] * len(self.nodes)
        for path in self.paths:
            for node in path:
                counts[node] += 1
        return counts

    # -- the tree ---------------------------------------------------------------------------

    def turn(self, node: int) -> Turn:
        """The turn of a node other than the root."""
        turn = self.nodes[node].turn
        assert turn is not None
        return turn

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        path = [node]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def heights(self) -> list[int]:
        """Per node: turns on the longest way from it to a leaf; 0 for a leaf."""
        heights = [0] * len(self.nodes)
        for node in range(len(self.nodes) - 1, 0, -1):  # children come after their parents
            parent = self.nodes[node].parent
            assert parent is not None
            heights[parent] = max(heights[parent], heights[node] + 1)
        return heights

    def record(self, model: str, base: str, settings: Mapping[str, object]) -> Tree:
        """The finished tree."""
        values, visits = self.values(), self.visits()
        nodes = []
        for i, place in enumerate(self.nodes):
            turn = place.turn or Turn("", "", 0, "end")
            nodes.append(
                Node(
                    parent=place.parent,
                    agent=turn.agent,
                    text=turn.text,
                    tokens=turn.tokens,
                    stop=turn.stop,
                    loss=place.loss,
                    visits=visits[i],
                    value=values[i],
                )
            )
        leaves = []
        for trajectory, path in zip(self.trajectories, self.paths, strict=True):
            assert trajectory.score is not None
            assert trajectory.reward is not None
            leaves.append(
                Leaf(
                    node=path[-1],
                    end=trajectory.end,
                    answer=trajectory.answer,
                    tokens=trajectory.tokens,
                    reward=trajectory.reward,
                    task=trajectory.score.task,
                    loss=trajectory.score.loss,
                    degenerate=trajectory.score.degenerate,
                )
            )
        return Tree(
            id=self.task.id,
            task=self.task,
            team=self.team,
            nodes=tuple(nodes),
            trajectories=tuple(leaves),
            expanded=tuple(self.expanded),
            model=model,
            base=base,
            seed=self.seed,
            settings=dict(settings),
        )


def grow(
    trees: Iterator[Growing],
    engine: Engine,
    base: Engine,
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Growing]:
    """Grow all trees, as many at once as the engine has room for; yields each, in order, when it
    is finished. See dialogue.hold for what is in memory and when `ready` is asked."""
    for job in hold((_Job(tree, base) for tree in trees), engine, ready):
        yield job.tree


@dataclass(eq=False)
class _Job:
    """A tree and the base model that scores it after each iteration."""

    tree: Growing
    base: Engine

    def begin(self) -> list[Simulation]:
        return self.tree.begin()

    def take(
        self, talk: Simulation, completion: Completion, count_tokens: Callable[[str], int]
    ) -> list[Simulation]:
        due = self.tree.take(talk, completion, count_tokens)
        if self.tree.simulating:
            return due
        self.tree.back_up(self.base)
        return [] if self.tree.finished else self.tree.begin()

    @property
    def finished(self) -> bool:
        return self.tree.finished
