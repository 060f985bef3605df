"""The transformers engine against plain loops: no cache, no batches, no padding."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    ARCHS,
    STYLE_OF,
    STYLES,
    WINDOW,
    make_talkative,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM

from optima_lite.chat import ChatEncoder
from optima_lite.dialogue import Conversation, Sampling, run, start
from optima_lite.engines import hf
from optima_lite.engines.base import Completion, Pull, Request, Utterance
from optima_lite.engines.hf import HFEngine
from optima_lite.engines.kv import PrefixStore, common_prefix
from optima_lite.engines.loading import LoadOptions, load_base, resolve
from optima_lite.errors import ModelError
from optima_lite.records import Agent, Task, Team, Trajectory

every_arch = pytest.mark.parametrize("arch", ARCHS)

PROMPT = "You are {name}, with {partners}.\nQuestion: {question}\n{context}"
TEAM = Team("pair", (Agent("Alice", PROMPT), Agent("Bob", PROMPT)), max_turns=5, max_turn_tokens=24)
TRIO = Team("trio", tuple(Agent(n, PROMPT) for n in ("Ann", "Bo", "Cy")), max_turns=6)
TASKS = [
    Task(f"t/{i}", "exchange", question, ("x",), "f1", contexts=(("Alice knows the key.",), tail))
    for i, (question, tail) in enumerate(
        [
            ("Who has the key?", ("Bob knows the door.", "The door is blue.")),
            ("Who has the red key?", ("Nothing.",)),
            ("Is it seven?", ("Yes, I think it is seven, not three. Ask him, then tell her.",)),
            ("Which?", ("The blue door, the red key: " * 6,)),
        ]
    )
]


@cache
def model_and_tokenizer(arch: str) -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer(STYLE_OF[arch])
    model = tiny_model(arch, tokenizer)
    end = tokenizer.convert_tokens_to_ids(STYLES[STYLE_OF[arch]]["end"])
    return make_talkative(model, end), tokenizer


def engine(arch: str = "llama", **kwargs: Any) -> HFEngine:
    return HFEngine(*model_and_tokenizer(arch), arch, **kwargs)


class PlainEngine:
    """Greedy, one request at a time, the whole sequence through the model for every token."""

    def __init__(self, arch: str):
        self.name = "plain"
        self.model, tokenizer = model_and_tokenizer(arch)
        self.chat = ChatEncoder(tokenizer)
        self._stops = {self.chat.end_of_turn, tokenizer.eos_token_id}

    @torch.no_grad()
    def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
        while requests := pull(1):
            (request,) = requests
            assert request.temperature == 0
            ids = self.chat.prompt(request.messages)
            said: list[int] = []
            stop = "length"
            while len(said) < request.max_tokens:
                logits = self.model(torch.tensor([ids + said]), use_cache=False).logits[0, -1]
                said.append(int(logits.argmax()))
                if said[-1] in self._stops:
                    stop = "end"
                    said.pop()
                    break
            text = self.chat.decode(said)
            yield request, Completion(text, self.count_tokens(text), stop)

    def losses(self, utterances: Sequence[Utterance]) -> list[float | None]:
        raise NotImplementedError

    def count_tokens(self, text: str) -> int:
        return len(self.chat.text(text))


def talk(
    engine: Any, temperature: float = 0.0, n: int = 1, team: Team = TEAM, seed: int = 0
) -> list[Trajectory]:
    sampling = Sampling(temperature=temperature, seed=seed)
    tasks = (
        TASKS
        if len(team.agents) == 2
        else [
            Task("d/0", "debate", "Who?", ("x",), "f1"),
            Task("d/1", "debate", "Why?", ("x",), "f1"),
        ]
    )
    groups = (start(task, team, n, sampling) for task in tasks)
    return [c.trajectory("m", {}) for group in run(groups, engine) for c in group]


def turns(trajectories: Sequence[Trajectory]) -> list[list[tuple[str, int, str]]]:
    return [[(t.text, t.tokens, t.stop) for t in trajectory.turns] for trajectory in trajectories]


# -- generation -------------------------------------------------------------------------------


@every_arch
@pytest.mark.parametrize("team", [TEAM, TRIO], ids=["two agents", "three agents"])
@torch.no_grad()
def test_greedy_conversations_equal_a_loop_without_a_cache(arch: str, team: Team) -> None:
    expected = turns(talk(PlainEngine(arch), team=team))
    assert max(map(len, expected)) >= 3, "the test is about several turns"
    assert len(ChatEncoder(model_and_tokenizer(arch)[1]).text(PROMPT)) > 2 * WINDOW
    for slots in (1, 3):
        assert turns(talk(engine(arch, slots=slots), team=team)) == expected


@every_arch
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_neighbours_change_nothing(arch: str, temperature: float) -> None:
    """One slot, five, and many: the same conversations, greedy and sampled."""
    alone = turns(talk(engine(arch, slots=1), temperature, n=3))
    assert turns(talk(engine(arch, slots=5), temperature, n=3)) == alone
    assert turns(talk(engine(arch, slots=32), temperature, n=3)) == alone
    if temperature:
        assert len({str(t) for t in alone[:3]}) == 3, "trajectories of a task differ"
        assert turns(talk(engine(arch, slots=5), temperature, n=3, seed=1)) != alone


@pytest.mark.parametrize("kilobytes", [0, 40, 150, 400])
def test_a_small_cache_changes_nothing_but_time(
    kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 bytes a token (2 layers × 2 × 2 heads × 8 × 4 bytes): half of 40 kB holds 80 tokens,
    less than one prompt; half of 400 kB holds a few conversations, so some are evicted."""
    expected = turns(talk(engine(slots=5), 0.9, n=3))
    dropped = []
    drop = PrefixStore._drop
    monkeypatch.setattr(PrefixStore, "_drop", lambda self, e: (dropped.append(e), drop(self, e)))
    assert turns(talk(engine(slots=5, cache_gb=kilobytes * 1000 / 2**30), 0.9, n=3)) == expected
    if kilobytes == 400:
        assert dropped


