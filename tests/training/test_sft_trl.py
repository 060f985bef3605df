"""The SFT loss against TRL's SFTTrainer, and against a loop that knows nothing of batches."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCHS, STYLE_OF, tiny_model, tiny_tokenizer

from optima_lite.chat import ChatEncoder
from optima_lite.engines.loading import LoadOptions
from optima_lite.records import Example
from optima_lite.training.common import TrainSettings, training_arguments
from optima_lite.training.encode import IGNORED, Row, audit
from optima_lite.training.losses import only_positions, sft_loss, trained_logits
from optima_lite.training.run import RunDirectory, RunLog
from optima_lite.training.sft import Collator, SFTTrainer

#: Six views of different lengths, so that padding and micro-batches matter.
TALKS = [
    ["Who has the key?", "Bob: I have it.", "<A>Bob</A>"],
    ["seven"],
    ["I think it is the blue door. Ask him, then tell her.", "Bob: Yes " * 5, "No, the other one!"],
    ["", "Bob: hello?", "Yes, I agree."],
    ["a", "Bob: b", "c", "Bob: d", "e", "Bob: f", "<A>g</A>"],
    ["The red key opens it. " * 4],
]


def rows(style: str) -> tuple[list[Row], Any]:
    tokenizer = tiny_tokenizer(style)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    examples = []
    for i, talk in enumerate(TALKS):
        messages = [{"role": "system", "content": "You are Alice. Which door?"}]
        messages += [
            {"role": ("assistant", "user")[k % 2], "content": t} for k, t in enumerate(talk)
        ]
        examples.append(Example(tuple(messages), "Alice", f"t/{i}#0", 1.0))
    return audit(examples, ChatEncoder(tokenizer), 500).rows, tokenizer


# -- against TRL ------------------------------------------------------------------------------


def dataset(made: list[Row]) -> list[dict[str, list[int]]]:
    return [{"input_ids": row.ids, "labels": row.labels} for row in made]


def our_history(model: Any, made: list[Row], tokenizer: Any, out: Path, micro: int) -> list[Any]:
    settings = TrainSettings(
        tune="full", lr=1e-2, epochs=3, batch_size=6, micro_batch_size=micro, warmup=0.0
    )
    directory = RunDirectory(out)
    directory.open({}, resume=False, overwrite=False)
    arguments = training_arguments(settings, LoadOptions("fp32", "cpu"), directory)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset(made),
        data_collator=Collator(tokenizer.pad_token_id),
        callbacks=[RunLog(directory)],
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trl_history(model: Any, made: list[Row], tokenizer: Any, out: Path, micro: int) -> list[Any]:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    arguments = trl.SFTConfig(
        output_dir=str(out),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=6 // micro,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        seed=0,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(dataset(made)),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("micro", [2, 6])
def test_the_loss_is_that_of_trl(micro: int, tmp_path: Path) -> None:
    """Three optimiser steps of all six examples, so their order does not matter: the same losses
    and gradient norms at the first step and after the updates that follow from them."""
    made, tokenizer = rows("smollm2")
    model = tiny_model("llama", tokenizer)
    ours = our_history(copy.deepcopy(model), made, tokenizer, tmp_path / "ours", micro)
    theirs = trl_history(copy.deepcopy(model), made, tokenizer, tmp_path / "trl", micro)
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine["loss"]) == pytest.approx(float(other["loss"]), abs=1e-4)
        assert float(mine["grad_norm"]) == pytest.approx(float(other["grad_norm"]), rel=1e-3)
    with torch.no_grad():
        exact = float(plain_loss(model, made))
    assert float(ours[0]["loss"]) == pytest.approx(exact, abs=1e-4)
    assert float(ours[2]["loss"]) < float(ours[0]["loss"]) - 0.1, "it learns"


# -- against a loop ---------------------------------------------------------------------------


def plain_loss(model: Any, made: list[Row]) -> torch.Tensor:
    """Mean of -log p over all trained tokens; one example at a time, all logits, no padding."""
    terms = []
    for row in made:
        logps = torch.log_softmax(model(torch.tensor([row.ids])).logits[0], dim=-1)
        for start, end in row.spans:
            terms += [-logps[i - 1, row.ids[i]] for i in range(start, end)]
    assert len(terms) == sum(row.trained for row in made)
    return torch.stack(terms).mean()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch(made: list[Row], pad: int) -> dict[str, torch.Tensor]:
    return Collator(pad)(dataset(made))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sizes", [[6], [2, 4], [1] * 6])
def test_loss_and_gradients_equal_a_loop(arch: str, sizes: list[int]) -> None:
    """However a step is cut into micro-batches; gemma2 caps its logits after the projection."""
    made, tokenizer = rows(STYLE_OF[arch])
    model = tiny_model(arch, tokenizer)
    exact = plain_loss(model, made)
    expected = gradients(model, exact)
    count = sum(row.trained for row in made)
    total = torch.tensor(0.0)
    at = 0
    for size in sizes:
        inputs = batch(made[at : at + size], tokenizer.pad_token_id)
        labels = inputs.pop("labels")
        logits, targets = trained_logits(model, inputs, labels)
        assert logits.shape == (len(targets), len(tokenizer))
        total = total + sft_loss(logits, targets, count)
        at += size
    assert float(total.detach()) == pytest.approx(float(exact.detach()), abs=1e-5)
    found = gradients(model, total)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_padding_is_does_not_matter(arch: str) -> None:
    made, tokenizer = rows(STYLE_OF[arch])
    model = tiny_model(arch, tokenizer)
    losses = []
    for pad in (tokenizer.pad_token_id, 5):
        inputs = batch(made, pad)
        labels = inputs.pop("labels")
        losses.append(sft_loss(*trained_logits(model, inputs, labels)).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_end_of_turn_is_trained_where_it_is_the_padding() -> None:
    made, tokenizer = rows("smollm2")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    inputs = batch(made, tokenizer.pad_token_id)
    turns = sum(len(row.spans) for row in made)
    assert int((inputs["labels"] == tokenizer.pad_token_id).sum()) == turns
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    assert lengths == [len(row.ids) for row in made]
    assert bool((inputs["labels"][inputs["attention_mask"] == 0] == IGNORED).all())


def test_the_projection_is_computed_on_trained_positions_only() -> None:
    made, tokenizer = rows("llama3")
    model = tiny_model("llama", tokenizer)
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.shape[:-1])
    )
    inputs = batch(made, 0)
    labels = inputs.pop("labels")
    trained_logits(model, inputs, labels)
    handle.remove()
    assert seen == [(1, sum(row.trained for row in made))]
    ids = inputs["input_ids"]
    assert model(ids).logits.shape[:2] == ids.shape, "and the hook is gone afterwards"
    with (
        pytest.raises(ZeroDivisionError),
        only_positions(model, torch.ones_like(ids, dtype=torch.bool)),
    ):
        raise ZeroDivisionError
    assert model(ids).logits.shape[:2] == ids.shape, "after an error too"


def test_sft_loss_by_hand() -> None:
    """Two tokens over two words: logits (0, ln 3) give p = (1/4, 3/4), logits (0, 0) give 1/2.
    Targets 1 and 0: -ln 3/4 - ln 1/2 = 0.2877 + 0.6931 = 0.9808; the mean is 0.4904, and over a
    step of 8 tokens this part adds 0.1226."""
    logits = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]])
    targets = torch.tensor([1, 0])
    assert float(sft_loss(logits, targets)) == pytest.approx(0.4904, abs=1e-4)
    assert float(sft_loss(logits, targets, 8)) == pytest.approx(0.1226, abs=1e-4)
    assert float(sft_loss(logits.bfloat16(), targets)) == pytest.approx(0.4904, abs=2e-3)
