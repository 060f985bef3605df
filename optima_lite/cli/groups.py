"""What score and select demand of a task's trajectories before they compare them."""

from __future__ import annotations

from collections.abc import Sequence

from optima_lite.cli import options
from optima_lite.errors import InputError
from optima_lite.jsonl import Reader
from optima_lite.records import Trajectory


def whole_group(reader: Reader[Trajectory], group: Sequence[Trajectory]) -> bool:
    """Whether the group is all of what gen made for its task.

    R_token compares within the group, so a part of it would get other rewards. Raises InputError
    where it is not; with --skip-bad a group that lost lines is passed over and False.
    """
    name = group[0].task.id
    if len({t.id for t in group}) < len(group):
        raise reader.error(f"{name}: a trajectory id occurs twice")
    wanted = group[0].settings.get("n")
    if not isinstance(wanted, int) or len(group) >= wanted:
        return True
    lack = f"{name} has {len(group)} of {wanted} trajectories"
    if not reader.skip_bad:
        raise InputError(
            f"{lack}: finish gen --resume, or leave the task out with --skip-bad", reader.source
        )
    options.notice(f"skipped: {reader.source}: {lack}")
    return False
