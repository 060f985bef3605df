"""Whole SFT runs on a tiny model: what is written, loaded again, continued, stopped and resumed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from optima_lite.chat import ChatEncoder
from optima_lite.cli.sft import command
from optima_lite.engines.base import Request, Utterance
from optima_lite.engines.hf import HFEngine
from optima_lite.engines.loading import LoadOptions, load_for_inference, load_tokenizer, resolve
from optima_lite.errors import ModelError, OutputError
from optima_lite.records import Example
from optima_lite.training import sft
from optima_lite.training.common import TrainSettings
from optima_lite.training.encode import Row, audit
from optima_lite.training.run import LOG, SETTINGS, RunDirectory, RunLog
from optima_lite.training.sft import resolved_settings, train

FP32 = LoadOptions("fp32", "cpu")
TALKS = [
    ["Who has the key?", "Bob: I have it.", "<A>Bob</A>"],
    ["seven"],
    ["The blue door.", "Bob: Yes " * 5, "No, the other one!"],
    ["Yes, I agree."],
    ["a", "Bob: b", "c", "Bob: d", "<A>e</A>"],
    ["The red key opens it. " * 4],
]
#: 6 examples in steps of 3: two steps an epoch.
SETTINGS_OF_TESTS = TrainSettings(
    lr=1e-2, epochs=2, batch_size=3, micro_batch_size=2, lora_r=4, lora_alpha=8
)


def changed(**changes: Any) -> TrainSettings:
    from dataclasses import replace

    return replace(SETTINGS_OF_TESTS, **changes)


def examples() -> list[Example]:
    made = []
    for i, talk in enumerate(TALKS):
        messages = [{"role": "system", "content": "You are Alice. Which door?"}]
        messages += [
            {"role": ("assistant", "user")[k % 2], "content": t} for k, t in enumerate(talk)
        ]
        made.append(Example(tuple(messages), "Alice", f"t/{i}#0", 1.0))
    return made


def rows(model: Path) -> list[Row]:
    tokenizer = load_tokenizer(resolve(str(model)), FP32)
    return audit(examples(), ChatEncoder(tokenizer), 500).rows


def run(model: Path, out: Path, settings: TrainSettings, resume: bool = False) -> Path:
    """What the command does after its checks."""
    spec = resolve(str(model))
    made = rows(model)
    directory = RunDirectory(out)
    assert directory.open(
        resolved_settings(settings, spec, FP32, made), resume=resume, overwrite=False
    )
    train(made, spec, load_tokenizer(spec, FP32), FP32, settings, directory)
    return out


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [float(entry["loss"]) for entry in log(out) if "loss" in entry]


def weights(out: Path) -> dict[str, torch.Tensor]:
    (file,) = out.glob("*.safetensors")
    return load_file(str(file))


@torch.no_grad()
def plain_loss(model: Any, made: list[Row]) -> float:
    """Mean of -log p over all trained tokens, one example at a time."""
    terms = []
    for row in made:
        logps = torch.log_softmax(model(torch.tensor([row.ids])).logits[0], dim=-1)
        for start, end in row.spans:
            terms += [-float(logps[i - 1, row.ids[i]]) for i in range(start, end)]
    return sum(terms) / len(terms)


@pytest.fixture(scope="module")
def adapter(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished LoRA run of 4 steps."""
    return run(tiny_dir, tmp_path_factory.mktemp("runs") / "adapter", SETTINGS_OF_TESTS)


# -- a finished run ---------------------------------------------------------------------------


def test_a_finished_run_is_a_model_directory(tiny_dir: Path, adapter: Path) -> None:
    names = {path.name for path in adapter.iterdir()}
    expected = {"adapter_config.json", "adapter_model.safetensors", LOG, SETTINGS}
    assert expected <= names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert not adapter.with_name("adapter.partial").exists()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_dir.resolve())
    settings = json.loads((adapter / SETTINGS).read_text())
    assert settings["settings"]["lr"] == 1e-2
    assert settings["settings"]["examples"] == 6
    assert {"torch", "transformers", "peft"} <= settings["versions"].keys()


