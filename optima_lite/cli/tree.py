"""`optima-lite tree`: grow one conversation tree per task (Optima, iDPO)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import click

from optima_lite import tree as search
from optima_lite.cli import options
from optima_lite.cli.groups import left_to_do, made_from
from optima_lite.dialogue import Sampling
from optima_lite.engines.loading import LoadOptions, resolve
from optima_lite.jsonl import Kept, Reader, ResumableOutput, refuse_input, require_same
from optima_lite.records import Task, Tree
from optima_lite.reward import Weights
from optima_lite.teams import load_team

DEFAULTS = search.Search()


@click.command("tree")
@options.record_options
@options.model_option(required=True)
@click.option(
    "--base",
    metavar="MODEL",
    help="The base model of R_loss; an adapter is left off.  [default: MODEL without its adapter]",
)
@options.team_option
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=DEFAULTS.iterations,
    show_default=True,
    help="How often a node is selected and expanded.",
)
@click.option(
    "--simulations",
    type=click.IntRange(min=1),
    default=DEFAULTS.simulations,
    show_default=True,
    help="Conversations completed from a selected node.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    default=DEFAULTS.candidates,
    show_default=True,
    help="A node is drawn from so many with the highest values.",
)
@click.option(
    "--expand-distance",
    type=options.Finite(0, 1),
    default=DEFAULTS.expand_distance,
    show_default=True,
    help="Do not expand a turn closer than this to an expanded one (edits / longer length).",
)
@click.option(
    "--merge-distance",
    type=options.Finite(0, 1),
    default=DEFAULTS.merge_distance,
    show_default=True,
    help="Take a turn closer than this to a sibling for that sibling.",
)
@options.weight_options
@options.sampling_options
@options.size_options
@options.loading_options
def command(
    input: str,
    output: str,
    resume: bool,
    overwrite: bool,
    skip_bad: bool,
    model: str,
    base: str | None,
    team: str | None,
    iterations: int,
    simulations: int,
    candidates: int,
    expand_distance: float,
    merge_distance: float,
    weights: Weights,
    sampling: Sampling,
    size: dict[str, Any],
    loading: LoadOptions,
) -> None:
    """Grow a tree of conversations for each task; reads tasks, writes one tree a line.

    Each iteration selects a node by its value, completes conversations from it, and gives every
    node the mean reward of the conversations through it. Sibling turns of different value make
    preference pairs: see select.

    \b
    Examples:
      optima-lite tasks relay --limit 32 | optima-lite tree --model relay -o trees.jsonl
      optima-lite tree tasks.jsonl --model runs/round1 --base smollm2 --resume -o trees.jsonl
      optima-lite select trees.jsonl -o pairs.jsonl
    """
    fixed_team = load_team(team) if team else None
    reader = Reader(input, Task, skip_bad, options.bad_line)
    settings: dict[str, Any] = {
        "iterations": iterations,
        "simulations": simulations,
        "candidates": candidates,
        "expand_distance": expand_distance,
        "merge_distance": merge_distance,
        "lambda_token": weights.token,
        "lambda_loss": weights.loss,
        "context": size["context"],
        **asdict(sampling),
        "load": loading.load,
    }
    refuse_input(input, output)
    base_model = resolve(base or model).without_adapter
    numbers = search.Search(iterations, simulations, candidates, expand_distance, merge_distance)
    with ResumableOutput(output, resume=resume, overwrite=overwrite) as out:
        done = _finished(out, {**settings, "model": model, "base": base_model.name})
        waiting = (
            search.Growing(task, its_team, sampling, numbers, weights)
            for task, its_team in left_to_do(reader, fixed_team, done)
        )
        first = next(waiting, None)
        if first is not None:  # nothing to do needs no model
            from optima_lite.engines.hf import HFEngine

            engine, scorer = HFEngine.load_with_base(resolve(model), base_model, loading, **size)
            make = partial(_record, model=model, base=base_model.name, settings=settings)
            _grow(chain([first], waiting), reader, engine, scorer, make, out)
    if done.count:
        options.notice(f"tree: kept {done.count} finished trees of {output}")


command.short_help = "Grow conversation trees: tasks -> trees."


def _grow(
    trees: Iterator[search.Growing],
    reader: Reader[Task],
    engine: Any,
    base: Any,
    record: Any,
    out: ResumableOutput,
) -> None:
    """Grow all trees and write each, in input order, as soon as it is complete."""
    count = nodes = tokens = 0
    ends: Counter[str] = Counter()
    with options.progress(unit="tree", desc="tree") as bar:
        for tree in search.grow(trees, engine, base, reader.ready):
            out.write(record(tree))
            count += 1
            ends.update(trajectory.end for trajectory in tree.trajectories)
            nodes += len(tree.nodes) - 1
            tokens += tree.generated
            bar.update(1)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s")
    options.notice(
        f"tree: {count} trees, {ends.total()} conversations, {nodes} turns, "
        f"{tokens} tokens generated; {options.tally(ends)}"
    )


def _record(tree: search.Growing, *, model: str, base: str, settings: dict[str, Any]) -> Tree:
    return tree.record(model, base, settings)


def _finished(out: ResumableOutput, settings: dict[str, Any]) -> Kept:
    """The trees of an interrupted run."""
    done: dict[str, dict[str, bytes]] = {}
    for record in out.kept(Tree):
        old = {**record.settings, "model": record.model, "base": record.base}
        require_same(old, settings, out.path)
        if record.id in done:
            raise out.error(f"the tree of {record.id} appeared before: remove one of the two")
        done[record.id] = made_from(record.task, record.team)
    return Kept(out.path, done)
