"""The reward of a trajectory, Eq. 1 of Optima: pure functions, no model.

    R = R_task − λ_token · R_token + λ_loss / R_loss

>>> combine(task=1.0, tokens=0.5, loss=2.0, lambda_token=0.6, lambda_loss=1.0)
1.2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optima_lite import metrics
from optima_lite.records import Score, Team, Trajectory

Losses = Sequence[float | None]


@dataclass(frozen=True)
class Weights:
    """λ_token and λ_loss of Eq. 1; the defaults are Table 8's for HotpotQA, iSFT."""

    token: float = 0.6
    loss: float = 1.0


def combine(
    task: float, tokens: float, loss: float | None, lambda_token: float, lambda_loss: float
) -> float:
    """Eq. 1. `task` and `tokens` in [0, 1], `loss` in nats per token, > 0.

    Where there is no loss (None, or 0 from a model that is certain of every token, which would
    divide by zero), the readability term is 0: nothing was said that could be read.
    """
    readability = lambda_loss / loss if loss else 0.0
    return task - lambda_token * tokens + readability


def worst(losses: Losses) -> float | None:
    """R_loss: the largest of the turns' losses; None where no turn has one."""
    return max((loss for loss in losses if loss is not None), default=None)


def degenerate(trajectory: Trajectory) -> bool:
    """Whether some turn is not a turn: it is empty, or its speaker also wrote another's part.

    Another's part begins with another agent's name and a colon, at the start of a line or of a
    sentence ("… is Tilda Marsk. Bob: She was born …").
    """
    return any(not_a_turn(trajectory.team, t.agent, t.text) for t in trajectory.turns)


def not_a_turn(team: Team, agent: str, text: str) -> bool:
    """Whether what an agent said is degenerate: see `degenerate`."""
    if not text.strip():
        return True
    others = [re.escape(a.name) for a in team.agents if a.name != agent]
    foreign = rf"(?:^\W*|[.!?]\W*\s)(?:{'|'.join(others)})\W*:" if others else None
    return bool(foreign and re.search(foreign, text, re.MULTILINE))


def score_group(
    group: Sequence[Trajectory],
    losses: Sequence[Losses],
    weights: Weights,
    base: str,
    loss_context: str = "none",
) -> list[Trajectory]:
    """The trajectories of one task with `reward` and `score` filled in.

    `losses[j][k]` is the loss of turn k of trajectory j in nats per token. R_token is normalised
    by the longest trajectory of `group` (Eq. 1). A degenerate trajectory gets the floor: no task
    score, the full token price, no readability.
    """
    longest = max(t.tokens for t in group)
    scored = []
    for trajectory, own in zip(group, losses, strict=True):
        broken = degenerate(trajectory)
        task = metrics.score(trajectory.task.metric, trajectory.answer, trajectory.task.answers)
        tokens = trajectory.tokens / longest if longest else 0.0
        loss = worst(own)
        if broken:
            reward = combine(0.0, 1.0, None, weights.token, weights.loss)
        else:
            reward = combine(task, tokens, loss, weights.token, weights.loss)
        parts = Score(
            task=task,
            tokens=tokens,
            losses=tuple(own),
            loss=loss,
            degenerate=broken,
            lambda_token=weights.token,
            lambda_loss=weights.loss,
            base=base,
            loss_context=loss_context,
        )
        scored.append(replace(trajectory, reward=reward, score=parts))
    return scored
