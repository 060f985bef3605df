"""Preference training on pairs of sibling turns (Optima, Section 3.2: iDPO and iSFT-DPO).

optima-lite dpo pairs.jsonl --model round1 -o round2

The loss is DPO plus α times the mean negative log-likelihood per token of the chosen turn (RPO; α 0
is DPO alone). The reference is the model at step 0: its log-probabilities are computed before
training, by the function that training uses, so a continued adapter is its own reference. In the
first step the model is the reference: what it computes there is not computed before, and the first
loss is ln 2 exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import set_seed

from optima_lite.engines.loading import LoadOptions, ModelSpec, quiet
from optima_lite.training.attention import in_blocks
from optima_lite.training.common import (
    ScheduledTrainer,
    TrainSettings,
    complete,
    data_digest,
    prepare_model,
    processes,
    recorded_settings,
    share_of,
    training_arguments,
)
from optima_lite.training.losses import completion_logps, dpo_loss
from optima_lite.training.pairs import PairRow, Part, parts, plain_parts, steps
from optima_lite.training.run import RunDirectory, RunLog


@dataclass(frozen=True)
class DPOSettings(TrainSettings):
    """How to train on pairs. `batch_size` pairs make an optimiser step.

    `beta` is DPO's temperature; `alpha` weighs the likelihood of the chosen turn; `micro_tokens`
    bounds what is computed at once, padding counted (memory, not the result).
    """

    lr: float = 5e-6
    epochs: float = 1
    batch_size: int = 64
    beta: float = 0.1
    alpha: float = 1.0
    micro_tokens: int = 1024


def plan(
    rows: Sequence[PairRow], settings: DPOSettings, *, plain: bool = False
) -> list[list[Part]]:
    """The run's steps; under `accelerate launch` each process takes every n-th, so a step of one
    process has its share of the pairs. Raises TrainingError where it has none."""
    share, s = share_of(settings.batch_size), settings
    return steps(rows, share, s.epochs, s.micro_tokens, s.seed, plain=plain)


def train(
    rows: Sequence[PairRow],
    spec: ModelSpec,
    tokenizer: Any,
    options: LoadOptions,
    settings: DPOSettings,
    directory: RunDirectory,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Train on pairs and leave the finished model in `directory.out`.

    Returns what `complete` does; `say` hears whether prefixes cannot be shared. The
    directory must have been opened. Raises TrainingError or ModelError.
    """
    set_seed(settings.seed)
    with quiet():
        model = prepare_model(spec, options, settings)
    obstacle = why_not_shared(model, rows, tokenizer.pad_token_id or 0)
    if obstacle:
        say(f"prefixes are not shared, every turn gets a row of its own: {obstacle}")
    made = plan(rows, settings, plain=bool(obstacle))
    trainer = make_trainer(model, made, settings, options, directory)
    resumed = directory.last_checkpoint() is not None
    with nullcontext() if obstacle else in_blocks(model):
        trainer.prepare(settings, len(rows), tokenizer.pad_token_id or 0, resumed=resumed)
        return complete(trainer, spec, tokenizer, directory)


def make_trainer(
    model: Any,
    made: Sequence[list[Part]],
    settings: DPOSettings,
    options: LoadOptions,
    directory: RunDirectory,
) -> DPOTrainer:
    """The trainer of these steps; `prepare` must be called before `train`."""
    # One item of the data is one step of one process; DPOTrainer cuts it into parts itself.
    one = replace(settings, batch_size=processes(), micro_batch_size=1, epochs=1)
    return DPOTrainer(
        model=model,
        args=training_arguments(one, options, directory),
        train_dataset=[{"step": step} for step in made],
        data_collator=lambda items: items[0],
        callbacks=[RunLog(directory)],
    )


#: How far log-probabilities may be apart, in nats a token. Rounding to bf16 costs some 0.01; a turn
#: that sees its sibling, or stands at another position, is farther off.
_SHARED = 0.05


def why_not_shared(model: Any, rows: Sequence[PairRow], pad: int) -> str | None:
    """What speaks against prefix sharing with this model, None if nothing does.

    Tried out on the shortest pair: not every attention takes a mask and positions, and some ignore
    them without a word.
    """
    row = min(rows, key=lambda row: len(row.chosen.ids) + len(row.rejected.ids))
    device = model.get_input_embeddings().weight.device
    found = []
    model.eval()
    for lay in (parts, plain_parts):
        (part,) = lay([row], [0], 1)
        try:
            with torch.no_grad(), nullcontext() if lay is plain_parts else in_blocks(model):
                sums, tokens = completion_logps(model, part.batch(pad).to(device), 2)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if part.plain or "out of memory" in str(error).lower():
                raise
            return f"{type(model).__name__} does not take the mask ({type(error).__name__})"
        found.append(sums / tokens)
    apart = float((found[0] - found[1]).abs().max())
    if apart <= _SHARED:
        return None
    return f"with the mask, log-probabilities differ by {apart:.2f} nats a token"


