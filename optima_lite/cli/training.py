"""What sft and dpo have in common: options, early checks, the run and its errors."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optima_lite.cli import options
from optima_lite.engines.loading import (
    LoadOptions,
    ModelSpec,
    load_tokenizer,
    pick_device,
    resolve,
)
from optima_lite.errors import ModelError, OptimaError, OutputError
from optima_lite.locks import only_writer

if TYPE_CHECKING:
    from optima_lite.training.run import RunDirectory


@dataclass(frozen=True)
class Target:
    """Where a model goes, and what to do where something is."""

    output: str | None
    resume: bool
    overwrite: bool
    dry_run: bool


@dataclass(frozen=True)
class Prepared:
    """What training is about to do: the audit, the settings guard, and the run itself."""

    lines: list[str]
    settings: dict[str, Any]
    train: Callable[[Any], dict[str, Any]]  # of an opened RunDirectory


#: Where the model goes, `target: Target`.
target_options = options.together(
    "target",
    Target,
    output=click.option("-o", "--output", metavar="DIR", help="The model directory to make."),
    resume=click.option(
        "--resume", is_flag=True, help="Go on from the last checkpoint in DIR.partial."
    ),
    overwrite=click.option("--overwrite", is_flag=True, help="Replace DIR."),
    dry_run=click.option(
        "--dry-run",
        is_flag=True,
        help="Print what training would see, and stop. Loads no weights.",
    ),
)


def common_options(
    things: str, *, full_lr: float, lora_lr: float, epochs: float, batch_size: int
) -> Callable[[Any], Any]:
    """How to train, `common`: keyword arguments of the settings of either command.

    `things` are what is trained on; the numbers are the command's defaults.
    """

    def make(lr: float | None, tune: str, lora_r: int, **rest: Any) -> dict[str, Any]:
        lr = lr if lr is not None else (lora_lr if tune == "lora" else full_lr)
        return {"lr": lr, "tune": tune, "lora_r": lora_r, "lora_alpha": 2 * lora_r, **rest}

    plan = {
        "lr": click.option(
            "--lr",
            type=options.Finite(min=0, min_open=True),
            help=f"Peak learning rate.  [default: {full_lr:.0e}, with LoRA {lora_lr:.0e}]".replace(
                "e-0", "e-"
            ),
        ),
        "epochs": click.option(
            "--epochs",
            type=options.Finite(0, 10_000, min_open=True),
            default=epochs,
            show_default=True,
            help=f"Passes over the {things}.",
        ),
        "batch_size": click.option(
            "--batch-size",
            type=click.IntRange(min=1),
            default=batch_size,
            show_default=True,
            help=f"{things.capitalize()} per optimiser step.",
        ),
    }
    return options.together("common", make, **plan, **_SHARED)


#: What has the same defaults for both.
_SHARED: dict[str, Callable[[Any], Any]] = {
    "tune": click.option(
        "--tune",
        type=click.Choice(["lora", "full"]),
        default="lora",
        show_default=True,
        help="Train an adapter, or all weights.",
    ),
    "max_length": click.option(
        "--max-length",
        type=click.IntRange(min=16),
        default=4096,
        show_default=True,
        help="Tokens of a conversation; partners' oldest turns are cut to fit.",
    ),
    "lora_r": click.option(
        "--lora-r",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        help="Rank of a new adapter, on all linear layers; alpha is twice the rank.",
    ),
    "gradient_checkpointing": click.option(
        "--gradient-checkpointing", is_flag=True, help="Less memory for a third more time."
    ),
    "checkpoint_every": click.option(
        "--checkpoint-every",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="Steps between checkpoints for --resume.",
    ),
    "seed": options.seed_option,
}

start_option = options.model_option(
    "What to start from; an adapter is trained further. See gen --help for names.", required=True
)


def check(target: Target, tune: str, loading: LoadOptions) -> None:
    """Refuse what cannot work before anything is read."""
    if target.output is None and not target.dry_run:
        raise click.UsageError("-o DIR is missing: where should the model go?")
    if target.output is not None and not Path(target.output).name:  # "", ".", "/"
        raise click.UsageError(f"-o {target.output!r} is no name for a directory to make")
    if tune == "full" and loading.load == "4bit":
        raise click.UsageError("--tune full cannot train 4-bit weights: use --load bf16")


def execute(
    command: str,
    target: Target,
    model: str,
    loading: LoadOptions,
    prepare: Callable[[ModelSpec, Any, Any], Prepared],
) -> None:
    """Prepare with (model, tokenizer, chat encoder), show the audit, train, and say how it went."""
    from optima_lite.chat import ChatEncoder
    from optima_lite.training import run

    spec = resolve(model)
    if spec.adapter and options.given("lora_r"):
        options.notice(f"{command}: --lora-r is not used, since {model} has an adapter")
    directory = run.RunDirectory(Path(target.output)) if target.output is not None else None
    with ExitStack() as held:
        if directory and run.is_main_process():
            directory.check(resume=target.resume, overwrite=target.overwrite)
            if not target.dry_run:
                held.enter_context(only_writer(directory.out))
        run.join(pick_device(loading.device))
        tokenizer = load_tokenizer(spec, loading)
        prepared = prepare(spec, tokenizer, ChatEncoder(tokenizer))
        if target.dry_run:
            for line in prepared.lines:
                click.echo(line)
        elif directory:
            _train(command, directory, target, prepared)


def _train(command: str, directory: RunDirectory, target: Target, prepared: Prepared) -> None:
    from optima_lite.training import run

    notice = options.notice if run.is_main_process() else _silent
    if not directory.open(prepared.settings, resume=target.resume, overwrite=target.overwrite):
        notice(f"{command}: {directory.out} is finished")
        return
    for line in prepared.lines:
        notice(f"{command}: {line}")
    started = time.monotonic()
    try:
        last = prepared.train(directory)
    except OptimaError:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
            raise ModelError(
                "out of memory: try --gradient-checkpointing, --load 4bit, or less at once "
                "(sft --micro-batch-size, dpo --micro-tokens)"
            ) from error
        if _while_writing(error):
            free = shutil.disk_usage(directory.partial.parent).free / 2**20
            raise OutputError(
                f"{directory.partial} cannot be written; {free:.0f} MB are free on its disk: make "
                "room, then --resume"
            ) from error
        raise
    notice(
        f"{command}: {directory.out} is finished: {options.plural(last['steps'], 'step')}, "
        f"mean loss {last['loss']:.4f}, {time.monotonic() - started:.0f} s"
    )
    # Batches differ, so a loss that is a little higher says nothing.
    if last["last"] > 1.25 * last["first"]:
        notice(
            f"{command}: warning: the loss began at {last['first']:.3f} and ended at "
            f"{last['last']:.3f}: try a lower --lr"
        )


def _while_writing(error: Exception) -> bool:
    """Whether this is torch's or safetensors' way to say that a disk is full, say."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    signs = ("inline_container.cc", "PytorchStreamWriter", "Error while serializing: I/O error")
    return any(sign in str(error) for sign in signs)


def _silent(message: str) -> None:
    pass
