"""`optima-lite select`: scored trajectories to SFT examples, trees to preference pairs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import click

from optima_lite.cli import options
from optima_lite.cli.groups import whole_group
from optima_lite.errors import SettingError, TeamError
from optima_lite.jsonl import Reader, atomic_output, check_free, dumps, groups, refuse_input
from optima_lite.records import Pair, Trajectory, Tree
from optima_lite.selection import best_of, eligible, examples, pairs, top_share
from optima_lite.teams import check_fits

THETA, TOP = 0.5, 0.7  # of trajectories
THETA_FILTER, TOP_OF_TREE = 0.4, 0.5  # of trees


@click.command("select")
@options.input_argument
@options.output_option
@options.overwrite_option
@options.skip_bad_option
@click.option(
    "--theta",
    type=options.Finite(),
    help="Keep rewards above this (θ_sft), or better turns with values above it (θ_filter).  "
    f"[default: {THETA}, of trees {THETA_FILTER}]",
)
@click.option(
    "--top",
    type=options.Finite(0, 1, min_open=True),
    help="Of those, keep this share with the highest rewards or values.  "
    f"[default: {TOP}, of trees {TOP_OF_TREE}]",
)
@click.option(
    "--theta-diff",
    type=options.Finite(min=0),
    default=0.2,
    show_default=True,
    help="Trees: keep pairs whose values differ by more than this (θ_diff).",
)
@click.option(
    "--pairs",
    "which",
    type=click.Choice(["all", "extremes"]),
    default="all",
    show_default=True,
    help="Trees: all pairs of siblings, or the best with the worst.",
)
@click.option(
    "--top-scope",
    type=click.Choice(["tree", "all"]),
    default="tree",
    show_default=True,
    help="Trees: take the top share of each tree, or of all trees together.",
)
def command(
    input: str,
    output: str,
    overwrite: bool,
    skip_bad: bool,
    theta: float | None,
    top: float | None,
    theta_diff: float,
    which: str,
    top_scope: str,
) -> None:
    """Select what to train on: examples from scored trajectories, preference pairs from trees.

    Of trajectories, keeps the best per task, above θ, the top share; one example per agent. Of
    trees, keeps pairs of turns that could follow the same conversation. What was cut or failed, or
    is degenerate, is never learned. Examples and pairs are in TRL's conversational format, in input
    order, without the format text.

    \b
    Examples:
      optima-lite select scored.jsonl -o examples.jsonl
      optima-lite gen … | optima-lite score … | optima-lite select --theta 0.6 -o examples.jsonl
      optima-lite select trees.jsonl -o pairs.jsonl
      optima-lite select trees.jsonl --theta-diff 0.1 --top 1 -o pairs.jsonl
    """
    check_free(output, overwrite=overwrite)
    refuse_input(input, output)
    reader: Reader[Any] = Reader(input, (Trajectory, Tree), skip_bad, options.bad_line)
    # The top share may be known at the end only, so what is chosen waits on disk: what stays in
    # memory is one number and one offset per choice.
    with tempfile.TemporaryFile(prefix="optima-lite-") as spool:
        choice = Choice(spool)
        counts: FromTrees | FromTrajectories | None = None
        for group in groups(reader, lambda record: record.task.id):
            if counts is None:
                if isinstance(group[0], Tree):
                    counts = FromTrees(theta, top, theta_diff, which == "extremes", top_scope)
                else:
                    _refuse_tree_options()
                    counts = FromTrajectories(theta, top)
            if not all(isinstance(record, counts.kind) for record in group):
                raise reader.error("trajectories and trees in one file")
            try:
                check_fits(group[0].team, group[0].task)
                counts.take(reader, group, choice)
            except TeamError as error:  # a record that others made: the prompt cannot be shown
                wrong = reader.error(str(error))
                if not skip_bad:
                    raise wrong from None
                options.bad_line(wrong)
        kept = top_share(choice.values, counts.share if counts else 1.0)
        with atomic_output(output, overwrite=overwrite) as write:
            lines = sum(choice.copy(index, write) for index in kept)
    said = counts.report(len(choice.values), len(kept), lines) if counts else ["nothing to read"]
    for line in said:
        options.notice(f"select: {line}")


command.short_help = "Select what to train on: trajectories -> examples, trees -> pairs."


def _refuse_tree_options() -> None:
    """Raise SettingError where an option is given that says nothing about trajectories."""
    for name, flag in (
        ("theta_diff", "--theta-diff"),
        ("which", "--pairs"),
        ("top_scope", "--top-scope"),
    ):
        if options.given(name):
            raise SettingError(f"{flag} is for trees, and these are trajectories")


class Choice:
    """What may be trained on: a value each, and its lines in a file."""

    def __init__(self, spool: Any):
        self.values: list[float] = []
        self._offsets = [0]
        self._spool = spool

    def add(self, value: float, records: Sequence[Any]) -> None:
        """Add records that are kept or dropped together."""
        for record in records:
            self._spool.write(dumps(record))
        self.values.append(value)
        self._offsets.append(self._spool.tell())

    def copy(self, index: int, write: Any) -> int:
        """Write the lines of one choice; returns how many they are."""
        self._spool.seek(self._offsets[index])
        lines: bytes = self._spool.read(self._offsets[index + 1] - self._offsets[index])
        write(lines)
        return lines.count(b"\n")


class FromTrajectories:
    """The best conversation of each task, as examples."""

    kind = Trajectory

    def __init__(self, theta: float | None, top: float | None):
        self.theta = THETA if theta is None else theta
        self.share = TOP if top is None else top
        self.tasks = self.unfit = self.without = 0

    def take(self, reader: Reader[Any], group: list[Trajectory], choice: Choice) -> None:
        if not whole_group(reader, group):
            return
        self.tasks += 1
        if any(t.reward is None for t in group):
            raise reader.error(
                f"{group[0].task.id} has trajectories without a reward: run score first"
            )
        self.unfit += sum(not eligible(t) for t in group)
        best = best_of(group)
        if best is None:
            self.without += 1
            return
        assert best.reward is not None
        if best.reward > self.theta:
            choice.add(best.reward, examples(best))

    def report(self, found: int, kept: int, lines: int) -> list[str]:
        said = [
            f"{self.tasks} tasks, {found} with a reward above {self.theta:g}, kept {kept} "
            f"({lines} examples); {self.unfit} conversations cut, failed or degenerate"
            + (f", {self.without} tasks with nothing else" if self.without else "")
        ]
        if self.tasks and self.without == self.tasks:
            said.append("every conversation was cut, failed or degenerate: see their `end`")
        elif not lines:
            said.append("nothing is left to train on: lower --theta, or sample more")
        return said


class FromTrees:
    """Pairs of sibling turns."""

    kind = Tree

    def __init__(
        self,
        theta: float | None,
        top: float | None,
        theta_diff: float,
        extremes: bool,
        scope: str,
    ):
        self.theta = THETA_FILTER if theta is None else theta
        self.theta_diff = theta_diff
        self.extremes = extremes
        top = TOP_OF_TREE if top is None else top
        self.share, self.share_of_tree = (top, 1.0) if scope == "all" else (1.0, top)
        self.trees = self.found = self.without = 0

    def take(self, reader: Reader[Any], group: list[Tree], choice: Choice) -> None:
        if len(group) > 1:
            raise reader.error(f"the tree of {group[0].task.id} appeared before")
        self.trees += 1
        found: list[Pair] = pairs(group[0], self.theta, self.theta_diff, self.extremes)
        self.found += len(found)
        self.without += not found
        values = [pair.chosen_value or 0.0 for pair in found]
        for index in top_share(values, self.share_of_tree):
            choice.add(values[index], [found[index]])

    def report(self, found: int, kept: int, lines: int) -> list[str]:
        said = [
            f"{self.trees} trees, {self.found} pairs with a value above {self.theta:g} and a "
            f"difference above {self.theta_diff:g}, kept {lines}; {self.without} trees without one"
        ]
        if not lines:
            said.append("nothing is left to train on: lower --theta or --theta-diff")
        return said