def test_prefixes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 conversations of one task: their prompt goes through the model once, and a later turn
    only from the agent's last one on."""
    computed = Counter[str]()
    forward = HFEngine._forward

    def counting(self: Any, cache: Any, rows: Any, positions: Any, tokens: Any, last: Any) -> Any:
        computed["prompt" if len(tokens[0]) > 1 else "step"] += sum(i + 1 for i in last)
        return forward(self, cache, rows, positions, tokens, last)

    monkeypatch.setattr(HFEngine, "_forward", counting)
    it = engine(slots=8)
    task = TASKS[3]
    (group,) = run(iter([start(task, TEAM, 8, Sampling(0.9))]), it)
    prompts = full = 0
    for conversation in group:
        for spoken in range(len(conversation.turns)):
            probe = Conversation(task, TEAM, 0, Sampling(), turns=conversation.turns[:spoken])
            prompts += 1
            full += len(it.chat.prompt(probe.request().messages))
    assert prompts > 16
    assert computed["prompt"] < full / 3


def test_memory_bounds_what_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """150 kB: 75 kB for slots of 128 or 256 tokens × 256 bytes, so two of 64 slots at most."""
    rows = []
    forward = HFEngine._forward

    def watching(self: Any, cache: Any, *args: Any) -> Any:
        out = forward(self, cache, *args)
        held = sum(
            k.nbytes + v.nbytes
            for k, v in zip(cache._keys.values(), cache._values.values(), strict=True)
        )
        rows.append((len(args[0]), held))
        return out

    monkeypatch.setattr(HFEngine, "_forward", watching)
    talk(engine(slots=64, cache_gb=150_000 / 2**30), 0.9, n=3)
    assert max(n for n, _ in rows) <= 2
    assert max(held for _, held in rows) <= 150_000


