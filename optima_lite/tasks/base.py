"""What a dataset is to `optima-lite tasks`: a name, its splits, and an iterator of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from optima_lite.records import Task


class Dataset(Protocol):
    """A dataset. Each is registered by name in `optima_lite.tasks.DATASETS`."""

    #: What the user types: `optima-lite tasks NAME`.
    name: str
    #: Split names that `--split` takes, training split first.
    splits: tuple[str, ...]
    #: Keys that `--set KEY=VALUE` takes -> one line of help each.
    settings: Mapping[str, str]

    def tasks(
        self,
        *,
        split: str,
        source: str | None,
        agents: int,
        seed: int,
        settings: Mapping[str, str],
    ) -> Iterator[Task]:
        """Tasks in the order of the source (endless for a generator), lazily.

        `source` is a hub id or a path (None: the dataset's own hub id); `agents` is into how many
        contexts a task is split; `seed` decides every split and shuffle of a row on its own, so a
        row's task does not depend on the rows before it. Raises InputError.
        """
        ...
