"""Supervised fine-tuning on the agents' own turns (Optima, Section 3.2, iSFT).

optima-lite sft examples.jsonl --model relay -o round1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed

from optima_lite.engines.loading import LoadOptions, ModelSpec, quiet
from optima_lite.training.common import (
    ScheduledTrainer,
    TrainSettings,
    complete,
    data_digest,
    prepare_model,
    recorded_settings,
    training_arguments,
)
from optima_lite.training.encode import IGNORED, Row
from optima_lite.training.losses import sft_loss, trained_logits
from optima_lite.training.run import RunDirectory, RunLog


def train(
    rows: Sequence[Row],
    spec: ModelSpec,
    tokenizer: Any,
    options: LoadOptions,
    settings: TrainSettings,
    directory: RunDirectory,
) -> dict[str, Any]:
    """Train on `rows` and leave the finished model in `directory.out`.

    Returns what `complete` does (losses in nats per trained token). The directory
    must have been opened. Raises TrainingError or ModelError.
    """
    set_seed(settings.seed)
    with quiet():
        model = prepare_model(spec, options, settings)
    arguments = training_arguments(settings, options, directory)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row.ids, "labels": row.labels} for row in rows],
        data_collator=Collator(tokenizer.pad_token_id),
        callbacks=[RunLog(directory)],
    )
    return complete(trainer, spec, tokenizer, directory)


class SFTTrainer(ScheduledTrainer):
    """Trainer with our loss: the mean over all trained tokens of an optimiser step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # compute_loss divides by the step's token count itself.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        labels = inputs.pop("labels")
        logits, targets = trained_logits(model, inputs, labels)
        loss = sft_loss(logits, targets, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The count is that of all processes, whose gradients are averaged afterwards.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss


@dataclass(frozen=True)
class Collator:
    """Rows to tensors [rows, length], padded on the right; masks are made by position."""

    pad: int

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        out = {
            "input_ids": torch.full((len(rows), width), self.pad),
            "labels": torch.full((len(rows), width), IGNORED),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
        }
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            out["input_ids"][i, :length] = torch.tensor(row["input_ids"])
            out["labels"][i, :length] = torch.tensor(row["labels"])
            out["attention_mask"][i, :length] = 1
        return out


def resolved_settings(
    settings: TrainSettings, spec: ModelSpec, options: LoadOptions, rows: Sequence[Row]
) -> dict[str, Any]:
    """Everything that shapes the result, as it is stored and compared by --resume."""
    return {
        "command": "sft",
        **recorded_settings(settings, spec, options),
        "examples": len(rows),
        "data": data_digest((row.ids, row.spans) for row in rows),
    }
