"""What sft and dpo share: settings, the model to train, the run to a finished directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments

from optima_lite.engines.loading import (
    LoadOptions,
    ModelSpec,
    attach_adapter,
    load_base,
    load_for_inference,
    pick_device,
    pick_dtype,
    quiet,
)
from optima_lite.errors import Diverged, TrainingError
from optima_lite.jsonl import usual_mode
from optima_lite.training.run import LOG, RunDirectory, RunLog


@dataclass(frozen=True)
class TrainSettings:
    """How to train. `batch_size` examples make an optimiser step, in micro-batches that fit.

    `lr` is the peak; it rises linearly over the first `warmup` share of the steps and falls
    linearly to 0 (share_of_peak).
    """

    tune: str = "lora"  # lora | full
    lr: float = 2e-4
    epochs: float = 3
    batch_size: int = 32
    micro_batch_size: int = 4
    max_length: int = 4096
    warmup: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    gradient_checkpointing: bool = False
    checkpoint_every: int = 50
    seed: int = 0


class ScheduledTrainer(Trainer):
    """Trainer with our learning rate: no step of a short run is lost to a rate of 0."""

    lr_scheduler: Any

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        """Trainer's hook."""
        if self.lr_scheduler is None:
            share = partial(share_of_peak, steps=num_training_steps, warmup=self.args.warmup_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler


def share_of_peak(step: int, steps: int, warmup: float) -> float:
    """The learning rate of `step` (from 0) over its peak: up over the first ⌊warmup · steps⌋ steps,
    then down to 0 after the last. Above 0 at every step, unlike the schedulers of transformers,
    whose first step of a warm-up changes nothing: of a run of three steps a third.
    """
    rising = int(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return max(0.0, (steps - step) / (steps - rising))


def complete(
    trainer: Trainer, spec: ModelSpec, tokenizer: Any, directory: RunDirectory
) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one, and finish the model directory.

    Returns `steps` and losses: `loss`, the mean over the steps, `first`, that of the first step,
    and `last`, the mean over the last quarter of the steps. Raises Diverged.
    """
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for records
    checkpoint = directory.last_checkpoint()
    for module in ("trainer", "trainer_utils"):  # they comment on checkpoints
        logging.getLogger(f"transformers.{module}").setLevel(logging.ERROR)
    try:
        with quiet():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trained = (p for p in trainer.model.parameters() if p.requires_grad)
        if not all(bool(torch.isfinite(p).all()) for p in trained):
            raise Diverged("the last step left weights that are not finite: lower --lr")
    except Diverged:
        if trainer.is_world_process_zero():
            directory.abandon()
        raise
    with quiet():
        trainer.save_model(str(directory.model))
    if trainer.is_world_process_zero():
        save(trainer, spec, tokenizer, directory)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    last = losses[-max(len(losses) // 4, 1) :]
    return {
        "steps": trainer.state.global_step,
        "loss": _mean(losses),
        "first": _mean(losses[:1]),
        "last": _mean(last),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def prepare_model(spec: ModelSpec, options: LoadOptions, settings: TrainSettings) -> Any:
    """The model to train: a fresh adapter, the given adapter continued, or full weights.

    With LoRA the base is held as `options.load` says and the adapter in fp32. Full fine-tuning
    holds fp32 weights and computes in the loaded type: updates of 1e-6 would vanish in bf16.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if settings.tune == "full":
        if options.load == "4bit":
            raise TrainingError("--tune full cannot train 4-bit weights: use --load bf16")
        model = load_for_inference(
            spec, LoadOptions("fp32", options.device, options.trust_remote_code)
        )
        model.requires_grad_(True)
        return model.train()
    base = load_base(spec, options)
    if options.load == "4bit":
        base = prepare_model_for_kbit_training(
            base, use_gradient_checkpointing=settings.gradient_checkpointing
        )
    if spec.adapter:
        return attach_adapter(base, spec.adapter, trainable=True).train()
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config).train()


def processes() -> int:
    """How many processes `accelerate launch` or `torchrun` started, 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_of(batch_size: int) -> int:
    """What each process has of a step. Raises TrainingError where it is not a whole number."""
    if batch_size % processes():
        raise TrainingError(
            f"--batch-size {batch_size} cannot be shared by {processes()} processes"
        )
    return batch_size // processes()


def training_arguments(
    settings: TrainSettings, options: LoadOptions, directory: RunDirectory
) -> TrainingArguments:
    """Our settings in transformers' words."""
    device = pick_device(options.device)
    mixed = options.load != "fp32" and pick_dtype(
        "auto" if options.load == "4bit" else options.load, device
    )
    share = share_of(settings.batch_size)
    micro = max(d for d in range(1, min(settings.micro_batch_size, share) + 1) if share % d == 0)
    checkpointing: dict[str, Any] = {}
    if settings.gradient_checkpointing:
        checkpointing["gradient_checkpointing"] = True
        checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    with quiet():  # transformers 5.24 announces another name for gradient_checkpointing
        return TrainingArguments(
            output_dir=str(directory.checkpoints),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=share // micro,
            num_train_epochs=settings.epochs,
            learning_rate=settings.lr,
            lr_scheduler_type="linear",
            warmup_steps=settings.warmup,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            optim="adamw_torch",
            bf16=mixed == torch.bfloat16,
            fp16=mixed == torch.float16,
            use_cpu=torch.device(device).type == "cpu",
            **checkpointing,
            save_strategy="steps",
            save_steps=settings.checkpoint_every,
            save_total_limit=2,
            logging_strategy="steps",
            logging_steps=1,
            logging_nan_inf_filter=False,  # it would call the loss of a diverged step 0
            seed=settings.seed,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )


def save(trainer: Trainer, spec: ModelSpec, tokenizer: Any, directory: RunDirectory) -> None:
    """Complete the model directory and rename it into place."""
    config = directory.model / "adapter_config.json"
    if config.is_file():
        # Under the name the user gave the base, not the path it was found at on this machine.
        content = json.loads(config.read_text(encoding="utf-8"))
        content["base_model_name_or_path"] = spec.base_name
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(str(directory.model))
    for leftover in ("training_args.bin", "README.md"):
        (directory.model / leftover).unlink(missing_ok=True)  # a pickle; a model card without facts
    RunLog.write(directory.model / LOG, trainer.state)
    for weights in directory.model.glob("*.safetensors"):
        usual_mode(weights)
    directory.finish()


def data_digest(contents: Iterable[object]) -> str:
    """A fingerprint of what is trained, for the settings guard of --resume."""
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        digest.update(repr(content).encode())
    return digest.hexdigest()


def recorded_settings(
    settings: TrainSettings, spec: ModelSpec, options: LoadOptions
) -> dict[str, Any]:
    """What a run started from and how it trains. The shape of a new adapter is left out where none
    is made."""
    adapter = _file_digest(spec.adapter / "adapter_model.safetensors") if spec.adapter else None
    fields = asdict(settings)
    if spec.adapter or settings.tune == "full":
        fields = {name: value for name, value in fields.items() if not name.startswith("lora_")}
    return {"model": spec.name, "adapter": adapter, "load": options.load, **fields}


def _file_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
