"""`optima-lite dpo`: preference training on pairs of sibling turns (Optima, iDPO, iSFT-DPO)."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from optima_lite.cli import options, training
from optima_lite.engines.loading import LoadOptions, ModelSpec
from optima_lite.errors import TrainingError
from optima_lite.jsonl import Reader
from optima_lite.records import Pair


@click.command("dpo")
@options.input_argument
@training.target_options
@options.skip_bad_option
@training.start_option
@click.option(
    "--beta",
    type=options.Finite(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="β: how little the model may move away from where it started.",
)
@click.option(
    "--alpha",
    type=options.Finite(min=0),
    default=1.0,
    show_default=True,
    help="Weight of the chosen turn's likelihood, per token (RPO); 0 is DPO alone, as in iSFT-DPO.",
)
@click.option(
    "--micro-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens computed at once; changes memory, not the result.",
)
@training.common_options("pairs", full_lr=5e-7, lora_lr=5e-6, epochs=1.0, batch_size=64)
@options.loading_options
def command(
    input: str,
    skip_bad: bool,
    model: str,
    beta: float,
    alpha: float,
    micro_tokens: int,
    target: training.Target,
    common: dict[str, Any],
    loading: LoadOptions,
) -> None:
    """Train a model to prefer the better of two turns that could follow the same conversation.

    The reference is MODEL itself, an adapter included. What pairs have in common is computed once.
    DIR is made as by sft; its training.jsonl logs both turns' log-probabilities and rewards apart.

    \b
    Examples:
      optima-lite dpo pairs.jsonl --model relay -o runs/round1
      optima-lite select trees.jsonl | optima-lite dpo --model runs/sft --alpha 0 -o runs/dpo
      optima-lite dpo pairs.jsonl --model ORG/NAME --load 4bit --beta 0.5 --dry-run
    """
    training.check(target, common["tune"], loading)
    found = list(Reader(input, Pair, skip_bad, options.bad_line))
    if not found:
        raise TrainingError("there are no pairs to train on")

    from optima_lite.training import dpo, pairs

    settings = dpo.DPOSettings(
        beta=beta,
        alpha=alpha,
        micro_tokens=micro_tokens,
        **common,
    )

    def prepare(spec: ModelSpec, tokenizer: Any, chat: Any) -> training.Prepared:
        rows, dropped = pairs.encode(found, chat, settings.max_length)
        lines = pairs.report(rows, dropped, dpo.plan(rows, settings), settings.max_length)
        return training.Prepared(
            [*lines, *pairs.marked(rows[0], chat)],
            dpo.resolved_settings(settings, spec, loading, rows),
            partial(dpo.train, rows, spec, tokenizer, loading, settings, say=_say),
        )

    training.execute("dpo", target, model, loading, prepare)


def _say(message: str) -> None:
    from optima_lite.training.run import is_main_process

    if is_main_process():
        options.notice(f"dpo: {message}")


command.short_help = "Train on preference pairs: pairs -> a model directory."
