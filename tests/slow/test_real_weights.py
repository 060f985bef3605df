"""The real 135M model: what tiny random models cannot show. Run by `make slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from optima_lite.dialogue import Sampling, run, start
from optima_lite.engines.base import Utterance
from optima_lite.engines.hf import HFEngine
from optima_lite.engines.loading import LoadOptions
from optima_lite.records import Trajectory
from optima_lite.selection import examples
from optima_lite.tasks.relay import Relay
from optima_lite.teams import load_team, view

pytestmark = pytest.mark.slow
FP32 = LoadOptions(load="fp32", device="cpu")


def tasks(count: int, split: str = "test", seed: int = 0):
    return list(islice(Relay().tasks(split=split, seed=seed), count))


def talk(engine: HFEngine, count: int, temperature: float, n: int = 1) -> list[Trajectory]:
    groups = (
        start(task, load_team("relay"), n, Sampling(temperature, seed=3)) for task in tasks(count)
    )
    return [c.trajectory(engine.name, {}) for group in run(groups, engine) for c in group]


@pytest.fixture(scope="module")
def relay() -> HFEngine:
    return HFEngine.load("relay", FP32, slots=16)


def optima(*words: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optima_lite", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_by_one_and_many_at_once_say_the_same(relay: HFEngine, temperature: float) -> None:
    alone = HFEngine(relay.model, relay.chat.tokenizer, "relay", slots=1)
    together = talk(relay, 3, temperature)
    assert together == talk(alone, 3, temperature)
    assert any(t.agreed for t in together)


def test_greedy_equals_generate_without_a_cache_of_ours(relay: HFEngine) -> None:
    for trajectory in talk(relay, 2, 0.0):
        for number, turn in enumerate(trajectory.turns):
            agent = next(a for a in trajectory.team.agents if a.name == turn.agent)
            ids = relay.chat.prompt(
                view(trajectory.team, trajectory.task, agent, trajectory.turns[:number])
            )
            said = relay.model.generate(
                torch.tensor([ids]),
                max_new_tokens=trajectory.team.max_turn_tokens,
                do_sample=False,
                eos_token_id=relay.chat.end_of_turn,
                pad_token_id=relay.chat.end_of_turn,
            )[0, len(ids) :].tolist()
            assert relay.chat.decode(said) == turn.text


def test_trained_spans_decode_to_own_turns_and_end_of_turn(relay: HFEngine) -> None:
    tokenizer = relay.chat.tokenizer
    for trajectory in talk(relay, 4, 0.8):
        for example in examples(trajectory):
            encoded = relay.chat.encode(example.messages)
            spoken = [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans]
            own = [t.text for t in trajectory.turns if t.agent == example.agent]
            assert spoken == [f"{text}<|im_end|>" for text in own]


def test_losses_equal_a_plain_loop_over_turns() -> None:
    engine = HFEngine.load("smollm2", FP32)
    texts = [u.text for t in talk(engine, 2, 0.8) for u in t.turns] + ["<A>Pelham</A>", "Yes."]
    together = engine.losses([Utterance(text) for text in texts])
    header = engine.chat.tokenizer("<|im_start|>assistant\n").input_ids
    for text, loss in zip(texts, together, strict=True):
        ids = header + engine.chat.tokenizer(text).input_ids
        with torch.no_grad():
            logps = engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain = [-float(logps[i - 1, ids[i]]) for i in range(len(header), len(ids))]
        if plain:
            assert loss == pytest.approx(sum(plain) / len(plain), abs=1e-4)
        else:
            assert loss is None


def test_four_bit_training_on_the_cpu_lowers_the_loss(tmp_path: Path) -> None:
    rows = [e.to_dict() for t in talk(HFEngine.load("relay", FP32), 4, 0.0) for e in examples(t)]
    data = tmp_path / "examples.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "four"
    done = optima(
        *f"sft {data} --model smollm2 --load 4bit -o {out} --epochs 8 --batch-size 4".split(),
        *["--lr", "1e-3", "--device", "cpu"],
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line).get("loss") for line in (out / "training.jsonl").open()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.7 * losses[0]
    greedy = optima(
        *f"gen --model {out} --load 4bit --device cpu -n 1 -t 0 --max-turns 2".split(),
        input="".join(json.dumps(t.to_dict()) + "\n" for t in tasks(2)),
    )
    assert greedy.returncode == 0, greedy.stderr
    assert len(greedy.stdout.splitlines()) == 2


def test_trees_beside_four_bit_weights_and_preferences(tmp_path: Path) -> None:
    """Policy and base are one copy of 4-bit weights; DPO starts at ln 2 from the demo's adapter,
    and prefers what it was shown."""
    trees, data, out = (tmp_path / name for name in ("trees.jsonl", "pairs.jsonl", "out"))
    done = optima(
        *f"tree --model relay --base smollm2 --load 4bit --device cpu -t 0.8 -o {trees}".split(),
        *["--iterations", "2"],
        input="".join(json.dumps(t.to_dict()) + "\n" for t in tasks(2)),
    )
    assert done.returncode == 0, done.stderr
    base = HFEngine.load("smollm2", LoadOptions("4bit", "cpu"))
    for line in trees.open():
        nodes = [node for node in json.loads(line)["nodes"] if node["text"]]
        expected = base.losses([Utterance(node["text"]) for node in nodes])
        assert [node["loss"] for node in nodes] == pytest.approx(expected, abs=0.02)
    done = optima(*f"select {trees} --theta -9 --theta-diff 0.05 -o {data}".split())
    assert done.returncode == 0, done.stderr
    options = "--model relay --batch-size 4 --epochs 6 --lr 1e-4 --alpha 0 --device cpu"
    done = optima("dpo", str(data), *options.split(), "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "prefixes are not shared" not in done.stderr
    log = [json.loads(line) for line in (out / "training.jsonl").open()]
    assert log[0]["dpo_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert log[-1]["rewards/accuracy"] > 0.7
