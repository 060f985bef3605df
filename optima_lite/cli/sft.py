"""`optima-lite sft`: supervised fine-tuning on selected conversations (Optima, iSFT)."""

from __future__ import annotations

import time
from pathlib import Path

import click

from optima_lite.cli import options
from optima_lite.engines.loading import LoadOptions, load_tokenizer, pick_device, resolve
from optima_lite.errors import ModelError, TrainingError
from optima_lite.jsonl import Reader
from optima_lite.records import Example


@click.command("sft")
@options.input_argument
@click.option("-o", "--output", metavar="DIR", help="The model directory to make.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in DIR.partial.")
@click.option("--overwrite", is_flag=True, help="Replace DIR.")
@options.skip_bad_option
@options.model_option(
    "What to start from; an adapter is trained further. See gen --help for names.", required=True
)
@click.option(
    "--tune",
    type=click.Choice(["lora", "full"]),
    default="lora",
    show_default=True,
    help="Train an adapter, or all weights.",
)
@click.option(
    "--lr",
    type=options.Finite(min=0, min_open=True),
    help="Peak learning rate.  [default: 2e-5, with LoRA 2e-4]",
)
@click.option(
    "--epochs",
    type=options.Finite(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Passes over the examples.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Examples per optimiser step.",
)
@click.option(
    "--micro-batch-size",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Examples computed at once; changes memory, not the result.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=16),
    default=4096,
    show_default=True,
    help="Tokens of an example; partners' oldest turns are cut to fit.",
)
@click.option(
    "--lora-r",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Rank of a new adapter, on all linear layers; alpha is twice the rank.",
)
@click.option("--gradient-checkpointing", is_flag=True, help="Less memory for a third more time.")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Steps between checkpoints for --resume.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what training would see, and stop. Loads no weights."
)
@options.seed_option
@options.loading_options
def command(
    input: str,
    output: str | None,
    resume: bool,
    overwrite: bool,
    skip_bad: bool,
    model: str,
    tune: str,
    lr: float | None,
    epochs: float,
    batch_size: int,
    micro_batch_size: int,
    max_length: int,
    lora_r: int,
    gradient_checkpointing: bool,
    checkpoint_every: int,
    dry_run: bool,
    seed: int,
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
    if output is None and not dry_run:
        raise click.UsageError("-o DIR is missing: where should the model go?")
    if tune == "full" and loading.load == "4bit":
        raise click.UsageError("--tune full cannot train 4-bit weights: use --load bf16")
    examples = list(Reader(input, Example, skip_bad, options.bad_line))
    if not examples:
        raise TrainingError("there are no examples to train on")

    from optima_lite.chat import ChatEncoder
    from optima_lite.training import run, sft
    from optima_lite.training.encode import audit

    settings = sft.TrainSettings(
        tune=tune,
        lr=lr if lr is not None else (2e-4 if tune == "lora" else 2e-5),
        epochs=epochs,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_length=max_length,
        lora_r=lora_r,
        lora_alpha=2 * lora_r,
        gradient_checkpointing=gradient_checkpointing,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    spec = resolve(model)
    if output is not None:
        directory = run.RunDirectory(Path(output))
        if run.is_main_process():
            directory.check(resume=resume, overwrite=overwrite)
    run.join(pick_device(loading.device))
    tokenizer = load_tokenizer(spec, loading)
    chat = ChatEncoder(tokenizer)
    report = audit(examples, chat, max_length)
    if dry_run:
        for line in report.lines(chat):
            click.echo(line)
        return
    if not directory.open(
        sft.resolved_settings(settings, spec, loading, report.rows),
        resume=resume,
        overwrite=overwrite,
    ):
        if run.is_main_process():
            options.notice(f"sft: {output} is finished")
        return
    if run.is_main_process():
        for line in report.lines(chat):
            options.notice(f"sft: {line}")
    started = time.monotonic()
    try:
        last = sft.train(report.rows, spec, tokenizer, loading, settings, directory)
    except (RuntimeError, MemoryError) as error:
        if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
            raise ModelError(
                "out of memory: try a smaller --micro-batch-size, --gradient-checkpointing "
                "or --load 4bit"
            ) from error
        raise
    if not run.is_main_process():
        return
    options.notice(
        f"sft: {output} is finished: {last['steps']} steps, mean loss {last['loss']:.4f}, "
        f"{time.monotonic() - started:.0f} s"
    )


command.short_help = "Fine-tune on examples: examples -> a model directory."
