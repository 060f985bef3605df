"""Select what to train on. Pure functions; the files are the command's business.

From conversations (Optima, Section 3.2, iSFT): the best one per task, reward > θ_sft, the top 70 %
of those. From trees (iDPO): pairs of sibling turns, the better one's value > θ_filter and the
difference > θ_diff, the top 50 % of a tree's pairs by the better one's value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optima_lite.records import WHOLE_ENDS, Example, Node, Pair, Trajectory, Tree, Turn
from optima_lite.reward import not_a_turn
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
    keep = min(max(math.ceil(round(share * len(rewards), 9)), 1), len(rewards))
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


def pairs(tree: Tree, theta_filter: float, theta_diff: float, extremes: bool = False) -> list[Pair]:
    """A tree's preference pairs: turns that could follow the same conversation.

    All pairs of siblings, or with `extremes` only the best and the worst of each family. Values are
    the finished tree's. A turn that was cut is in no pair, since it has no end to be trained; the
    better one must besides be a turn of its speaker alone. In the order of their nodes.
    """
    families: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        if node.parent is not None and node.stop == "end" and node.text.strip():
            families.setdefault(node.parent, []).append(index)
    found = []
    for parent, children in families.items():
        ranked = sorted(children, key=lambda i: (-tree.nodes[i].value, i))
        better = [i for i in ranked if _may_be_chosen(tree, tree.nodes[i])]
        for chosen in better[:1] if extremes else better:
            worse = ranked[-1:] if extremes else ranked
            found += [
                _pair(tree, parent, chosen, rejected)
                for rejected in sorted(worse)
                if tree.nodes[chosen].value > theta_filter
                and tree.nodes[chosen].value - tree.nodes[rejected].value > theta_diff
                and tree.nodes[chosen].text.strip() != tree.nodes[rejected].text.strip()
            ]
    return found


def _may_be_chosen(tree: Tree, node: Node) -> bool:
    return not not_a_turn(tree.team, node.agent, node.text)


def _pair(tree: Tree, parent: int, chosen: int, rejected: int) -> Pair:
    better, worse = tree.nodes[chosen], tree.nodes[rejected]
    speaker = next(agent for agent in tree.team.agents if agent.name == better.agent)
    return Pair(
        prompt=tuple(view(tree.team, tree.task, speaker, history(tree, parent))),
        chosen=({"role": "assistant", "content": better.text},),
        rejected=({"role": "assistant", "content": worse.text},),
        agent=better.agent,
        task_id=tree.id,
        node=parent,
        chosen_node=chosen,
        rejected_node=rejected,
        chosen_value=better.value,
        rejected_value=worse.value,
        chosen_visits=better.visits,
        rejected_visits=worse.visits,
    )


def history(tree: Tree, node: int) -> list[Turn]:
    """The turns from the root to `node`, which is the last of them."""
    turns: list[Turn] = []
    here: int | None = node
    while here is not None and tree.nodes[here].parent is not None:
        said = tree.nodes[here]
        turns.append(Turn(said.agent, said.text, said.tokens, said.stop))
        here = said.parent
    return turns[::-1]
