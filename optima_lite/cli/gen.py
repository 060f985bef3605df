"""`optima-lite gen`: let a team hold conversations about tasks (Optima's "generate" step)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import click

from optima_lite import dialogue
from optima_lite.cli import options
from optima_lite.cli.groups import left_to_do, made_from
from optima_lite.engines.loading import LoadOptions
from optima_lite.jsonl import (
    Kept,
    Reader,
    ResumableOutput,
    incomplete,
    refuse_input,
    require_same,
)
from optima_lite.records import Task, Team, Trajectory
from optima_lite.teams import check_fits, load_formats, load_team


@click.command("gen")
@options.record_options
@options.model_option(required=True)
@options.team_option
@click.option(
    "-n",
    "--n",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Conversations per task.",
)
@click.option(
    "--formats",
    is_flag=True,
    help="Initialization round: end a conversation's prompts with a format text from a pool. "
    "The paper then samples at -t 0.3.",
)
@click.option(
    "--format-pool", metavar="FILE", help="With --formats: a YAML file of your own, name: text."
)
@click.option(
    "--show-prompt",
    is_flag=True,
    help="Print what the first speaker of the first task sees, and stop. Loads no model.",
)
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
    team: str | None,
    n: int,
    formats: bool,
    format_pool: str | None,
    show_prompt: bool,
    sampling: dialogue.Sampling,
    size: dict[str, Any],
    loading: LoadOptions,
) -> None:
    """Hold N conversations per task; reads tasks, writes trajectories, a task's lines together.

    \b
    Examples:
      optima-lite tasks relay --limit 32 | optima-lite gen --model relay -n 6 -o traj.jsonl
      optima-lite gen tasks.jsonl --model runs/round1 -n 1 -t 0 --resume -o greedy.jsonl
      optima-lite gen tasks.jsonl --model smollm2 --formats -t 0.3 | optima-lite score …
      optima-lite gen tasks.jsonl --model Qwen/Qwen2.5-7B-Instruct --team my_team.yaml
    """
    fixed_team = load_team(team) if team else None
    if format_pool and not formats:
        raise click.UsageError("--format-pool goes with --formats")
    pool = load_formats(format_pool) if formats else None
    reader = Reader(input, Task, skip_bad, options.bad_line)
    if show_prompt:
        _show_prompt(reader, fixed_team, sampling, pool)
        return
    settings = {
        "n": n,
        "formats": (format_pool or "built-in") if formats else None,
        "context": size["context"],
        **asdict(sampling),
        "load": loading.load,
    }
    refuse_input(input, output)
    with ResumableOutput(output, resume=resume, overwrite=overwrite) as out:
        done = _finished(out, model, n, settings)
        waiting = (
            dialogue.start(task, its_team, n, sampling, pool)
            for task, its_team in left_to_do(reader, fixed_team, done)
        )
        first = next(waiting, None)
        if first is not None:  # nothing to do needs no model
            from optima_lite.engines.hf import HFEngine

            engine = HFEngine.load(model, loading, **size)
            _hold(chain([first], waiting), reader, engine, model, settings, out)
    if done.count:
        options.notice(f"gen: kept {done.count} finished tasks of {output}")


command.short_help = "Hold conversations: tasks -> trajectories."


def _hold(
    groups: Iterator[Sequence[dialogue.Conversation]],
    reader: Reader[Task],
    engine: Any,
    model: str,
    settings: dict[str, Any],
    out: ResumableOutput,
) -> None:
    """Run all conversations and write each group, in input order, as soon as it is complete."""
    tokens = 0
    ends: Counter[str] = Counter()
    with options.progress(unit="conv", desc="gen") as bar:
        for group in dialogue.run(groups, engine, reader.ready):
            for conversation in group:
                trajectory = conversation.trajectory(model, settings)
                out.write(trajectory)
                tokens += trajectory.tokens
                ends[trajectory.end] += 1
            bar.update(len(group))
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s")
    options.notice(f"gen: {ends.total()} conversations, {tokens} tokens; {options.tally(ends)}")


def _finished(out: ResumableOutput, model: str, n: int, settings: dict[str, Any]) -> Kept:
    """Whole groups of an interrupted run; an incomplete last one is cut off.

    Groups are written one after the other, so another incomplete one is somebody else's doing.
    """
    done: dict[str, dict[str, bytes]] = {}
    last: list[Trajectory] = []
    lines = whole = 0
    for record in out.kept(Trajectory):
        require_same(
            {**record.settings, "model": record.model}, {**settings, "model": model}, out.path
        )
        if last and last[0].task.id != record.task.id:
            if lines != whole:
                raise incomplete(out.path, whole, last[0].task.id, len(last), n)
            last = []
        if record.task.id in done:
            raise out.error(f"{record.task.id} appeared before: it has more than {n} lines")
        last.append(record)
        lines += 1
        if len(last) == n:
            whole = lines
            done[record.task.id] = made_from(record.task, record.team)
    if whole < lines:
        out.truncate_to(whole)
    return Kept(out.path, done)


def _show_prompt(
    reader: Reader[Task],
    team: Team | None,
    sampling: dialogue.Sampling,
    pool: dict[str, str] | None,
) -> None:
    for task in reader:
        its_team = team or load_team(task.team or task.setting)
        check_fits(its_team, task)
        (conversation,) = dialogue.start(task, its_team, 1, sampling, pool)
        click.echo(f"{task.id}: what {conversation.speaker.name} of team {its_team.name} sees\n")
        for message in conversation.request().messages:
            click.echo(f"[{message['role']}]\n{message['content']}")
        return
