"""Preference training: loss and gradients against plain rows and TRL, and whole runs."""

from __future__ import annotations

import copy
import json
import logging
import math
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny import ARCHS, STYLE_OF, plain_logps, tiny_model, tiny_tokenizer
from transformers import MambaConfig, MambaForCausalLM

from optima_lite.chat import ChatEncoder
from optima_lite.cli.dpo import command
from optima_lite.engines.loading import LoadOptions, load_tokenizer, resolve
from optima_lite.errors import InputError, OutputError, TrainingError
from optima_lite.locks import only_writer
from optima_lite.records import Pair
from optima_lite.training import dpo
from optima_lite.training.dpo import (
    DPOSettings,
    DPOTrainer,
    make_trainer,
    plan,
    resolved_settings,
    train,
    why_not_shared,
)
from optima_lite.training.pairs import PairRow, encode
from optima_lite.training.run import LOG, RunDirectory, RunLog

FP32 = LoadOptions("fp32", "cpu")
SYSTEM = {"role": "system", "content": "You are Alice. Which door?"}
#: (task, conversation so far, chosen, rejected): two families that share, one alone.
TALKS = [
    ("a", [], "Who has the key?", "I do not know, do you? " * 3),
    ("a", [], "Who has the key?", "no"),
    ("a", ["Who has the key?", "Bob: I have it."], "<A>Bob</A>", "Then it is Bob, I think so."),
    ("b", [], "The blue one.", "The red door, or maybe the blue one, or none of them at all."),
    ("b", [], "blue", "red"),
    ("c", ["Hm.", "Bob: " + "yes " * 30], "ok", "well"),
]
SETTINGS = DPOSettings(
    lr=1e-2, epochs=2, batch_size=3, beta=0.3, alpha=0.7, micro_tokens=64, lora_r=4, lora_alpha=8
)


def pairs() -> list[Pair]:
    made = []
    for task, talk, chosen, rejected in TALKS:
        prompt = [SYSTEM] + [
            {"role": ("assistant", "user")[k % 2], "content": text} for k, text in enumerate(talk)
        ]
        sides = [({"role": "assistant", "content": text},) for text in (chosen, rejected)]
        values = (0, 1, 2, 0.9, 0.1, 1, 1)
        made.append(Pair(tuple(prompt), *sides, "Alice", task, *values))
    return made


def rows_for(style: str) -> tuple[list[PairRow], Any]:
    tokenizer = tiny_tokenizer(style)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return encode(pairs(), ChatEncoder(tokenizer), 500)[0], tokenizer


def pair_logps(model: Any, rows: list[PairRow]) -> torch.Tensor:
    """[pairs, 2], one forward pass a sequence."""
    sides = [side for row in rows for side in (row.chosen, row.rejected)]
    return plain_logps(model, sides).view(-1, 2)


def plain_loss(model: Any, reference: torch.Tensor, rows: list[PairRow], s: Any) -> torch.Tensor:
    logps = pair_logps(model, rows)
    ratios = logps - reference
    dpo_part = -torch.log(torch.sigmoid(s.beta * (ratios[:, 0] - ratios[:, 1])))
    tokens = torch.tensor([len(r.chosen.ids) - r.chosen.start for r in rows])
    return (dpo_part - s.alpha * logps[:, 0] / tokens).mean()


def trainer_of(
    model: Any,
    rows: list[PairRow],
    s: DPOSettings,
    out: Path,
    pad: int,
    *,
    resumed: bool = False,
    plain: bool = False,
) -> DPOTrainer:
    directory = RunDirectory(out)
    directory.open({}, resume=False, overwrite=False)
    trainer = make_trainer(model, plan(rows, s, plain=plain), s, FP32, directory)
    trainer.prepare(s, len(rows), pad, resumed=resumed)
    return trainer


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("micro_tokens", [1, 100_000])
def test_loss_and_lora_gradients_equal_plain_rows(
    arch: str, micro_tokens: int, tmp_path: Path
) -> None:
    """Each pair on its own, or everything at once; the reference is another model, as after some
    steps, so that the gradient is not the symmetric one of step 0."""
    rows, tokenizer = rows_for(STYLE_OF[arch])
    model = with_lora(tiny_model(arch, tokenizer))
    settings = replace(SETTINGS, batch_size=6, epochs=1, micro_tokens=micro_tokens)
    pad = tokenizer.pad_token_id
    trainer = trainer_of(model, rows, settings, tmp_path / "out", pad, resumed=True)
    generator = torch.Generator().manual_seed(1)
    for name in trainer.reference:
        trainer.reference[name] = trainer.reference[name] + torch.randn(2, generator=generator)
    reference = torch.stack([trainer.reference[i] for i in range(len(rows))])
    exact = plain_loss(model, reference, rows, settings)
    exact.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(expected) > 8
    assert all("lora" in name for name in expected)
    model.zero_grad()
    (item,) = trainer.train_dataset
    loss = trainer.training_step(model, item)
    assert float(loss) == pytest.approx(float(exact.detach()), abs=1e-4)
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=1e-3, atol=1e-4, msg=name
            )


