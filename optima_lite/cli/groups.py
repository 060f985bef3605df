"""What commands demand of their input: gen and tree of tasks, score and select of groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from optima_lite.cli import options
from optima_lite.errors import InputError
from optima_lite.jsonl import Kept, Reader, digest
from optima_lite.records import Task, Team, Trajectory
from optima_lite.teams import check_fits, load_team


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


def left_to_do(reader: Reader[Task], fixed: Team | None, done: Kept) -> Iterator[tuple[Task, Team]]:
    """Each task with its team (`fixed`, else the task's own), without those that are done.

    Raises InputError for an id that comes back, TeamError where team and task do not fit, and
    OutputError where the input is not what the finished part was made from.
    """
    teams: dict[str, Team] = {}
    seen: set[int] = set()
    for task in reader:
        if hash(task.id) in seen:
            raise reader.error(f"{task.id} appeared before: ids must be unique")
        seen.add(hash(task.id))
        name = task.team or task.setting
        if fixed is None and name not in teams:
            teams[name] = load_team(name)
        team = fixed or teams[name]
        check_fits(team, task)
        if not done.skip(task.id, partial(made_from, task, team)):
            yield task, team
    done.end()


def made_from(task: Task, team: Team) -> dict[str, bytes]:
    """What a finished task's output must have been made from, for `Kept`."""
    return {"the task": digest(task), f"team {team.name}": digest(team)}
