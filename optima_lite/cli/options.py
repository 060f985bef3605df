"""Options that several commands share, each declared once, and their helpers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

import click
from tqdm import tqdm

from optima_lite.engines.loading import LoadOptions
from optima_lite.errors import InputError

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
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Decides every draw."
)
MODEL_HELP = (
    "A hub id, a directory (weights or adapter), a .gguf file, or built in: "
    "smollm2 (SmolLM2-135M-Instruct), relay (smollm2 with the demo's starting adapter)."
)


def model_option(text: str = MODEL_HELP, **kwargs: Any) -> Callable[[F], F]:
    """--model, with a command's own words about what the model is for."""
    return click.option("--model", "-m", metavar="MODEL", help=text, **kwargs)


_load_option = click.option(
    "--load",
    type=click.Choice(["auto", "fp32", "bf16", "fp16", "4bit"]),
    default="auto",
    show_default=True,
    help="How to hold the weights. auto: bf16 where the hardware computes in it, else fp32.",
)
_device_option = click.option(
    "--device", default=None, metavar="NAME", help="cpu, cuda, cuda:1, …  [default: a GPU if any]"
)
_trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with the model. Only for models you trust.",
)


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--load, --device and --trust-remote-code, handed over as one `loading: LoadOptions`."""

    @_load_option
    @_device_option
    @_trust_option
    @wraps(command)
    def gathered(
        *args: Any, load: str, device: str | None, trust_remote_code: bool, **kwargs: Any
    ) -> Any:
        return command(*args, loading=LoadOptions(load, device, trust_remote_code), **kwargs)

    return gathered


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
