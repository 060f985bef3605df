"""Options that several commands share, each declared once, and their helpers."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

import click
from tqdm import tqdm

from optima_lite.dialogue import Sampling
from optima_lite.engines.loading import LoadOptions
from optima_lite.errors import InputError
from optima_lite.reward import Weights

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Finite(click.FloatRange):
    """A number in a range, neither nan nor inf: JSON could not hold them."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


input_argument = click.argument("input", default="-", metavar="[INPUT]")

output_option = click.option(
    "-o",
    "--output",
    default="-",
    metavar="FILE",
    help="Where to write; - is stdout.  [default: -]",
)
resume_option = click.option(
    "--resume", is_flag=True, help="Go on after the records that -o FILE already has."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace -o FILE.")
skip_bad_option = click.option(
    "--skip-bad", is_flag=True, help="Count and pass over lines that cannot be read."
)


def record_options(command: F) -> F:
    """What every command has that reads records and can resume writing them."""
    for option in (
        skip_bad_option,
        overwrite_option,
        resume_option,
        output_option,
        input_argument,
    ):
        command = option(command)
    return command


seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Decides every draw.",
)
MODEL_HELP = (
    "A hub id, a directory (weights or adapter), a .gguf file, or built in: "
    "smollm2 (SmolLM2-135M-Instruct), relay (smollm2 with the demo's starting adapter)."
)


def model_option(text: str = MODEL_HELP, **kwargs: Any) -> Callable[[F], F]:
    """--model, with a command's own words about what the model is for."""
    return click.option("--model", "-m", metavar="MODEL", help=text, **kwargs)


team_option = click.option(
    "--team", metavar="NAME|FILE", help="A built-in team or a YAML file.  [default: the task's]"
)


def together(name: str, make: Callable[..., Any], **declared: Callable[[Any], Any]) -> Any:
    """A decorator that declares options by parameter name and hands a command one `name` made of
    them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            kwargs[name] = make(**{parameter: kwargs.pop(parameter) for parameter in declared})
            return command(*args, **kwargs)

        out: Callable[..., Any] = gathered
        for option in reversed(declared.values()):
            out = option(out)
        return out

    return decorate


#: How weights are held, `loading: LoadOptions`.
loading_options = together(
    "loading",
    LoadOptions,
    load=click.option(
        "--load",
        type=click.Choice(["auto", "fp32", "bf16", "fp16", "4bit"]),
        default="auto",
        show_default=True,
        help="How to hold the weights. auto: bf16 where the hardware computes in it, else fp32.",
    ),
    device=click.option(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, …  [default: a GPU if any]"
    ),
    trust_remote_code=click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run Python code that comes with the model. Only for models you trust.",
    ),
)

#: λ of Eq. 1, `weights: Weights`.
weight_options = together(
    "weights",
    lambda lambda_token, lambda_loss: Weights(lambda_token, lambda_loss),
    lambda_token=click.option(
        "--lambda-token",
        type=Finite(min=0),
        default=Weights().token,
        show_default=True,
        help="Weight of R_token.",
    ),
    lambda_loss=click.option(
        "--lambda-loss",
        type=Finite(min=0),
        default=Weights().loss,
        show_default=True,
        help="Weight of 1 / R_loss.",
    ),
)

#: How turns are drawn, `sampling: Sampling`.
sampling_options = together(
    "sampling",
    Sampling,
    temperature=click.option(
        "-t",
        "--temperature",
        type=Finite(min=0),
        default=Sampling().temperature,
        show_default=True,
        help="0 is greedy.",
    ),
    max_turns=click.option(
        "--max-turns", type=click.IntRange(min=1), help="Turn limit.  [default: the team's]"
    ),
    max_turn_tokens=click.option(
        "--max-turn-tokens",
        type=click.IntRange(min=1),
        help="Token limit of a turn.  [default: the team's]",
    ),
    seed=seed_option,
)

#: What an engine may use, `size`: keyword arguments of HFEngine.
size_options = together(
    "size",
    lambda context, batch_size, cache_gb: {
        "context": context,
        "slots": batch_size,
        "cache_gb": cache_gb,
    },
    context=click.option(
        "--context",
        type=click.IntRange(min=1),
        help="Context window in tokens.  [default: the model's]",
    ),
    batch_size=click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=64,
        show_default=True,
        help="Turns that run at once.",
    ),
    cache_gb=click.option(
        "--cache-gb",
        type=Finite(min=0.1),
        default=4.0,
        show_default=True,
        help="Memory for keys and values.",
    ),
)


def given(parameter: str) -> bool:
    """Whether the running command was told this parameter, rather than left to its default."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not click.core.ParameterSource.DEFAULT


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tally(ends: Counter[str]) -> str:
    """How conversations ended, the commonest first: `7 agreement, 1 turn_cut`."""
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


def notice(message: str) -> None:
    """A line for the person at the terminal; stdout is for records only."""
    click.echo(message, err=True)


def bad_line(error: InputError) -> None:
    """What --skip-bad says about each line."""
    notice(f"skipped: {error}")


def progress(items: Iterable[T] | None = None, **kwargs: Any) -> Any:
    """A tqdm bar on stderr, silent where stderr is no terminal."""
    return tqdm(items, file=sys.stderr, disable=not sys.stderr.isatty(), **kwargs)


def first(items: Iterable[T], limit: int | None) -> Iterator[T]:
    """The first `limit` items, all where it is None; takes not one more than it gives."""
    if limit == 0:
        return
    for count, item in enumerate(items, start=1):
        yield item
        if limit is not None and count >= limit:
            return