def test_a_full_window_ends_a_turn() -> None:
    it = engine(slots=3, context=60)
    short = [{"role": "user", "content": "Who?"}]
    long = [{"role": "user", "content": "the blue door " * 40}]
    room = 60 - len(it.chat.prompt(short))
    assert 0 < room < 60
    it._stops = set()  # nothing else ends a turn
    done = answers(it, [Request(short, 500, 0.0, 0), Request(long, 5, 0.0, 0)])
    said, refused = done
    assert said.stop == "context"
    assert said.text
    assert (refused.text, refused.tokens, refused.stop) == ("", 0, "context")
    # One token fewer than the room: the limit of the turn comes first.
    (limited,) = answers(it, [Request(short, room - 1, 0.0, 0)])
    assert limited.stop == "length"
    (both,) = answers(it, [Request(short, room, 0.0, 0)])
    assert both.stop == "length", "a turn as long as its limit is a cut turn"


def test_context_full_conversations_are_recorded() -> None:
    ends = {t.end for t in talk(engine(slots=3, context=110), 0.9, n=2)}
    assert "context_full" in ends


def answers(it: Any, requests: list[Request], batch: int | None = None) -> list[Completion]:
    """Completions in the order of the requests; each must come exactly once."""
    queue = list(requests)

    def pull(room: int) -> list[Request]:
        taken = queue[: min(room, batch or room)]
        del queue[: len(taken)]
        return taken

    done: dict[int, Completion] = {}
    for request, completion in it.generate(pull):
        assert id(request) not in done, "yielded twice"
        done[id(request)] = completion
    assert len(done) == len(requests), "every request is answered"
    return [done[id(r)] for r in requests]


@pytest.mark.parametrize("batch", [1, 2, None])
@pytest.mark.parametrize("slots", [1, 4])
def test_every_request_is_answered_once(slots: int, batch: int | None) -> None:
    """However few a pull gives; too long ones, twins and one-token turns among them."""
    words = ["key", "door", "who", "seven " * 300, "blue", "key", "red", "table"]
    requests = [
        Request([{"role": "user", "content": w}], 1 + i % 4 * 5, 0.8 * (i % 2), seed=i)
        for i, w in enumerate(words)
    ]
    it = engine(slots=slots, context=200)
    expected = [answers(it, [r])[0] for r in requests]
    assert answers(it, requests, batch) == expected
    assert expected[3].stop == "context"
    assert answers(it, []) == []


def test_pulling_nothing_for_now_is_not_the_end() -> None:
    """Requests one after another: the next exists only when the one before is answered."""
    it = engine(slots=4)
    requests = [Request([{"role": "user", "content": w}], 8, 0.8, 7) for w in "abc"]
    expected = answers(it, requests)
    ready = requests[:1]

    def pull(room: int) -> list[Request]:
        taken = ready[:room]
        ready.clear()
        return taken

    got = []
    for request, completion in it.generate(pull):
        got.append(completion)
        following = requests.index(request) + 1
        ready.extend(requests[following : following + 1])
    assert got == expected


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """2000 first tokens. A share of p has a standard deviation of √(p(1-p)/2000) ≤ 0.012; with
    4.5 of them for each of 300 tokens a sound sampler fails once in 500 sets of seeds, and these
    seeds are fixed."""
    it = engine(slots=1)
    prompt = it.chat.prompt([{"role": "user", "content": "Who has the key?"}])
    with torch.no_grad():
        logits = it.model(torch.tensor([prompt])).logits[0, -1]
    exact = torch.softmax(logits / temperature, dim=-1)
    assert exact.max() < 0.9, "the test needs something to draw"
    counts = torch.zeros_like(exact)
    for seed in range(2000):
        turn = hf._Running(Request([], 1, temperature, seed), prompt, random.Random(seed))
        it._say(turn, logits)
        counts[turn.said[0]] += 1
    shares = counts / 2000
    assert bool(((shares - exact).abs() <= 4.5 * (exact * (1 - exact) / 2000).sqrt() + 1e-3).all())