def test_no_pickles_are_left(adapter: Path) -> None:
    left = [p.name for p in adapter.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert left == []


def test_the_log_has_a_line_a_step(adapter: Path) -> None:
    """6 examples in steps of 3, twice: steps 1 to 4."""
    assert [e["step"] for e in log(adapter)] == [1, 2, 3, 4]
    assert losses(adapter)[-1] < losses(adapter)[0]


def test_the_adapter_loads_and_differs_from_its_base(tiny_dir: Path, adapter: Path) -> None:
    base, trained = HFEngine.load(str(tiny_dir), FP32), HFEngine.load(str(adapter), FP32)
    texts = [Utterance("Who has the key?"), Utterance("<A>Bob</A>"), Utterance("seven")]
    before, after = base.losses(texts), trained.losses(texts)
    assert all(abs(a - b) > 1e-3 for a, b in zip(before, after, strict=True) if a and b)
    made = rows(tiny_dir)
    assert plain_loss(trained.model, made) < plain_loss(base.model, made)
    request = [Request([{"role": "user", "content": "Hi"}], 10, 0.0, 0)]
    queue = list(request)
    (said,) = [c for _, c in trained.generate(lambda room: [queue.pop()] if queue else [])]
    assert said.stop in ("end", "length")


# -- what is optimised ------------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_the_first_loss_is_the_models_own(tiny_dir: Path, tmp_path: Path, tune: str) -> None:
    """One step of all examples: a fresh adapter is the base itself."""
    out = run(tiny_dir, tmp_path / "out", changed(tune=tune, batch_size=6, epochs=1))
    model = load_for_inference(resolve(str(tiny_dir)), FP32)
    assert losses(out) == [pytest.approx(plain_loss(model, rows(tiny_dir)), abs=1e-4)]


def test_a_continued_adapter_starts_where_it_ended(adapter: Path, tmp_path: Path) -> None:
    """Its first loss is that of the loaded model, merged by another path, and with next to no
    learning rate its weights stay."""
    out = run(adapter, tmp_path / "out", changed(lr=1e-12, batch_size=6, epochs=1))
    model = load_for_inference(resolve(str(adapter)), FP32)
    assert losses(out) == [pytest.approx(plain_loss(model, rows(adapter)), abs=1e-4)]
    before, after = weights(adapter), weights(out)
    assert before.keys() == after.keys()
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-9)


def test_a_continued_adapter_is_trained(adapter: Path, tmp_path: Path) -> None:
    out = run(adapter, tmp_path / "out", SETTINGS_OF_TESTS)
    assert losses(out)[-1] < losses(adapter)[-1]
    before, after = weights(adapter), weights(out)
    assert all(not torch.equal(before[key], after[key]) for key in before)
    assert resolve(str(out)).base == resolve(str(adapter)).base


def test_full_tuning_writes_whole_weights(tiny_dir: Path, tmp_path: Path) -> None:
    out = run(tiny_dir, tmp_path / "out", changed(tune="full", lr=1e-3))
    assert not (out / "adapter_config.json").exists()
    before, after = weights(tiny_dir), weights(out)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    model = load_for_inference(resolve(str(out)), FP32)
    assert plain_loss(model, rows(out)) < losses(out)[0]


def test_full_tuning_of_an_adapter_starts_from_both(adapter: Path, tmp_path: Path) -> None:
    out = run(adapter, tmp_path / "out", changed(tune="full", batch_size=6, epochs=1))
    model = load_for_inference(resolve(str(adapter)), FP32)
    assert losses(out) == [pytest.approx(plain_loss(model, rows(adapter)), abs=1e-4)]
    assert resolve(str(out)).adapter is None


