"""`optima-lite select`: from scored trajectories to SFT examples (Optima, Algorithm 2)."""

from __future__ import annotations

import tempfile

import click

from optima_lite.cli import options
from optima_lite.cli.groups import whole_group
from optima_lite.jsonl import Reader, atomic_output, check_free, dumps, groups, refuse_input
from optima_lite.records import Trajectory
from optima_lite.selection import best_of, eligible, examples, top_share


@click.command("select")
@options.input_argument
@options.output_option
@options.overwrite_option
@options.skip_bad_option
@click.option(
    "--theta",
    type=options.Finite(),
    default=0.5,
    show_default=True,
    help="Keep rewards above this (θ_sft).",
)
@click.option(
    "--top",
    type=options.Finite(0, 1, min_open=True),
    default=0.7,
    show_default=True,
    help="Of those, keep this share with the highest rewards.",
)
def command(
    input: str, output: str, overwrite: bool, skip_bad: bool, theta: float, top: float
) -> None:
    """Keep the best conversation per task, above θ, the top share; one example per agent.

    Conversations that were cut or failed, and degenerate ones, are never selected. The examples
    are `messages` in TRL's conversational format, in input order, without the format text.

    \b
    Examples:
      optima-lite select scored.jsonl -o examples.jsonl
      optima-lite gen … | optima-lite score … | optima-lite select --theta 0.6 -o examples.jsonl
    """
    check_free(output, overwrite=overwrite)
    refuse_input(input, output)
    reader = Reader(input, Trajectory, skip_bad, options.bad_line)
    rewards: list[float] = []
    offsets: list[int] = []
    tasks = unscored = without = 0
    # The top share is known at the end only, so the candidates' examples wait on disk: what stays
    # in memory is one number and one offset per task.
    with tempfile.TemporaryFile(prefix="optima-lite-") as spool:
        for group in groups(reader, lambda t: t.task.id):
            if not whole_group(reader, group):
                continue
            tasks += 1
            if any(t.reward is None for t in group):
                raise reader.error(
                    f"{group[0].task.id} has trajectories without a reward: run score first"
                )
            unscored += sum(not eligible(t) for t in group)
            best = best_of(group)
            if best is None:
                without += 1
                continue
            assert best.reward is not None
            if best.reward > theta:
                rewards.append(best.reward)
                offsets.append(spool.tell())
                for example in examples(best):
                    spool.write(dumps(example))
        offsets.append(spool.tell())
        kept = top_share(rewards, top)
        count = 0
        with atomic_output(output, overwrite=overwrite) as write:
            for index in kept:
                spool.seek(offsets[index])
                lines = spool.read(offsets[index + 1] - offsets[index])
                count += lines.count(b"\n")
                write(lines)
    options.notice(
        f"select: {tasks} tasks, {len(rewards)} with a reward above {theta:g}, "
        f"kept {len(kept)} ({count} examples); {unscored} conversations cut, failed or degenerate"
        + (f", {without} tasks with nothing else" if without else "")
    )
    if tasks and without == tasks:
        options.notice("select: every conversation was cut, failed or degenerate: see their `end`")
    elif not count:
        options.notice("select: nothing is left to train on: lower --theta, or sample more")


command.short_help = "Select what to train on: scored trajectories -> examples."
