"""`optima-lite eval`: sum up files of trajectories and compare them. Loads no model.

optima-lite eval before.jsonl after.jsonl

prints what the paper's tables hold (score and tokens per conversation), with intervals.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from optima_lite.cli import options
from optima_lite.evaluation import (
    CONFIDENCE,
    RESAMPLES,
    Comparison,
    Interval,
    Summary,
    Tally,
    compare,
    summarize,
    tally,
)
from optima_lite.jsonl import STDIN, Reader, atomic_output, dumps
from optima_lite.records import Trajectory

Row = tuple[str, ...]
# An empty first cell: the files' names stand there.
SUMMARY_HEADER: Row = (
    *("", "tasks", "N", "score %", "[95 %]", "F1 %", "EM %"),
    *("tokens", "[95 %]", "turns", "agreed %", "invalid %", "failed %"),
)
COMPARISON_HEADER: Row = ("tasks", "Δscore", "[95 %]", "token ratio", "[95 %]", "Δtokens", "[95 %]")


@click.command(name="eval")
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="NAME",
    help="A file's name in the output; once per file.  [default: the file's name]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every number.")
@click.option(
    "--resamples",
    type=click.IntRange(min=1),
    default=RESAMPLES,
    show_default=True,
    help="Bootstrap resamples behind each interval.",
)
@options.seed_option
@options.skip_bad_option
@options.output_option
@options.overwrite_option
def command(
    files: tuple[str, ...],
    labels: tuple[str, ...],
    as_json: bool,
    resamples: int,
    seed: int,
    skip_bad: bool,
    output: str,
    overwrite: bool,
) -> None:
    """Score, tokens and failures of trajectory FILES (default: stdin), with 95 % intervals.

    Each number is a mean over a task's trajectories, then over tasks; intervals are percentile
    bootstraps over tasks. With two or more files, each is compared with the first, paired over the
    tasks they share. The table shows scores and rates in percent, as papers do (54.5); --json
    holds fractions from 0 to 1 (0.545).

    \b
      score      the task's own metric, 0 where no answer was marked
      F1, EM     word F1 and exact match, whatever the task's metric is
      agreed     the agents marked the same answer, right or wrong
      invalid    no answer was marked (a wrong answer is not invalid)
      failed     cut or broken off: turn_cut, context_full, engine_error

    \b
    One file, or a pipe:
      optima-lite eval trajectories.jsonl
      optima-lite gen tasks.jsonl --model round1 | optima-lite eval
    Before and after training; differences are after − before:
      optima-lite eval before.jsonl after.jsonl
      optima-lite eval r0/test.jsonl r1/test.jsonl --label "round 0" --label "round 1"
    Numbers for a script:
      optima-lite eval before.jsonl after.jsonl --json | jq '.comparisons[0].token_ratio'
      optima-lite eval trajectories.jsonl --json -o summary.json
    """
    files = files or ("-",)
    if files.count("-") > 1:
        raise click.UsageError("stdin (-) can be read only once")
    if labels and len(labels) != len(files):
        raise click.UsageError(f"{len(labels)} --label for {len(files)} files: give one per file")
    if output != "-" and os.path.realpath(output) in {os.path.realpath(f) for f in files}:
        raise click.UsageError(f"-o {output} is one of the files to read")

    names = _names(files, labels)
    summaries: list[Summary] = []
    comparisons: list[Comparison] = []
    first: Tally | None = None
    with atomic_output(output, overwrite=overwrite) as write:
        for path, name in zip(files, names, strict=True):
            seen = _read(path, name, skip_bad)
            summaries.append(summarize(seen, resamples=resamples, seed=seed))
            if first is None:
                first = seen
            else:
                comparisons.append(compare(first, seen, resamples=resamples, seed=seed))
        if as_json:
            settings = {"confidence": CONFIDENCE, "resamples": resamples, "seed": seed}
            write(dumps(_json(files, names, summaries, comparisons) | settings))
        else:
            write(_text(names, summaries, comparisons, resamples, seed).encode())


def _names(files: tuple[str, ...], labels: tuple[str, ...]) -> list[str]:
    """Labels; else the last parts of the paths, or whole paths where those would be equal."""
    if labels:
        shown = list(labels)
    else:
        paths = [STDIN if path == "-" else path for path in files]
        short = [Path(path).name for path in paths]
        shown = short if len(set(short)) == len(short) else paths
    # A name is one word of a table row and valid UTF-8, whatever the file system allows.
    return [" ".join(click.format_filename(name).split()) for name in shown]


def _read(path: str, name: str, skip_bad: bool) -> Tally:
    reader = Reader(path, Trajectory, skip_bad=skip_bad, on_bad=options.bad_line)
    seen = tally(reader, lambda records: options.progress(records, desc=name, unit=" conv"))
    if reader.skipped:
        options.notice(f"{name}: {reader.skipped} lines skipped")
    return seen


def _json(
    files: tuple[str, ...],
    names: list[str],
    summaries: list[Summary],
    comparisons: list[Comparison],
) -> dict[str, Any]:
    return {
        "files": [
            {"label": name, "file": click.format_filename(path), **asdict(summary)}
            for name, path, summary in zip(names, files, summaries, strict=True)
        ],
        "comparisons": [
            {"label": name, "against": names[0], **asdict(comparison)}
            for name, comparison in zip(names[1:], comparisons, strict=True)
        ],
    }


def _text(
    names: list[str],
    summaries: list[Summary],
    comparisons: list[Comparison],
    resamples: int,
    seed: int,
) -> str:
    rows = [_row(name, summary) for name, summary in zip(names, summaries, strict=True)]
    parts = [_align([SUMMARY_HEADER, *rows])]
    notes = []
    if comparisons:
        pairs = list(zip(names[1:], comparisons, strict=True))
        rows = [_difference(name, comparison) for name, comparison in pairs]
        parts.append(_align([(f"against {names[0]}", *COMPARISON_HEADER), *rows]))
        notes = [f"note: {name}: {note}\n" for name, c in pairs for note in c.notes]
    how = f"Means over tasks; {resamples} bootstrap resamples of the tasks, seed {seed}.\n"
    return "\n".join([*parts, "".join([*notes, how])])


def _row(name: str, s: Summary) -> Row:
    fewest, most = s.per_task
    return (
        name,
        str(s.tasks),
        str(most) if fewest == most else f"{fewest}-{most}",
        f"{100 * s.score:.1f}",
        _interval(s.score_interval, ".1f", 100),
        f"{100 * s.f1:.1f}",
        f"{100 * s.exact:.1f}",
        f"{s.tokens:.1f}",
        _interval(s.tokens_interval, ".1f"),
        f"{s.turns:.1f}",
        *(f"{100 * rate:.1f}" for rate in (s.agreed, s.invalid, s.failed)),
    )


def _difference(name: str, c: Comparison) -> Row:
    return (
        name,
        str(c.tasks),
        f"{100 * c.score:+.1f}",
        _interval(c.score_interval, "+.1f", 100),
        "-" if c.token_ratio is None else f"{c.token_ratio:.3f}",
        _interval(c.token_ratio_interval, ".3f"),
        f"{c.tokens:+.1f}",
        _interval(c.tokens_interval, "+.1f"),
    )


def _interval(interval: Interval, style: str, scale: float = 1.0) -> str:
    if interval is None:
        return "-"
    low, high = (format(scale * bound, style) for bound in interval)
    return f"[{low}, {high}]"


def _align(table: list[Row]) -> str:
    """Columns two spaces apart: the first flush left, the numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]) + "\n")
    return "".join(lines)
