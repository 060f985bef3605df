"""`optima-lite`: the group, and how every command ends.

Exit codes: 0 done, 1 an error in the input or the model (one line on stderr), 2 wrong usage,
130 Ctrl-C, 141 the reader of our pipe went away (what the shell reports for SIGPIPE).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from optima_lite import __version__
from optima_lite.errors import OptimaError, SettingError

#: Command -> module, in the order of the pipeline. Modules are imported when needed, and none of
#: them imports torch at its top: `--help` and the model-free commands start fast.
COMMANDS = {
    "tasks": "optima_lite.cli.tasks",
    "gen": "optima_lite.cli.gen",
    "score": "optima_lite.cli.score",
    "tree": "optima_lite.cli.tree",
    "select": "optima_lite.cli.select",
    "sft": "optima_lite.cli.sft",
    "dpo": "optima_lite.cli.dpo",
    "eval": "optima_lite.cli.eval",
}


class ClosedPipe(Exception):
    """A BrokenPipeError under a name that click does not turn into exit code 1."""


@contextmanager
def _renamed() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipe from error


class LazyGroup(click.Group):
    """Finds commands by name without importing the others."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _renamed():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _renamed():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        if not any(param.name == "debug" for param in command.params):
            command.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; the commands are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)


def _debug_option() -> click.Option:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["OPTIMA_LITE_DEBUG"] = "1"

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error.",
    )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="optima-lite")
def cli() -> None:
    """Train teams of LLM agents to talk less and answer better (Optima, arXiv:2410.08115).

    \b
    One round: talk, reward, keep the best, train on it.
      optima-lite tasks relay --limit 32 \\
        | optima-lite gen --model relay -n 6 \\
        | optima-lite score --model relay \\
        | optima-lite select -o examples.jsonl
      optima-lite sft examples.jsonl --model relay -o round1
    """


cli.params.append(_debug_option())


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        cli.main(args=argv, prog_name="optima-lite", standalone_mode=False)
        # Buffered output must meet a closed pipe here, not in the interpreter's last breath.
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return 1
    except OptimaError as error:
        _trace()
        click.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, SettingError) else 1
    except (KeyboardInterrupt, click.Abort):
        _trace()
        click.echo("interrupted", err=True)
        return 130
    except (ClosedPipe, BrokenPipeError):
        # Nothing more can be written to stdout; keep the interpreter from trying.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        _trace()
        name = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {name}{error.strerror or error}", err=True)
        return 1
    except Exception as error:
        if os.environ.get("OPTIMA_LITE_DEBUG"):
            raise
        click.echo(f"error: {type(error).__name__}: {error} (a bug? --debug shows where)", err=True)
        return 1


def _trace() -> None:
    if os.environ.get("OPTIMA_LITE_DEBUG"):
        traceback.print_exc()