def trl_trainer(
    model: Any, ref_model: Any, rows: list[PairRow], tokenizer: Any, s: DPOSettings, out: Path
) -> Any:
    """TRL's trainer of the same pairs, on our token ids."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    class Tokenised(trl.DPOTrainer):
        """Leaves the templates, some of which refuse system messages, to us."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    config = trl.DPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=s.batch_size,
        num_train_epochs=s.epochs,
        learning_rate=s.lr,
        lr_scheduler_type="linear",
        warmup_steps=0,
        beta=s.beta,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, s.alpha],
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    trainer = Tokenised(
        model=model,
        ref_model=ref_model,
        args=config,
        train_dataset=Dataset.from_list([{key: [0] for key in columns}] * len(rows)),
        processing_class=tokenizer,
    )
    trainer.data_collator = fixed_collator(rows, tokenizer.pad_token_id)
    return trainer


@pytest.mark.usefixtures("quiet_libraries")
def test_trl_has_the_same_token_ids(tmp_path: Path) -> None:
    """Our pairs load in TRL as they are."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows, tokenizer = rows_for("smollm2")
    plain = [p.to_dict() for p in pairs()]
    data = Dataset.from_list([{k: p[k] for k in ("prompt", "chosen", "rejected")} for p in plain])
    trainer = trl.DPOTrainer(
        model=tiny_model("llama", tokenizer),
        ref_model=tiny_model("llama", tokenizer),
        args=trl.DPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        for side, theirs in ((row.chosen, "chosen_ids"), (row.rejected, "rejected_ids")):
            ids = made["prompt_ids"] + made[theirs]
            assert ids[: len(side.ids)] == side.ids
            assert len(made["prompt_ids"]) == side.start


@pytest.fixture
def quiet_libraries() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_libraries")
@pytest.mark.parametrize("plain", [False, True], ids=["shared", "plain"])
@pytest.mark.parametrize("arch", ARCHS)
def test_three_steps_are_those_of_trl(arch: str, plain: bool, tmp_path: Path) -> None:
    """All pairs at once, full weights, DPO alone: losses and what was learned."""
    rows, tokenizer = rows_for(STYLE_OF[arch])
    model = tiny_model(arch, tokenizer)
    settings = replace(
        SETTINGS, tune="full", epochs=3, batch_size=6, alpha=0.0, warmup=0.0, lr=1e-3
    )
    theirs = copy.deepcopy(model)
    pad = tokenizer.pad_token_id
    ours = trainer_of(model, rows, settings, tmp_path / "ours", pad, plain=plain)
    ours.train()
    trainer = trl_trainer(
        theirs, copy.deepcopy(theirs), rows, tokenizer, settings, tmp_path / "trl"
    )
    trainer.train()
    found = [e["loss"] for e in ours.state.log_history if "loss" in e]
    expected = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert len(found) == 3
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[-1] < 0.95 * found[0], "and something was learned"


@pytest.mark.usefixtures("quiet_libraries")
@pytest.mark.parametrize("plain", [False, True], ids=["shared", "plain"])
@pytest.mark.parametrize("micro_tokens", [1, 100_000])
@pytest.mark.parametrize("arch", ARCHS)
def test_lora_gradients_are_those_of_trl(
    arch: str, micro_tokens: int, plain: bool, tmp_path: Path
) -> None:
    """DPO of all pairs, whose lengths differ by a factor of ten, and RPO of each pair alone (TRL's
    likelihood is a mean over the tokens of a batch, ours over those of a pair). The policy is no
    longer the reference, so that the gradient is not the symmetric one of step 0."""
    rows, tokenizer = rows_for(STYLE_OF[arch])
    lengths = [len(side.ids) - side.start for row in rows for side in (row.chosen, row.rejected)]
    assert max(lengths) >= 10 * min(lengths)
    for number, members in enumerate([rows, *([row] for row in rows)]):
        model = with_lora(tiny_model(arch, tokenizer))
        theirs = copy.deepcopy(model)
        settings = replace(
            SETTINGS, batch_size=len(members), epochs=1, micro_tokens=micro_tokens,
            alpha=0.7 if len(members) == 1 else 0.0,
        )  # fmt: skip
        pad = tokenizer.pad_token_id
        ours = trainer_of(
            model, members, settings, tmp_path / f"o{number}", pad, resumed=True, plain=plain
        )
        trainer = trl_trainer(theirs, None, members, tokenizer, settings, tmp_path / f"t{number}")
        generator = torch.Generator().manual_seed(number)
        for (name, mine), other in zip(
            ((n, p) for n, p in model.named_parameters() if p.requires_grad),
            (p for n, p in theirs.named_parameters() if ".default." in n),
            strict=True,
        ):
            moved = mine.data + 0.03 * torch.randn(mine.shape, generator=generator)
            mine.data, other.data = moved, moved.clone()
            assert "lora" in name
        loss = ours.training_step(model, ours.train_dataset[0])
        expected = trainer.compute_loss(theirs, trainer.data_collator(None))
        expected.backward()
        assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-4)
        assert abs(float(loss) - math.log(2)) > 1e-3
        gradients = {n: p.grad for n, p in theirs.named_parameters() if ".default." in n}
        assert len(gradients) > 8
        for name, parameter in model.named_parameters():
            if name in gradients:
                torch.testing.assert_close(
                    parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name
                )


def fixed_collator(rows: list[PairRow], pad: int):
    """Our token ids in TRL's layout: first the chosen ones, then the rejected. (TRL also trains the
    line break that a template writes after the end of turn; a model is never asked for it.)"""

    def collate(_: Any) -> dict[str, torch.Tensor]:
        sides = [row.chosen for row in rows] + [row.rejected for row in rows]
        width = max(len(side.ids) for side in sides)
        out = {
            "input_ids": torch.full((len(sides), width), pad),
            "attention_mask": torch.zeros((len(sides), width), dtype=torch.long),
            "completion_mask": torch.zeros((len(sides), width), dtype=torch.long),
        }
        for i, side in enumerate(sides):
            out["input_ids"][i, : len(side.ids)] = torch.tensor(side.ids)
            out["attention_mask"][i, : len(side.ids)] = 1
            out["completion_mask"][i, side.start : len(side.ids)] = 1
        return out

    return collate


@pytest.mark.parametrize("batch_size", [2, 6])
def test_the_first_step_is_its_own_reference(batch_size: int, tmp_path: Path) -> None:
    """The same run whether all references are computed before, as after a resume, or all but those
    of the first step, which meets its pairs again in the second epoch. Dropout changes nothing."""
    rows, tokenizer = rows_for("smollm2")
    settings = replace(SETTINGS, batch_size=batch_size, epochs=2)
    runs = []
    for name, resumed in (("before", True), ("on the way", False)):
        model = tiny_model("llama", tokenizer)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        pad = tokenizer.pad_token_id
        trainer = trainer_of(model, rows, settings, tmp_path / name, pad, resumed=resumed)
        if not resumed:
            assert len(trainer.reference) == 6 - batch_size
        trainer.train()
        runs.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        dpo = [e["dpo_loss"] for e in trainer.state.log_history if "loss" in e]
        assert dpo[0] == pytest.approx(math.log(2), abs=1e-6)
        if not resumed:
            torch.manual_seed(0)
            model = tiny_model("llama", tokenizer)
            expected = pair_logps(model, rows).detach()
            found = torch.stack([trainer.reference[i] for i in range(6)])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert runs[0] == pytest.approx(runs[1], abs=1e-6)


class Deaf(torch.nn.Module):
    """Attention that goes its own way: whatever mask it is given, it looks back at everything."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.inner(hidden_states, attention_mask=None, **kwargs)


