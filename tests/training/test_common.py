"""What sft and dpo share."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optima_lite.training.common import ScheduledTrainer, share_of_peak


def rates(steps: int, warmup: float) -> list[float]:
    return [share_of_peak(step, steps, warmup) for step in range(steps)]


def test_rates_on_paper() -> None:
    """10 % of 3 steps is no whole step: 1, 2/3, 1/3. Of 20 steps two rise to the peak at the third,
    from where 18 steps fall."""
    assert rates(3, 0.1) == pytest.approx([1, 2 / 3, 1 / 3])
    assert rates(20, 0.1) == pytest.approx([1 / 3, 2 / 3, *(k / 18 for k in range(18, 0, -1))])
    assert rates(1, 0.1) == [1]


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 3, 9, 10, 11, 64, 1000])
def test_every_step_counts(steps: int, warmup: float) -> None:
    found = rates(steps, warmup)
    assert all(0 < rate <= 1 for rate in found)
    assert max(found) == 1
    peak = found.index(1)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_without_warmup_it_is_the_linear_schedule_of_transformers(tmp_path) -> None:
    def made(kind) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.5,
            lr_scheduler_type="linear", warmup_steps=0,
        )  # fmt: skip
        layer = torch.nn.Linear(1, 1)
        trainer = kind(model=layer, args=arguments)
        trainer.create_optimizer_and_scheduler(7)
        found = []
        for _ in range(7):
            found.append(trainer.optimizer.param_groups[0]["lr"])
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
        return found

    assert made(ScheduledTrainer) == pytest.approx(made(Trainer))
