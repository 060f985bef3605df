"""`optima-lite score`: the reward of every trajectory (Optima, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click

from optima_lite.cli import options
from optima_lite.cli.groups import whole_group
from optima_lite.engines.loading import LoadOptions, ModelSpec, resolve
from optima_lite.errors import OutputError
from optima_lite.jsonl import (
    Kept,
    Reader,
    ResumableOutput,
    digest,
    groups,
    incomplete,
    refuse_input,
    require_same,
)
from optima_lite.records import Trajectory
from optima_lite.reward import Losses, Weights, score_group


@click.command("score")
@options.record_options
@options.model_option("The base model of R_loss; an adapter is left off. See gen --help for names.")
@options.weight_options
@click.option(
    "--loss-context",
    type=click.Choice(["none", "dialogue"]),
    default="none",
    show_default=True,
    help="Score a turn's language on its own, or after the turns before it.",
)
@click.option(
    "--reuse", is_flag=True, help="Keep the stored losses and only weigh anew: needs no model."
)
@options.loading_options
def command(
    input: str,
    output: str,
    resume: bool,
    overwrite: bool,
    skip_bad: bool,
    model: str | None,
    loss_context: str,
    reuse: bool,
    weights: Weights,
    loading: LoadOptions,
) -> None:
    """Write `reward` and its parts to trajectories; a task's lines must stand together.

    reward = task score − λ_token · tokens / most tokens in the group + λ_loss / worst turn's loss

    \b
    Examples:
      optima-lite gen tasks.jsonl --model relay | optima-lite score --model relay -o scored.jsonl
      optima-lite score traj.jsonl --model smollm2 --resume -o scored.jsonl
      optima-lite score scored.jsonl --reuse --lambda-token 0.3 -o lighter.jsonl
    """
    if reuse == bool(model):
        raise click.UsageError("give either --model (compute losses) or --reuse (keep them)")
    if reuse and loss_context != "none":
        raise click.UsageError("--loss-context goes with --model: --reuse keeps the losses")
    reader = Reader(input, Trajectory, skip_bad, options.bad_line)
    refuse_input(input, output)
    base = resolve(model).without_adapter if model else None
    settings = {
        "lambda_token": weights.token,
        "lambda_loss": weights.loss,
        "loss_context": None if reuse else loss_context,
        "base": base.name if base else None,
    }
    engine: Any = None
    with (
        ResumableOutput(output, resume=resume, overwrite=overwrite) as out,
        options.progress(unit="conv", desc="score") as bar,
    ):
        done = _finished(out, settings, reuse)
        for group in groups(reader, lambda t: t.task.id):
            if not whole_group(reader, group):
                continue
            if not done.skip(group[0].task.id, partial(_parts, group)):
                if base is None:
                    scored = _reweigh(reader, group, weights)
                else:
                    engine = engine or _load(base, loading)
                    losses = _losses(engine, group, loss_context)
                    scored = score_group(group, losses, weights, base.name, loss_context)
                for trajectory in scored:
                    out.write(trajectory)
            bar.update(len(group))
        done.end()
    if done.count:
        options.notice(f"score: kept {done.count} finished tasks of {output}")


command.short_help = "Compute rewards (Eq. 1): trajectories -> the same with reward."


def _load(base: ModelSpec, loading: LoadOptions) -> Any:
    from optima_lite.engines.hf import HFEngine

    return HFEngine.load(base, loading)


def _losses(engine: Any, group: Sequence[Trajectory], context: str) -> list[list[float | None]]:
    """Losses of every turn of a group; texts that occur twice are scored once."""
    from optima_lite.engines.base import Utterance

    wanted: list[list[Utterance]] = []
    for trajectory in group:
        said: list[str] = []
        row = []
        for turn in trajectory.turns:
            before = "\n".join(said) if context == "dialogue" and said else None
            row.append(Utterance(turn.text, before))
            said.append(f"{turn.agent}: {turn.text}")
        wanted.append(row)
    unique = list(dict.fromkeys(u for row in wanted for u in row))
    losses = dict(zip(unique, engine.losses(unique), strict=True))
    return [[losses[u] for u in row] for row in wanted]


def _reweigh(
    reader: Reader[Trajectory], group: Sequence[Trajectory], weights: Weights
) -> list[Trajectory]:
    """The group's rewards from stored losses."""
    scores = [t.score for t in group]
    stored: list[Losses] = []
    for trajectory, score in zip(group, scores, strict=True):
        if score is None or len(score.losses) != len(trajectory.turns):
            raise reader.error(f"{trajectory.id} has no stored losses: score it with --model first")
        stored.append(score.losses)
    made = {(score.base, score.loss_context) for score in scores if score}
    if len(made) > 1:
        raise reader.error(f"{group[0].task.id}: losses of different models in one group")
    ((base, context),) = made
    return score_group(group, stored, weights, base, context)


def _parts(group: Sequence[Trajectory]) -> dict[str, list[bytes]]:
    """What a finished group must have been made from."""
    return {"the conversations": [_fingerprint(t) for t in group]}


def _fingerprint(trajectory: Trajectory) -> bytes:
    """A trajectory's digest, without what score adds."""
    return digest(replace(trajectory, reward=None, score=None))


def _finished(out: ResumableOutput, settings: dict[str, Any], reuse: bool) -> Kept:
    """Fingerprints of an interrupted run's trajectories by task; a torn last group is cut off."""
    done: dict[str, list[bytes]] = {}
    lines = 0
    wanted: Any = None
    for record in out.kept(Trajectory):
        if record.score is None:
            raise OutputError(f"{out.path} has records without a score: is it score's output?")
        old = {key: getattr(record.score, key) for key in settings}
        if reuse:
            old |= {"base": None, "loss_context": None}
        require_same(old, settings, out.path)
        if done and record.task.id != next(reversed(done)):
            if record.task.id in done:
                raise out.error(f"{record.task.id} appeared before: remove one of the two groups")
            name, last = next(reversed(done.items()))
            if isinstance(wanted, int) and len(last) < wanted:
                raise incomplete(out.path, lines - len(last), name, len(last), wanted)
        done.setdefault(record.task.id, []).append(_fingerprint(record))
        lines += 1
        wanted = record.settings.get("n")
    if done:
        # Only the last group can be torn. Where its size is not known it is done again.
        name, last = next(reversed(done.items()))
        if len(last) != wanted:
            out.truncate_to(lines - len(last))
            del done[name]
    return Kept(out.path, {name: {"the conversations": digests} for name, digests in done.items()})