class DPOTrainer(ScheduledTrainer):
    """Trainer whose every item is one optimiser step, computed part by part."""

    def prepare(
        self, settings: DPOSettings, pairs: int, pad: int, *, resumed: bool = False
    ) -> None:
        """Compute the reference log-probabilities with the model as it is now, which is the one
        that training starts from, also where a checkpoint is loaded afterwards (`resumed`). `pairs`
        is how many an epoch has."""
        self._settings = settings
        self._steps_an_epoch = -(-pairs // share_of(settings.batch_size)) / self.args.world_size
        self._pad = pad
        self._sums: dict[str, float] = {}
        self._count = 0
        self.reference: dict[int, torch.Tensor] = {}  # of pairs, [2]: chosen, rejected
        without_dropout(self.model)
        self.model.eval()
        # Process p of n trains on the items p, p + n, …; where they run out, on the first ones.
        rank, count = self.args.process_index, self.args.world_size
        items = self.train_dataset
        own = [k for k in range(len(items)) if k % count == rank or k < count]
        known: set[int] = set()
        if not resumed:
            known = {i for part in items[rank % len(items)]["step"] for i in part.pairs}
        for k in own:
            for part in items[k]["step"]:
                if all(i in self.reference or i in known for i in part.pairs):
                    continue
                with torch.no_grad():
                    logps, _ = self._logps(self.model, part)
                for i, pair in zip(part.pairs, logps.cpu(), strict=True):
                    self.reference.setdefault(i, pair)
        self.model.train()

    def _logps(self, model: Any, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed log-probabilities and token counts, both [pairs, 2]: chosen, rejected."""
        batch = part.batch(self._pad).to(self.args.device)
        with self.accelerator.autocast():
            sums, tokens = completion_logps(model, batch, 2 * len(part.pairs))
        return sums.view(-1, 2), tokens.view(-1, 2)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one optimiser step; the mean loss of its pairs."""
        model.train()
        step: list[Part] = inputs["step"]
        pairs = sum(len(part.pairs) for part in step)
        total = torch.zeros((), device=self.args.device)
        for part in step:
            logps, tokens = self._logps(model, part)
            if self.state.global_step == 0:
                for i, pair in zip(part.pairs, logps.detach().cpu(), strict=True):
                    self.reference.setdefault(i, pair)
            reference = torch.stack([self.reference[i] for i in part.pairs]).to(logps.device)
            ratios = logps - reference
            losses = dpo_loss(ratios[:, 0], ratios[:, 1], self._settings.beta)
            likelihood = -logps[:, 0] / tokens[:, 0]
            loss = (losses + self._settings.alpha * likelihood).sum() / pairs
            self.accelerator.backward(loss)
            total += loss.detach()
            self._note(logps.detach(), ratios.detach(), losses.detach(), likelihood.detach())
        return total

    def _note(
        self,
        logps: torch.Tensor,
        ratios: torch.Tensor,
        losses: torch.Tensor,
        likelihood: torch.Tensor,
    ) -> None:
        rewards = self._settings.beta * ratios
        margin = rewards[:, 0] - rewards[:, 1]
        values = {
            "dpo_loss": losses,
            "nll_loss": likelihood,
            "logps/chosen": logps[:, 0],
            "logps/rejected": logps[:, 1],
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).float(),
        }
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value.sum())
        self._count += len(losses)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means over the pairs of this process since the last entry."""
        # Trainer takes the whole plan for one epoch.
        self.state.epoch = self.state.global_step / self._steps_an_epoch
        if self._count and "loss" in logs:
            logs = logs | {name: total / self._count for name, total in self._sums.items()}
            self._sums, self._count = {}, 0
        super().log(logs, start_time)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # steps() has shuffled


def without_dropout(model: Any) -> None:
    """Switch dropout off, as the reference has none: with it, the first loss would not be ln 2."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):  # where attention is a function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def resolved_settings(
    settings: DPOSettings, spec: ModelSpec, options: LoadOptions, rows: Sequence[PairRow]
) -> dict[str, Any]:
    """Everything that shapes the result, as it is stored and compared by --resume."""
    recorded = recorded_settings(settings, spec, options)
    del recorded["micro_batch_size"]  # sft's; here micro_tokens
    return {
        "command": "dpo",
        **recorded,
        "pairs": len(rows),
        "data": data_digest((row.chosen, row.rejected) for row in rows),
    }
