"""The options of sft and dpo."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest

from optima_lite.training.common import TrainSettings
from optima_lite.training.dpo import DPOSettings


@pytest.mark.parametrize(("name", "settings"), [("sft", TrainSettings()), ("dpo", DPOSettings())])
def test_the_defaults_are_those_of_the_settings(name: str, settings: TrainSettings) -> None:
    """Declared twice, since --help must not import torch."""
    command = importlib.import_module(f"optima_lite.cli.{name}").command
    options = {option.name: option for option in command.params}
    flags = {name for name, option in options.items() if getattr(option, "is_flag", False)}
    same = {field.name for field in fields(settings)} & options.keys() - {"lr"} - flags
    assert {"tune", "epochs", "batch_size", "max_length", "lora_r"} <= same
    assert {key: options[key].default for key in same} == {
        key: getattr(settings, key) for key in same
    }
    assert settings.lora_alpha == 2 * settings.lora_r
    assert f"with LoRA {settings.lr:.0e}]".replace("e-0", "e-") in options["lr"].help
