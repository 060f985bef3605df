"""Preference training with shared prefixes against TRL's DPOTrainer: time and peak memory.

    python benchmarks/dpo.py            # 32 pairs, about 6 minutes on 2 cores
    python benchmarks/dpo.py --pairs 8

A Llama of SmolLM2-135M's shape with random weights, LoRA r 16 on all linear layers, bf16 autocast,
one step of all pairs. Prompts have about 800 tokens, turns 10 to 40. `ours` gets each pair with a
prompt of its own; `ours, trees` the pairs of --family siblings' families, as they come from trees.
Each run is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

RUNS = ("trl", "ours", "ours, trees")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--family", type=int, default=4, help="pairs of a prompt in `ours, trees`")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="of ours, as of dpo")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(arguments)))
        return
    found = {}
    for name in RUNS:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--run", name],
            stdout=subprocess.PIPE, check=True, text=True,
        )  # fmt: skip
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:12} {found[name]['seconds'] / arguments.pairs:6.2f} s a pair, "
              f"peak {found[name]['peak_mib']:6.0f} MiB, at rest {found[name]['rest_mib']:5.0f}, "
              f"time ratio {found['trl']['seconds'] / found[name]['seconds']:.2f}, "
              f"memory ratio {found[name]['peak_mib'] / found['trl']['peak_mib']:.2f}")  # fmt: skip


def model() -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def rows(count: int, family: int) -> list[Any]:
    """Pairs as token ids; `family` of them in a row have the same prompt."""
    from optima_lite.training.pack import Completion
    from optima_lite.training.pairs import PairRow

    rng = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(49152) for _ in range(rng.randint(low, high))]

    made = []
    prompt: list[int] = []
    for i in range(count):
        if i % family == 0:
            prompt = tokens(760, 840)
        sides = [Completion(prompt + tokens(10, 40), len(prompt)) for _ in range(2)]
        made.append(PairRow(f"{i}", (f"{i // family}", "Alice"), *sides))
    return made


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        if arguments.run == "trl":
            make = trl_trainer
        else:
            make = partial(our_trainer, micro_tokens=arguments.micro_tokens)
        made = rows(arguments.pairs, arguments.family if arguments.run == "ours, trees" else 1)
        policy = model()
        rest = peak()
        started = time.monotonic()
        make(policy, made, Path(folder))
        return {"seconds": time.monotonic() - started, "peak_mib": peak(), "rest_mib": rest}


def our_trainer(policy: Any, made: list[Any], folder: Path, micro_tokens: int) -> None:
    from optima_lite.engines.loading import LoadOptions
    from optima_lite.training.attention import in_blocks
    from optima_lite.training.dpo import DPOSettings, make_trainer, plan
    from optima_lite.training.run import RunDirectory

    settings = DPOSettings(batch_size=len(made), alpha=0.0, micro_tokens=micro_tokens)
    directory = RunDirectory(folder / "out")
    directory.open({}, resume=False, overwrite=False)
    steps = plan(made, settings)
    trainer = make_trainer(policy, steps, settings, LoadOptions("bf16", "cpu"), directory)
    with in_blocks(policy):
        trainer.prepare(settings, len(made), 0)
        trainer.train()


def trl_trainer(policy: Any, made: list[Any], folder: Path) -> None:
    """With the reference computed in the same pass, which is TRL's default, a pair at a time."""
    import trl
    from datasets import Dataset
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    class Tokenised(trl.DPOTrainer):  # type: ignore[misc]
        """Takes token ids as they are."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    data = Dataset.from_list(
        [
            {
                "prompt_ids": row.chosen.ids[: row.chosen.start],
                "chosen_ids": row.chosen.ids[row.chosen.start :],
                "rejected_ids": row.rejected.ids[row.rejected.start :],
            }
            for row in made
        ]
    )
    config = trl.DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(made),
        num_train_epochs=1,
        learning_rate=5e-6,
        max_length=None,
        save_strategy="no",
        use_cpu=True,
        bf16=True,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    tokenizer = _tokenizer()
    trainer = Tokenised(
        model=policy,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForPreference(pad_token_id=0),
    )
    trainer.train()


def _tokenizer() -> Any:
    """Any tokenizer: TRL wants one, the data has token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")),
        pad_token="x",
        eos_token="x",
    )


if __name__ == "__main__":
    main()