def test_a_smaller_last_step_weighs_its_own_tokens(tiny_dir: Path, tmp_path: Path) -> None:
    """6 examples in steps of 4 and 2. Whichever two came last, the losses of the two steps are
    the means over the tokens of those two examples and of the other four."""
    out = run(tiny_dir, tmp_path / "out", changed(lr=1e-12, batch_size=4, epochs=1))
    made = rows(tiny_dir)
    model = load_for_inference(resolve(str(tiny_dir)), FP32)
    possible = [
        (
            plain_loss(model, [row for row in made if row not in last]),
            plain_loss(model, list(last)),
        )
        for last in itertools.combinations(made, 2)
    ]
    four, two = losses(out)
    assert any(abs(a - four) < 1e-4 and abs(b - two) < 1e-4 for a, b in possible)


def test_micro_batches_change_memory_only(tiny_dir: Path, tmp_path: Path, adapter: Path) -> None:
    out = run(tiny_dir, tmp_path / "out", changed(micro_batch_size=3))
    assert losses(out) == pytest.approx(losses(adapter), abs=1e-4)


def test_gradient_checkpointing_changes_memory_only(
    tiny_dir: Path, tmp_path: Path, adapter: Path
) -> None:
    out = run(tiny_dir, tmp_path / "out", changed(gradient_checkpointing=True))
    assert losses(out) == pytest.approx(losses(adapter), abs=1e-4)
    assert weights(out)  # and the adapter was trained:
    for key, value in weights(adapter).items():
        torch.testing.assert_close(weights(out)[key], value, rtol=1e-3, atol=1e-4)


# -- stopped and resumed ----------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, tune: str
) -> None:
    """Stopped in the first epoch and in the second, after a checkpoint was written."""
    settings = changed(tune=tune, checkpoint_every=1)
    whole = run(tiny_dir, tmp_path / "whole", settings)

    on_save = RunLog.on_save

    def stopping(self: RunLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_save(self, args, state, control, **kwargs)
        if state.global_step == stop_at:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "on_save", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_dir, out, settings)
    assert not out.exists()
    checkpoints = tmp_path / "out.partial" / "checkpoints"
    assert (checkpoints / f"checkpoint-{stop_at}").is_dir()
    # A checkpoint that was cut short in the middle is not taken.
    torn = checkpoints / f"checkpoint-{stop_at + 1}"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_st')

    run(tiny_dir, out, settings, resume=True)
    assert not (tmp_path / "out.partial").exists()
    assert losses(out) == pytest.approx(losses(whole), abs=1e-5)
    assert [e["step"] for e in log(out) if "loss" in e] == [1, 2, 3, 4]
    expected = weights(whole)
    for key, value in weights(out).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_does_not_repeat_its_steps(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = changed(checkpoint_every=3)
    on_step_end = RunLog.on_step_end
    steps: list[int] = []

    def counting(self: RunLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_step_end(self, args, state, control, **kwargs)
        steps.append(state.global_step)
        if len(steps) == 4:  # after the checkpoint of step 3, before the run is finished
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "on_step_end", counting)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_dir, tmp_path / "out", settings)
    run(tiny_dir, tmp_path / "out", settings, resume=True)
    assert steps == [1, 2, 3, 4, 4]


def test_resume_refuses_other_settings_and_other_data(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sft.SFTTrainer, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_dir, tmp_path / "out", SETTINGS_OF_TESTS)
    with pytest.raises(OutputError, match="lr"):
        run(tiny_dir, tmp_path / "out", changed(lr=1e-3), resume=True)
    monkeypatch.setattr("test_sft_run.TALKS", [*TALKS[1:], ["new"]])
    with pytest.raises(OutputError, match="data"):
        run(tiny_dir, tmp_path / "out", SETTINGS_OF_TESTS, resume=True)


# -- damaged adapters -------------------------------------------------------------------------


def damaged(adapter: Path, path: Path, change: Any) -> Path:
    path.mkdir()
    for file in adapter.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(str(path / "adapter_model.safetensors"))
    change(tensors)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    return path