def test_sampling_through_the_engine_follows_the_distribution() -> None:
    """400 turns of one token: the likeliest token's share is p within 4 √(p(1-p)/400)."""
    it = engine(slots=64)
    messages = [{"role": "user", "content": "Who has the key?"}]
    prompt = it.chat.prompt(messages)
    with torch.no_grad():
        exact = torch.softmax(it.model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    order = exact.argsort(descending=True).tolist()
    best = next(i for i in order if it.chat.decode([i]).isalnum() and i not in it._stops)
    text, p = it.chat.decode([best]), float(exact[best])
    same = sum(float(exact[i]) for i in range(len(exact)) if it.chat.decode([i]) == text)
    assert p > 0.01
    said = answers(it, [Request(messages, 1, 1.0, seed) for seed in range(400)])
    share = sum(c.text == text for c in said) / 400
    assert abs(share - same) < 4 * (same * (1 - same) / 400) ** 0.5


def test_a_seed_says_the_same_again() -> None:
    it = engine(slots=4)
    requests = [Request([{"role": "user", "content": "key"}], 20, 1.0, s) for s in (1, 1, 2)]
    first, twin, other = answers(it, requests)
    assert first == twin
    assert first != other


# -- the prefix store -------------------------------------------------------------------------


def kv(tokens: int, fill: float = 0.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One layer, 1 head, width 2: 2 × 2 × 4 = 16 bytes a token."""
    return [(torch.full((1, tokens, 2), fill), torch.full((1, tokens, 2), fill))]


def test_the_store_finds_the_longest_prefix() -> None:
    store = PrefixStore(10**6)
    store.put(range(40), kv(40, 1.0))
    store.put([*range(32), *range(100, 140)], kv(72, 2.0))
    for ids, length, fill in [
        (range(60), 40, 1.0),  # all of the first, more than whole blocks
        ([*range(32), 100, 101, 7], 34, 2.0),
        ([*range(20), 7, 8, 9], 20, None),  # either has it
        (range(35), 35, 1.0),  # shorter than the entry
    ]:
        known, found = store.longest(list(ids))
        assert known == length
        assert found is not None
        if fill is not None:
            assert float(found[0][0].max()) == fill
    assert store.longest([7, *range(40)]) == (0, None)
    assert store.longest(list(range(15))) == (0, None), "less than a block is not looked up"
    assert store.longest([]) == (0, None)


def test_the_store_drops_what_a_longer_entry_serves() -> None:
    store = PrefixStore(10**6)
    store.put(range(20), kv(20))
    store.put([*range(18), 99, 98], kv(20))
    store.put(range(40), kv(40))
    assert store.size == (20 + 40) * 16, "the first is a prefix of the third, the second is not"
    store.put(range(40), kv(40))
    assert store.size == (20 + 40) * 16, "the same again replaces"
    assert store.longest(list(range(40)))[0] == 40
    assert store.longest([*range(18), 99, 98])[0] == 20


def test_the_store_drops_the_least_recently_used() -> None:
    store = PrefixStore(100 * 16)
    for i in range(3):
        store.put([i] * 32, kv(32))
    assert store.size == 96 * 16
    assert store.longest([0] * 32)[0] == 32  # 0 is used now, so 1 is the oldest
    store.put([3] * 32, kv(32))
    assert [store.longest([i] * 32)[0] for i in range(4)] == [32, 0, 32, 32]
    assert store.size == 96 * 16
    store.put([4] * 101, kv(101))
    assert store.longest([4] * 101) == (0, None), "larger than the limit is not kept"
    assert store.size == 96 * 16
    store.put([5] * 100, kv(100))
    assert [store.longest([i] * 32)[0] for i in (0, 2, 3)] == [0, 0, 0]
    assert store.size == 100 * 16
    assert set(store._index) == set(store._entries[next(iter(store._entries))].marks)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


# -- losses -----------------------------------------------------------------------------------

TEXTS = ["Who has the key?", "seven", "", "Ask him, then tell her what he said. " * 3, "x", "Yes."]


@torch.no_grad()
def plain_loss(it: HFEngine, text: str, context: str | None) -> float | None:
    """One text, one pass: mean of -log p(token) over the text's own tokens."""
    if not text:
        return None
    before = (
        it.chat.reply_header()
        if context is None
        else it.chat.prompt([{"role": "user", "content": context}])
    )
    ids = before + it.chat.reply(text)
    logps = torch.log_softmax(it.model(torch.tensor([ids])).logits[0].double(), dim=-1)
    picked = [-float(logps[i - 1, ids[i]]) for i in range(len(before), len(ids))]
    return sum(picked) / len(picked)


@every_arch
@pytest.mark.parametrize("context", [None, "Bob: which door?\nAlice: the blue door, I think."])
def test_losses_equal_a_loop(
    arch: str, context: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = engine(arch)
    expected = [plain_loss(it, text, context) for text in TEXTS]
    assert expected[2] is None
    assert sum(e is not None and e > 0 for e in expected) == 5
    for budget in (1, 120, 2048):  # one text a batch, some, all
        monkeypatch.setattr(hf, "_LOSS_TOKENS", budget)
        for order in (list(range(6)), [5, 3, 1, 0, 2, 4]):
            got = it.losses([Utterance(TEXTS[i], context) for i in order])
            assert got == [
                None if expected[i] is None else pytest.approx(expected[i], abs=1e-4) for i in order
            ]


def test_losses_of_nothing() -> None:
    assert engine().losses([]) == []
    assert engine().losses([Utterance("")]) == [None]


def test_context_matters_to_losses() -> None:
    it = engine()
    alone, after = it.losses([Utterance("the blue door"), Utterance("the blue door", "Which?")])
    assert alone != pytest.approx(after)


def test_count_tokens_counts_text_only() -> None:
    it = engine()
    assert it.count_tokens("") == 0
    assert it.count_tokens("key") == len(it.chat.text("key")) > 0
    assert it.count_tokens("<|eot_id|>") > 1, "text, not a special token"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A directory with an adapter that changes everything, beside its base `tmp_path/base`."""
    from peft import LoraConfig, get_peft_model

    save_tiny(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_one_copy_of_weights_is_policy_and_base(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that is not merged, as beside 4-bit weights, is switched off for the base's losses
    and on again for what is said. (Quantised weights themselves are in the slow tests.)"""
    options = LoadOptions("4bit", "cpu")
    plain = LoadOptions("fp32", "cpu")
    monkeypatch.setattr(
        "optima_lite.engines.loading.load_base",
        lambda spec, _, real=load_base: real(spec, plain),
    )
    policy = resolve(str(adapter))
    engine, base = HFEngine.load_with_base(policy, policy.without_adapter, options)
    assert base.model is engine.model
    assert base.name == str(adapter.parent / "base")
    texts = [Utterance("Which door?"), Utterance("The blue door, I think.")]
    requests = [Request([{"role": "user", "content": "Which door?"}], 8, 0.8, 1)]
    before = engine.losses(texts), answers(engine, requests)
    expected = HFEngine.load(policy.without_adapter, plain).losses(texts)
    assert base.losses(texts) == pytest.approx(expected)
    assert base.losses(texts) != pytest.approx(before[0], rel=0.01)
    assert (engine.losses(texts), answers(engine, requests)) == before


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"its weights lack model\.layers\.\d.* more of what"):
        load_base(resolve(str(path)), LoadOptions("fp32", "cpu"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_gives_no_numbers_says_nothing(tmp_path: Path, temperature: float) -> None:
    engine = HFEngine.load(resolve(str(save_tiny(tmp_path / "m"))), LoadOptions("fp32", "cpu"))
    with torch.no_grad():
        next(engine.model.parameters())[:] = float("nan")
    with pytest.raises(ModelError, match="gives logits that are no numbers: its weights are brok"):
        answers(engine, [Request([{"role": "user", "content": "Which door?"}], 8, temperature, 1)])


def test_policy_and_base_are_two_where_they_must(adapter: Path) -> None:
    options = LoadOptions("fp32", "cpu")
    policy = resolve(str(adapter))
    engine, base = HFEngine.load_with_base(policy, policy.without_adapter, options)
    assert base.model is not engine.model
    engine, base = HFEngine.load_with_base(policy.without_adapter, policy.without_adapter, options)
    assert base is engine
