"""The errors a user can cause. The command line prints each as one line and exits 1, or 2
for a SettingError.

Anything else that escapes is a bug of ours; `--debug` shows the traceback of both kinds.
"""

from __future__ import annotations


class OptimaError(Exception):
    """Base class; the message is one line, written for the person at the terminal."""


class InputError(OptimaError):
    """A file or a record is not what the command needs.

    `source` is the file's name ("<stdin>" for a pipe) and `line` its 1-based line; both are put in
    front of the message the way compilers do, so that editors can jump there.
    """

    def __init__(self, message: str, source: str | None = None, line: int | None = None):
        where = ":".join(str(part) for part in (source, line) if part is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.reason = message
        self.source = source
        self.line = line


class OutputError(OptimaError):
    """The output exists, cannot be written, or was made with other settings."""


class SettingError(OptimaError):
    """Options that cannot work, alone or together: wrong usage, exit code 2."""


class TeamError(OptimaError):
    """A team file is wrong, or the team does not fit the task."""


class ModelError(OptimaError):
    """A model, adapter, tokenizer or chat template cannot be loaded or used."""


class TrainingError(OptimaError):
    """The data or the settings of a training run cannot work."""


class Diverged(TrainingError):
    """Training led to numbers that are not finite; there is nothing to go on from."""
