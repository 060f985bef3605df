"""Select what to train on: the best conversation per task, above θ, the top share of those.

Optima, Section 3.2 (Algorithm 2): one trajectory per task, reward > θ_sft, top 70 % by reward.
Pure functions; the files are the command's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optima_lite.records import WHOLE_ENDS, Example, Trajectory
from optima_lite.teams import view


def eligible(trajectory: Trajectory) -> bool:
    """Whether it may be trained on: scored, whole (not cut, not failed), and not degenerate."""
    return (
        trajectory.reward is not None
        and trajectory.score is not None
        and not trajectory.score.degenerate
        and trajectory.end in WHOLE_ENDS
    )


def best_of(group: Sequence[Trajectory]) -> Trajectory | None:
    """The eligible trajectory with the highest reward, the first of equals; None without one."""
    candidates = [t for t in group if eligible(t)]
    return max(candidates, key=lambda t: t.reward or 0.0) if candidates else None


def top_share(rewards: Sequence[float], share: float) -> list[int]:
    """Indices, ascending, of the ⌈share · n⌉ highest rewards; of equals the earlier ones."""
    # Rounded first: 0.07 * 100 is a hair above 7 in binary, and must not become 8.
    keep = math.ceil(round(share * len(rewards), 9))
    ranked = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    return sorted(ranked[:keep])


def examples(trajectory: Trajectory) -> list[Example]:
    """One SFT example per agent that spoke: its view, rendered without the format text."""
    out = []
    for agent in trajectory.team.agents:
        own = [i for i, turn in enumerate(trajectory.turns) if turn.agent == agent.name]
        if not own:
            continue
        messages = view(trajectory.team, trajectory.task, agent, trajectory.turns[: own[-1] + 1])
        out.append(
            Example(
                messages=tuple(messages),
                agent=agent.name,
                trajectory_id=trajectory.id,
                reward=trajectory.reward or 0.0,
            )
        )
    return out
