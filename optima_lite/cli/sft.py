"""`optima-lite sft`: supervised fine-tuning on selected conversations (Optima, iSFT)."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from optima_lite.cli import options, training
from optima_lite.engines.loading import LoadOptions, ModelSpec
from optima_lite.errors import TrainingError
from optima_lite.jsonl import Reader
from optima_lite.records import Example


@click.command("sft")
@options.input_argument
@training.target_options
@options.skip_bad_option
@training.start_option
@click.option(
    "--micro-batch-size",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Examples computed at once; changes memory, not the result.",
)
@training.common_options("examples", full_lr=2e-5, lora_lr=2e-4, epochs=3.0, batch_size=32)
@options.loading_options
def command(
    input: str,
    skip_bad: bool,
    model: str,
    micro_batch_size: int,
    target: training.Target,
    common: dict[str, Any],
    loading: LoadOptions,
) -> None:
    """Train a model on examples: each agent's own turns, nothing else.

    Works in DIR.partial and renames it to DIR when finished. DIR holds the adapter or the weights,
    the tokenizer, training.jsonl (the loss curve) and optima_lite.json (settings and versions).

    \b
    Examples:
      optima-lite sft examples.jsonl --model relay -o runs/round1
      optima-lite sft examples.jsonl --model runs/round1 --resume -o runs/round2
      optima-lite sft examples.jsonl --model ORG/NAME --load 4bit --dry-run
      accelerate launch -m optima_lite sft examples.jsonl --model ORG/NAME --tune full -o out
    """
    training.check(target, common["tune"], loading)
    examples = list(Reader(input, Example, skip_bad, options.bad_line))
    if not examples:
        raise TrainingError("there are no examples to train on")

    from optima_lite.training import sft
    from optima_lite.training.common import TrainSettings
    from optima_lite.training.encode import audit

    settings = TrainSettings(
        micro_batch_size=micro_batch_size,
        **common,
    )

    def prepare(spec: ModelSpec, tokenizer: Any, chat: Any) -> training.Prepared:
        report = audit(examples, chat, settings.max_length)
        return training.Prepared(
            report.lines(chat),
            sft.resolved_settings(settings, spec, loading, report.rows),
            partial(sft.train, report.rows, spec, tokenizer, loading, settings),
        )

    training.execute("sft", target, model, loading, prepare)


command.short_help = "Fine-tune on examples: examples -> a model directory."
