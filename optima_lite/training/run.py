"""What every training run shares: its directory, its checkpoints, its log.

A run works in `OUT.partial/` and renames the finished model to `OUT`, so that OUT exists only when
training is complete. OUT.partial holds checkpoints; `--resume` goes on from the last whole one.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import orjson
from accelerate import PartialState
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optima_lite.errors import Diverged, OutputError, SettingError
from optima_lite.jsonl import require_same

SETTINGS = "optima_lite.json"
LOG = "training.jsonl"
#: Settings that decide memory, time and what a stop costs, not the result: a resumed run may change
#: them.
FREE = ("micro_batch_size", "micro_tokens", "gradient_checkpointing", "checkpoint_every")
_WHOLE = "complete"  # marks a checkpoint whose every file was written
_PACKAGES = ("optima-lite", "torch", "transformers", "peft", "accelerate", "bitsandbytes")


class RunDirectory:
    """OUT and OUT.partial of one run.

    `open` returns False where the run is finished already (with `resume`). Raises OutputError
    where something is in the way or was made with other settings.
    """

    def __init__(self, out: Path):
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.checkpoints = self.partial / "checkpoints"
        self.model = self.partial / "model"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse early what `open` would refuse, without touching anything."""
        if resume and overwrite:
            raise SettingError("--resume and --overwrite exclude each other")
        if not self.out.parent.is_dir():
            raise OutputError(f"{self.out.parent} does not exist: mkdir -p it first")
        if self.out.exists() and not (self.out / SETTINGS).is_file():
            raise OutputError(f"{self.out} exists and is not a model of ours: choose another -o")
        if self.out.exists() and not (resume or overwrite):
            raise OutputError(f"{self.out} exists: --overwrite trains it anew")
        if self._unfinished() and not (resume or overwrite):
            raise OutputError(
                f"{self.partial} is an unfinished run: --resume goes on, --overwrite starts anew"
            )

    def open(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> bool:
        """Prepare OUT.partial for a run with these settings.

        Under `accelerate launch` the first process does so while the others wait.
        """
        state = PartialState()
        if state.is_main_process:
            self._open(settings, resume=resume, overwrite=overwrite)
        state.wait_for_everyone()
        return self.partial.exists()

    def _open(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        self.check(resume=resume, overwrite=overwrite)
        unfinished = self._unfinished()
        finished = resume and self.out.exists()
        # Where both exist, somebody trains OUT anew (--overwrite) and was stopped; unless the
        # stop came between the renaming of the finished model and the removal of what it left.
        shaping = _shaping(settings)
        if finished and (not unfinished or _settings(self.out) == shaping):
            require_same(_settings(self.out), shaping, str(self.out))
            if unfinished and _settings(self.partial) != shaping:
                raise OutputError(
                    f"{self.out} is finished, and {self.partial} is an unfinished run with other "
                    "settings: remove it, or resume it with its own"
                )
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        if resume and unfinished:
            require_same(_settings(self.partial), shaping, str(self.partial))
        else:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            document = {"settings": settings, "versions": versions()}
            write_json(self.partial / SETTINGS, document)
        self.checkpoints.mkdir(exist_ok=True)
        for checkpoint in self.checkpoints.iterdir():
            if not (checkpoint / _WHOLE).is_file():
                shutil.rmtree(checkpoint)
        shutil.rmtree(self.model, ignore_errors=True)

    def _unfinished(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.partial / SETTINGS).is_file()

    def abandon(self) -> None:
        """Leave the log of a run that nobody should go on with: the next one starts anew, with
        whatever settings."""
        (self.partial / SETTINGS).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def last_checkpoint(self) -> Path | None:
        """The latest whole checkpoint."""
        found = sorted(self.checkpoints.iterdir(), key=lambda p: int(p.name.rpartition("-")[2]))
        return found[-1] if found else None

    def finish(self) -> None:
        """Make OUT.partial/model the finished OUT."""
        shutil.copy(self.partial / SETTINGS, self.model / SETTINGS)
        # The old model is put aside, not deleted, until the new one is in place.
        old = self.out.with_name(self.out.name + ".old")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.out.rename(old)
        self.model.rename(self.out)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(self.partial)


class RunLog(TrainerCallback):
    """Writes training.jsonl line by line, marks whole checkpoints, shows progress on stderr."""

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="train",
            unit="step",
            file=sys.stderr,
            disable=not sys.stderr.isatty() or not state.is_world_process_zero,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._bar.update(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:
            self._bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")
            # The gradient may be inf now and then in fp16: the scaler leaves such steps out.
            if not all(math.isfinite(float(v)) for k, v in logs.items() if k != "grad_norm"):
                # The first step's loss is that of the model as it was given.
                advice = "lower --lr" if state.global_step > 1 else "the model gives no numbers"
                raise Diverged(f"the loss of step {state.global_step} is not finite: {advice}")
        if state.is_world_process_zero:
            self.write(self._directory.partial / LOG, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            checkpoint = self._directory.checkpoints / f"checkpoint-{state.global_step}"
            (checkpoint / _WHOLE).touch()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._bar.close()

    @staticmethod
    def write(path: Path, state: TrainerState) -> None:
        """The loss curve so far; a resumed run's earlier steps come from its checkpoint.

        Without the Trainer's closing line, whose means leave out what was done before a resume.
        """
        option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SORT_KEYS  # checkpoints sort, memory not
        steps = (entry for entry in state.log_history if "loss" in entry)
        path.write_bytes(b"".join(orjson.dumps(entry, option=option) for entry in steps))


def join(device: str) -> None:
    """Meet the other processes that `accelerate launch` or `torchrun` started, if there are any."""
    PartialState(cpu=device.startswith("cpu"))


def is_main_process() -> bool:
    """Whether this is the process that speaks and writes, of those `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def versions() -> dict[str, str]:
    """Versions of what shapes a training run."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, document: dict[str, Any]) -> None:
    """A small JSON file for people to read, renamed into place."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    temporary.replace(path)


def _shaping(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in FREE}


def _settings(directory: Path) -> dict[str, Any]:
    """The stored settings that shape the result."""
    try:
        return _shaping(orjson.loads((directory / SETTINGS).read_bytes())["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OutputError(
            f"{directory / SETTINGS} cannot be read: --overwrite starts anew"
        ) from None
