"""The data sets that `optima-lite tasks NAME` knows; each lives in a file of its own.

To add one, write its file (see `base.Dataset`) and its line here. Modules are imported when a data
set is asked for, so that `--help` stays fast and a broken one does not break the others.
"""

from __future__ import annotations

import importlib

from optima_lite.errors import InputError
from optima_lite.tasks.base import Dataset

#: Name -> module:class. The class takes no arguments.
DATASETS: dict[str, str] = {
    "hotpotqa": "optima_lite.tasks.hotpotqa:HotpotQA",
    "relay": "optima_lite.tasks.relay:Relay",
}
#: Generators: they have no last task, hence no random order.
ENDLESS = frozenset({"relay"})


def get(name: str) -> Dataset:
    """The data set of that name. Raises InputError naming the known ones."""
    if name not in DATASETS:
        raise InputError(f"no data set {name!r}; the data sets are {', '.join(DATASETS)}")
    module, _, cls = DATASETS[name].partition(":")
    dataset: Dataset = getattr(importlib.import_module(module), cls)()
    return dataset