@pytest.mark.parametrize("arch", ARCHS)
def test_models_that_take_the_mask_share_prefixes(arch: str) -> None:
    rows, tokenizer = rows_for(STYLE_OF[arch])
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(arch, tokenizer).to(dtype)
        assert why_not_shared(model, rows, tokenizer.pad_token_id) is None


def test_models_that_do_not_take_the_mask_are_found_out() -> None:
    rows, tokenizer = rows_for("smollm2")
    deaf = tiny_model("llama", tokenizer)
    for layer in deaf.model.layers:
        layer.self_attn = Deaf(layer.self_attn)
    obstacle = why_not_shared(deaf, rows, tokenizer.pad_token_id)
    assert "with the mask, log-probabilities differ by" in str(obstacle)
    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=2)
    )
    obstacle = why_not_shared(mamba, rows, tokenizer.pad_token_id)
    assert "MambaForCausalLM does not take the mask" in str(obstacle)


def test_a_model_without_attention_trains_on_plain_rows(tmp_path: Path) -> None:
    """It says so, begins at ln 2, and gives the log-probabilities of a loop."""
    rows, tokenizer = rows_for("smollm2")
    torch.manual_seed(0)
    mamba = MambaForCausalLM(
        MambaConfig(
            vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=2,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    mamba.save_pretrained(tmp_path / "mamba")
    tokenizer.save_pretrained(tmp_path / "mamba")
    result = invoke(
        tmp_path / "mamba", tmp_path, "-o", str(tmp_path / "out"), "--tune", "full", "--lr", "1e-3",
        "--epochs", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "dpo: prefixes are not shared, every turn gets a row of its own" in result.stderr
    entries = log(tmp_path / "out")
    assert entries[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert entries[-1]["dpo_loss"] < entries[0]["dpo_loss"]
    expected = pair_logps(mamba.eval(), rows).detach()[:, 0].mean()
    assert entries[0]["logps/chosen"] == pytest.approx(float(expected), abs=1e-3)


# -- whole runs -------------------------------------------------------------------------------


def run(model: Path, out: Path, s: DPOSettings = SETTINGS, resume: bool = False) -> Path:
    spec = resolve(str(model))
    tokenizer = load_tokenizer(spec, FP32)
    rows = encode(pairs(), ChatEncoder(tokenizer), s.max_length)[0]
    directory = RunDirectory(out)
    directory.open(resolved_settings(s, spec, FP32, rows), resume=resume, overwrite=False)
    train(rows, spec, tokenizer, FP32, s, directory)
    return out


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def test_a_run_starts_at_ln_2_and_learns(tiny_dir: Path, tmp_path: Path) -> None:
    """Also from an adapter, which is its own reference (not its base), and from full weights."""
    first = run(tiny_dir, tmp_path / "first", replace(SETTINGS, epochs=6))
    second = run(first, tmp_path / "second")
    full = run(tiny_dir, tmp_path / "full", replace(SETTINGS, tune="full", lr=1e-3))
    for out in (first, second, full):
        entries = log(out)
        assert entries[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert entries[0]["rewards/chosen"] == entries[0]["rewards/margin"] == 0
        assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
        # Six pairs, three a step.
        assert [entry["epoch"] for entry in entries] == [entry["step"] / 2 for entry in entries]
    assert log(first)[-1]["rewards/accuracy"] == 1
    assert log(first)[-1]["dpo_loss"] < 0.5


@pytest.mark.parametrize("changed", [{}, {"micro_tokens": 16, "gradient_checkpointing": True}])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """The reference is the model at step 0, not at the checkpoint. What decides memory and time
    only may change in between."""
    settings = replace(SETTINGS, checkpoint_every=1)
    whole = run(tiny_dir, tmp_path / "whole", settings)
    on_save = RunLog.on_save

    def stopping(self: RunLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_save(self, args, state, control, **kwargs)
        if state.global_step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "on_save", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_dir, tmp_path / "out", settings)
    out = run(tiny_dir, tmp_path / "out", replace(settings, **changed), resume=True)
    for name in ("loss", "dpo_loss", "rewards/margin"):
        assert [e[name] for e in log(out)] == pytest.approx([e[name] for e in log(whole)], abs=1e-5)
    expected = load_file(whole / "adapter_model.safetensors")
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def invoke(tiny_dir: Path, tmp_path: Path, *args: str, made: list[Pair] | None = None) -> Any:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(p.to_dict()) + "\n" for p in made or pairs()))
    fixed = ["--model", str(tiny_dir), "--load", "fp32", "--device", "cpu"]
    return CliRunner().invoke(command, [str(file), *fixed, *args])


def test_the_command(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["-o", str(out), "--batch-size", "4", "--lora-r", "4"]
    result = invoke(tiny_dir, tmp_path, *args)
    assert result.exit_code == 0, result.output
    assert result.stdout == "", "stdout is for records"
    assert "6 pairs of 3 views; 0 dropped" in result.stderr
    assert "is finished: 2 steps" in result.stderr
    settings = json.loads((out / "optima_lite.json").read_text())["settings"]
    assert [settings[k] for k in ("command", "lr", "beta", "alpha")] == ["dpo", 5e-6, 0.1, 1.0]
    assert settings["lora_r"] == 4
    assert "micro_batch_size" not in settings
    further = invoke(out, tmp_path, "-o", str(tmp_path / "further"), "--lora-r", "8")
    assert f"--lora-r is not used, since {out} has an adapter" in further.stderr
    settings = json.loads((tmp_path / "further" / "optima_lite.json").read_text())["settings"]
    assert "lora_r" not in settings
    again = invoke(tiny_dir, tmp_path, *args, "--resume")
    assert (again.exit_code, "is finished" in again.stderr) == (0, True)
    other = invoke(tiny_dir, tmp_path, *args, "--resume", "--beta", "0.2")
    assert isinstance(other.exception, OutputError)
    assert "beta was 0.1, now 0.2" in str(other.exception)


def test_a_run_that_diverges_is_not_finished(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke(tiny_dir, tmp_path, "-o", str(out), "--lr", "1e30", "--epochs", "3")
    assert isinstance(result.exception, TrainingError)
    assert "not finite: lower --lr" in str(result.exception)
    assert not out.exists()
    # Nothing of it can be gone on with, so nothing stands in the way of another rate.
    assert [p.name for p in (tmp_path / "out.partial").iterdir()] == [LOG]
    for way in ([], ["--resume"]):
        result = invoke(tiny_dir, tmp_path, "-o", str(out), "--lr", "1e-4", *way)
        assert result.exit_code == 0, result.output
    assert not (tmp_path / "out.partial").exists()


def test_a_loss_that_rises_is_said(tiny_dir: Path, tmp_path: Path) -> None:
    args, learnt = ("--epochs", "3", "--batch-size", "2"), tmp_path / "learnt"
    sound = invoke(tiny_dir, tmp_path, "-o", str(learnt), "--lr", "2e-2", *args)
    assert (sound.exit_code, "try a lower --lr" in sound.stderr) == (0, False)
    spoilt = invoke(learnt, tmp_path, "-o", str(tmp_path / "spoilt"), "--lr", "10", *args)
    assert (spoilt.exit_code, "try a lower --lr" in spoilt.stderr) == (0, True), spoilt.stderr


def test_weights_are_as_readable_as_other_files(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke(tiny_dir, tmp_path, "-o", str(out)).exit_code == 0
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1


def test_a_full_disk_is_called_one(tiny_dir: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: the same calls fail in the same way."""
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for every in ("1", "50"):  # torch's checkpoint, safetensors' model
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            result = invoke(tiny_dir, tmp_path, "-o", str(out), "--checkpoint-every", every)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert isinstance(result.exception, OutputError), result.exception
        assert "out.partial cannot be written" in str(result.exception)
        assert "MB are free" in str(result.exception)
        shutil.rmtree(tmp_path / "out.partial")
    assert not out.exists()


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_directory_without_a_name(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    result = invoke(tiny_dir, tmp_path, "-o", name)
    assert result.exit_code == 2
    assert "is no name for a directory to make" in result.stderr


def test_a_second_run_in_one_directory_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with only_writer(out):
        result = invoke(tiny_dir, tmp_path, "-o", str(out))
    assert "another run is writing" in str(result.exception)
    assert not out.with_name("out.partial").exists()


def test_pairs_of_others(tiny_dir: Path, tmp_path: Path) -> None:
    """TRL's conversational format without our fields; pairs of one prompt share it."""
    plain = [{k: p.to_dict()[k] for k in ("prompt", "chosen", "rejected")} for p in pairs()]
    foreign = [Pair.from_dict(p) for p in plain]
    assert [p.to_dict() for p in foreign] == [p | {"agent": "", "task_id": ""} for p in plain]
    result = invoke(tiny_dir, tmp_path, "-o", str(tmp_path / "out"), made=foreign)
    assert result.exit_code == 0, result.output
    assert "6 pairs of 1 views" in result.stderr  # they begin with the same message
    assert "first pair: pair 1\n" in result.stderr
    with pytest.raises(InputError, match="begins with an assistant message"):
        Pair.from_dict(plain[0] | {"prompt": [{"role": "assistant", "content": "hm"}]})


def test_dropped_pairs_are_named(tiny_dir: Path, tmp_path: Path) -> None:
    long = replace(pairs()[0], chosen=({"role": "assistant", "content": "yes " * 300},))
    result = invoke(
        tiny_dir, tmp_path, "--dry-run", "--max-length", "200", made=[long, *pairs()[1:]]
    )
    assert result.exit_code == 0, result.output
    assert "1 dropped (prompt and turns exceed 200 tokens)" in result.stdout
    assert "dropped: pair 1 (a Alice)" in result.stdout


def test_resume_leaves_an_unfinished_run_with_other_settings_alone(
    tiny_dir: Path, tmp_path: Path
) -> None:
    out = run(tiny_dir, tmp_path / "out")
    other = RunDirectory(out)
    other.open({"other": 1}, resume=False, overwrite=True)
    with pytest.raises(OutputError, match="is an unfinished run with other settings"):
        run(tiny_dir, out, resume=True)
    assert other.partial.exists()
    assert out.exists()


def test_a_dry_run_shows_a_pair(tiny_dir: Path, tmp_path: Path) -> None:
    result = invoke(tiny_dir, tmp_path, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "chosen ⟦Who has the key?<|im_end|>⟧" in result.stdout
    assert "of the tokens to compute" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_pairs_that_teach_nothing_are_refused(tiny_dir: Path, tmp_path: Path) -> None:
    chat = ChatEncoder(tiny_tokenizer("smollm2"))
    empty = replace(pairs()[0], rejected=({"role": "assistant", "content": ""},))
    with pytest.raises(TrainingError, match=r"pair 1 \(a Alice\): a turn is empty"):
        encode([empty], chat, 500)  # a record from Python; Pair.from_dict refuses it
    with pytest.raises(TrainingError, match="all 6 exceed --max-length 20"):
        encode(pairs(), chat, 20)


def test_long_conversations_lose_partners_turns_only() -> None:
    """Both sides keep the same prompt."""
    chat = ChatEncoder(tiny_tokenizer("smollm2"))
    (whole,), _ = encode(pairs()[-1:], chat, 500)
    (cut,), dropped = encode(pairs()[-1:], chat, len(whole.chosen.ids) - 10)
    assert dropped == []
    assert cut.cut >= 10
    assert cut.chosen.ids[: cut.chosen.start] == cut.rejected.ids[: cut.rejected.start]
    for side, old in ((cut.chosen, whole.chosen), (cut.rejected, whole.rejected)):
        assert side.ids[side.start :] == old.ids[old.start :]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 64])
@pytest.mark.parametrize("tokens", [1, 150, 4000])
def test_every_pair_is_seen_once_an_epoch(batch_size: int, tokens: int, plain: bool) -> None:
    rows, _ = rows_for("smollm2")
    settings = replace(SETTINGS, batch_size=batch_size, epochs=2, micro_tokens=tokens)
    made = dpo.plan(rows, settings, plain=plain)
    per_epoch = len(made) // 2
    for epoch in (made[:per_epoch], made[per_epoch:]):
        seen = [i for step in epoch for part in step for i in part.pairs]
        assert sorted(seen) == list(range(6))
        assert all(sum(len(p.pairs) for p in step) <= batch_size for step in epoch)
    for step in made:
        for part in step:
            width = max(len(trie.ids) for trie in part.rows)
            assert width * len(part.rows) <= tokens or len(part.pairs) == 1
            sources = [row for trie in part.rows for row in trie.targets]
            assert len(sources) == 2 * len(part.pairs)