def rename(tensors: dict[str, torch.Tensor]) -> None:
    key = sorted(tensors)[0]
    tensors[key.replace("lora_A", "lora_X")] = tensors.pop(key)


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[sorted(tensors)[-1]]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 32)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    key = sorted(tensors)[0]
    tensors[key] = torch.zeros(7, 7)


@pytest.mark.parametrize("change", [rename, remove, add, widen])
def test_a_damaged_adapter_is_refused(adapter: Path, tmp_path: Path, change: Any) -> None:
    """PEFT alone would load it with a random or zero part."""
    broken = damaged(adapter, tmp_path / "broken", change)
    with pytest.raises(ModelError, match="broken"):
        load_for_inference(resolve(str(broken)), FP32)
    with pytest.raises(ModelError, match="broken"):
        run(broken, tmp_path / "out", SETTINGS_OF_TESTS)
    assert not (tmp_path / "out").exists()


def test_an_undamaged_copy_is_not(adapter: Path, tmp_path: Path) -> None:
    copy = damaged(adapter, tmp_path / "copy", lambda tensors: None)
    load_for_inference(resolve(str(copy)), FP32)


def test_an_adapter_without_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    broken = damaged(adapter, tmp_path / "broken", lambda tensors: None)
    (broken / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="missing"):
        load_for_inference(resolve(str(broken)), FP32)


# -- the command ------------------------------------------------------------------------------


def invoke(tiny_dir: Path, tmp_path: Path, *args: str) -> Result:
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(e.to_dict()) + "\n" for e in examples()))
    fixed = ["--model", str(tiny_dir), "--load", "fp32", "--device", "cpu"]
    return CliRunner().invoke(command, [str(file), *fixed, *args])


def test_the_command_trains_and_resumes_to_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["-o", str(out), "--epochs", "1", "--batch-size", "3", "--lora-r", "4"]
    result = invoke(tiny_dir, tmp_path, *args)
    assert result.exit_code == 0, result.output
    assert result.stdout == "", "stdout is for records"
    assert "6 examples; 0 dropped" in result.stderr
    assert "is finished: 2 steps" in result.stderr
    assert [e["step"] for e in log(out) if "loss" in e] == [1, 2]
    settings = json.loads((out / SETTINGS).read_text())["settings"]
    assert (settings["lr"], settings["lora_alpha"], settings["tune"]) == (2e-4, 8, "lora")

    stamp = (out / "adapter_model.safetensors").stat().st_mtime_ns
    again = invoke(tiny_dir, tmp_path, *args, "--resume")
    assert again.exit_code == 0
    assert "is finished" in again.stderr
    assert (out / "adapter_model.safetensors").stat().st_mtime_ns == stamp
    refused = invoke(tiny_dir, tmp_path, *args)
    assert isinstance(refused.exception, OutputError)
    assert "--overwrite" in str(refused.exception)


def test_a_dry_run_writes_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    result = invoke(tiny_dir, tmp_path, "-o", str(tmp_path / "out"), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "⟦Who has the key?<|im_end|>⟧" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["examples.jsonl"]


def test_two_processes_train_what_one_does(tiny_dir: Path, tmp_path: Path) -> None:
    """As `accelerate launch` starts them; each sees half of every step's examples."""
    one = tmp_path / "one"
    args = ["--epochs", "3", "--batch-size", "6", "--lora-r", "4"]
    assert invoke(tiny_dir, tmp_path, "-o", str(one), *args).exit_code == 0
    two = tmp_path / "two"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "optima_lite", "sft", str(tmp_path / "examples.jsonl"), "-o", str(two)]
    words += ["--model", str(tiny_dir), "--load", "fp32", "--device", "cpu", *args]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("6 examples; 0 dropped") == 1, "only one process speaks"
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    expected = weights(one)
    for key, value in weights(two).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
