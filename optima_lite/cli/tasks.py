"""`optima-lite tasks`: a data set's rows as task records."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from optima_lite import tasks as registry
from optima_lite.cli.options import first, notice, output_option, overwrite_option, seed_option
from optima_lite.errors import InputError, TeamError
from optima_lite.jsonl import Reader, atomic_output, dumps, refuse_input
from optima_lite.records import Task
from optima_lite.teams import check_fits, load_team


@click.command("tasks")
@click.argument("name")
@output_option
@overwrite_option
@click.option("--split", metavar="NAME", help="Which split.  [default: the training split]")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after N tasks.")
@click.option(
    "--agents",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Into how many contexts a task is split.",
)
@click.option(
    "--source",
    metavar="ID_OR_PATH",
    help="Another hub id, or where you have the data.  [default: the data set's hub id]",
)
@seed_option
@click.option(
    "--shuffle", is_flag=True, help="Take the tasks in a random order (holds all of them)."
)
@click.option(
    "settings", "--set", multiple=True, metavar="KEY=VALUE", help="A setting of the data set."
)
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    output: str,
    overwrite: bool,
    split: str | None,
    limit: int | None,
    agents: int,
    source: str | None,
    seed: int,
    shuffle: bool,
    settings: tuple[str, ...],
) -> None:
    """Write the tasks of a data set, one JSON object a line.

    NAME is hotpotqa, relay (built in, endless), or the path of your own tasks (.jsonl), which are
    checked and passed on; - is stdin. Which agent gets which paragraph is decided by --seed and the
    task's id alone.

    \b
    The hub's copy (downloaded once):
      optima-lite tasks hotpotqa --limit 1000 -o tasks.jsonl
    A file or a folder you have: an official .json, .jsonl, .parquet, the hub's Parquet layout:
      optima-lite tasks hotpotqa --split dev --source hotpot_dev_distractor_v1.json
      optima-lite tasks hotpotqa --source downloads/hotpot_qa
    A random choice of tasks, split for three agents:
      optima-lite tasks hotpotqa --shuffle --seed 1 --limit 200 --agents 3
    Built in, no download, with a setting of its own:
      optima-lite tasks relay --split test --set distractors=6 --limit 32
    Your own tasks:
      optima-lite tasks mine.jsonl --limit 10

    A file given by --source is taken whole: --split then only names the tasks.
    """
    if name in registry.DATASETS:
        tasks = _dataset(name, split, source, agents, seed, settings, shuffle)
    else:
        refuse_input(name, output)
        tasks = _own(ctx, name)
    if shuffle:
        shuffled = list(tasks)
        random.Random(f"{seed} shuffle").shuffle(shuffled)
        tasks = iter(shuffled)
    count = 0
    with atomic_output(output, overwrite=overwrite) as write:
        for count, task in enumerate(first(tasks, limit), start=1):  # noqa: B007
            write(dumps(task))
    if output != "-":
        notice(f"{output}: {count} tasks")
    elif limit is not None and count < limit:
        notice(f"{count} tasks, fewer than --limit {limit}")


def _dataset(
    name: str,
    split: str | None,
    source: str | None,
    agents: int,
    seed: int,
    settings: tuple[str, ...],
    shuffle: bool,
) -> Iterator[Task]:
    dataset = registry.get(name)
    if shuffle and name in registry.ENDLESS:
        raise click.UsageError(f"--shuffle needs a last task, {name} is endless: use --seed")
    if split is not None and split not in dataset.splits:
        raise click.UsageError(
            f"{name} has no split {split!r}; its splits are {', '.join(dataset.splits)}"
        )
    chosen = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes KEY=VALUE, not {setting!r}")
        if key not in dataset.settings:
            known = "; ".join(f"{k} ({text})" for k, text in dataset.settings.items())
            raise click.UsageError(
                f"{name} has no setting {key!r}; its settings: {known or 'none'}"
            )
        chosen[key] = value
    tasks = dataset.tasks(
        split=split or dataset.splits[0], source=source, agents=agents, seed=seed, settings=chosen
    )
    # A generator's ids are distinct by construction, and remembering them would never end.
    return tasks if name in registry.ENDLESS else _distinct(tasks, source or name)


def _distinct(tasks: Iterable[Task], source: str) -> Iterator[Task]:
    """Pass tasks on; an id that comes back would mix two groups of trajectories later."""
    seen: set[int] = set()
    for task in tasks:
        if hash(task.id) in seen:
            raise InputError(f"{task.id} appears twice", source)
        seen.add(hash(task.id))
        yield task


def _own(ctx: click.Context, name: str) -> Iterator[Task]:
    """The user's own task records."""
    known = ", ".join(registry.DATASETS)
    if name != "-" and not name.endswith(".jsonl") and not Path(name).exists():
        raise click.UsageError(
            f"no data set {name!r}; the data sets are {known}, or give a tasks .jsonl"
        )
    if name.endswith((".json", ".parquet")) or Path(name).is_dir():
        raise click.UsageError(
            f"your own tasks are .jsonl; a data set's files go with its name: NAME --source {name}"
        )
    for option in ("split", "agents", "source", "settings"):
        given = ctx.get_parameter_source(option)
        if given is not None and given.name == "COMMANDLINE":
            flag = "--set" if option == "settings" else f"--{option}"
            raise click.UsageError(f"{flag} is for data sets; {name} is passed on as it is")
    return _read(Reader(name, Task))


def _read(reader: Reader[Task]) -> Iterator[Task]:
    seen: dict[int, int] = {}
    for task in reader:
        line = seen.setdefault(hash(task.id), reader.number)
        if line != reader.number:
            raise reader.error(f"id {task.id!r} is on line {line} already")
        if task.team:
            try:
                check_fits(load_team(task.team), task)
            except TeamError as error:
                raise reader.error(str(error)) from None
        yield task
