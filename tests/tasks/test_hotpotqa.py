"""HotpotQA rows become tasks that no agent can solve alone, and nothing of the text is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from optima_lite.errors import InputError
from optima_lite.metrics import f1
from optima_lite.records import Task
from optima_lite.tasks import DATASETS, get
from optima_lite.tasks.hotpotqa import HotpotQA, deal, join

DATA = Path(__file__).resolve().parents[2] / "../shared/data/hotpotqa"
FILES = {
    "train_official_60.json": 60,
    "dev_hf_schema_40.json": 40,
    "official_rows_as_jsonl_6.jsonl": 6,
}
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/hotpotqa")

OFFICIAL = {
    "_id": "abc1",
    "question": "In which river does the town where  Ada Rell was born lie? ",
    "answer": "Senn",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Ada Rell", 0], ["Orlby", 1], ["Ada Rell", 1]],
    "context": [
        ["Noise", ["Noise is a sound.", " It can be loud."]],
        ["Ada Rell", ['Ada Rell wrote "Why?', '", a book.', " She was born in Orlby."]],
        ["Silence", ["Silence is  no sound."]],
        ["Orlby", ["Orlby is a town.", " It lies on the Senn.", "It is {context} old."]],
    ],
}
HUB = {
    "id": "abc1",
    "question": OFFICIAL["question"],
    "answer": OFFICIAL["answer"],
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["Ada Rell", "Orlby", "Ada Rell"], "sent_id": [0, 1, 1]},
    "context": {
        "title": [title for title, _ in OFFICIAL["context"]],
        "sentences": [sentences for _, sentences in OFFICIAL["context"]],
    },
}
PARAGRAPHS = {
    "Noise: Noise is a sound. It can be loud.",
    'Ada Rell: Ada Rell wrote "Why?", a book. She was born in Orlby.',
    "Silence: Silence is no sound.",
    "Orlby: Orlby is a town. It lies on the Senn. It is {context} old.",
}


def write(path: Path, *items: dict) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    else:
        path.write_text(json.dumps(items))
    return str(path)


def load(source: Path | str, agents: int = 2, seed: int = 0, split: str = "train") -> list[Task]:
    return list(HotpotQA().tasks(split=split, source=str(source), agents=agents, seed=seed))


def raw(name: str) -> list[dict]:
    text = (DATA / name).read_text()
    return [json.loads(x) for x in text.splitlines()] if name[-1] == "l" else json.loads(text)


def pairs(row: dict) -> Iterator[tuple[str, list[str]]]:
    context = row["context"]
    if isinstance(context, dict):
        yield from zip(context["title"], context["sentences"], strict=True)
    else:
        yield from context


def supporting(row: dict) -> set[str]:
    facts = row["supporting_facts"]
    return set(facts["title"]) if isinstance(facts, dict) else {title for title, _ in facts}


def test_registered():
    assert "hotpotqa" in DATASETS
    assert isinstance(get("hotpotqa"), HotpotQA)
    with pytest.raises(InputError, match="the data sets are hotpotqa"):
        get("nothing")


@pytest.mark.parametrize("row", [OFFICIAL, HUB], ids=["official", "hub"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_both_schemas(tmp_path, row, suffix):
    (task,) = load(write(tmp_path / f"a{suffix}", row))
    assert task.id == "hotpotqa/train/abc1"
    assert (task.setting, task.metric, task.answers) == ("exchange", "f1", ("Senn",))
    assert task.question == "In which river does the town where Ada Rell was born lie?"
    assert {p for share in task.contexts for p in share} == PARAGRAPHS
    assert [len(share) for share in task.contexts] == [2, 2]
    assert task.meta["type"] == "bridge"
    assert task.meta["level"] == "hard"
    assert task.meta["supporting"] == ["Ada Rell", "Orlby"]
    assert set(task.meta["holders"]) == {"Ada Rell", "Orlby"}
    for title, agent in task.meta["holders"].items():
        assert any(p.startswith(f"{title}: ") for p in task.contexts[agent])
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_schemas_give_the_same_task(tmp_path):
    assert load(write(tmp_path / "a.json", OFFICIAL)) == load(write(tmp_path / "b.json", HUB))


def test_split_names(tmp_path):
    path = write(tmp_path / "a.json", OFFICIAL)
    ids = {split: load(path, split=split)[0].id for split in HotpotQA.splits}
    assert ids == {
        "train": "hotpotqa/train/abc1",
        "validation": "hotpotqa/validation/abc1",
        "dev": "hotpotqa/validation/abc1",
        "test": "hotpotqa/validation/abc1",
    }


def test_id_without_one(tmp_path):
    """The digest depends on question and answer only, and differs where they do."""
    bare = {k: v for k, v in HUB.items() if k != "id"}
    (one,) = load(write(tmp_path / "a.json", bare))
    two, three = load(write(tmp_path / "b.json", bare | {"answer": "Rhine"}, bare))
    assert one == three
    assert one.id != two.id
    assert len(one.id.removeprefix("hotpotqa/train/")) == 16


def test_solo_holds_everything(tmp_path):
    (task,) = load(write(tmp_path / "a.json", OFFICIAL), agents=1)
    assert set(task.contexts[0]) == PARAGRAPHS


def test_more_agents_than_paragraphs(tmp_path):
    (task,) = load(write(tmp_path / "a.json", OFFICIAL), agents=6)
    assert sorted(map(len, task.contexts)) == [0, 0, 1, 1, 1, 1]


def test_deal_duplicate_titles_stay_together():
    paragraphs = [("A", "1"), ("A", "2"), ("B", "3"), ("C", "4"), ("C", "5")]
    for seed in range(20):
        shares, holders = deal(paragraphs, ["A", "B"], 2, random.Random(seed))
        assert holders["A"] != holders["B"]
        titles = [{title for title, _ in share} for share in shares]
        assert "A" in titles[holders["A"]] - titles[holders["B"]]
        assert sorted(p for share in shares for p in share) == paragraphs
        assert sorted(map(len, shares)) == [2, 3]


def test_deal_absent_and_single_titles():
    """A supporting title that the context lacks does not use up an agent's turn."""
    paragraphs = [("A", "1"), ("B", "2"), ("D", "3")]
    for seed in range(20):
        shares, holders = deal(paragraphs, ["A", "absent", "B"], 2, random.Random(seed))
        assert holders["A"] != holders["B"]
        assert "absent" not in holders
        assert sorted(map(len, shares)) == [1, 2]
        shares, holders = deal(paragraphs, ["A"], 3, random.Random(seed))
        assert list(map(len, shares)) == [1, 1, 1]


def test_deal_uses_every_agent_first():
    """Nobody is always the first holder, and shares are not in the context's order."""
    paragraphs = [(title, "x") for title in "ABCDEFGH"]
    deals = [deal(paragraphs, ["A", "B"], 2, random.Random(seed)) for seed in range(40)]
    assert {holders["A"] for _, holders in deals} == {0, 1}
    assert any(share != sorted(share) for shares, _ in deals for share in shares)


@pytest.mark.parametrize(
    ("sentences", "text"),
    [
        (["One.", " Two."], "One. Two."),
        (["One.", "Two.", " Three."], "One. Two. Three."),
        (['The "What?', '", a film.', "  It\u00a0is long. "], 'The "What?", a film. It is long.'),
        (["One.", "Two.", '"Three" it is.'], 'One. Two. "Three" it is.'),  # 2WikiMultiHopQA
        (["One.", "", " ", " Two."], "One. Two."),
        ([], ""),
    ],
)
def test_join(sentences, text):
    assert join(sentences) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, 'missing "question"'),
        ({"answer": None}, 'missing "answer"'),
        ({"answer": " "}, '"answer" is empty'),
        ({"question": 3}, '"question" must be text, found int'),
        ({"context": None}, 'missing "context"'),
        ({"context": []}, '"context" is empty'),
        ({"context": "text"}, '"context" must be a list or an object, found str'),
        ({"context": [["A"]]}, '"context" entry 1 is not a pair'),
        ({"context": [["A", "s"]]}, '"context" entry 1 is not a title and a list of sentences'),
        ({"context": [["A", ["s"]], ["B", [1]]]}, '"context" entry 2 has a sentence that is not'),
        ({"context": {"title": ["A"]}}, '"context.sentences" is missing or not a list'),
        ({"context": {"title": ["A"], "sentences": []}}, "of different lengths"),
        ({"supporting_facts": None}, 'missing "supporting_facts"'),
        ({"supporting_facts": [[1, 0]]}, '"supporting_facts" has a title that is not text'),
    ],
)
def test_errors_say_where(tmp_path, change, message):
    bad = OFFICIAL | change
    with pytest.raises(InputError) as caught:
        load(write(tmp_path / "a.jsonl", OFFICIAL, bad))
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:2: ")
    assert message in str(caught.value)
    with pytest.raises(InputError) as caught:
        load(write(tmp_path / "a.json", OFFICIAL, bad))
    assert str(caught.value).startswith(f"{tmp_path}/a.json: row 2: ")


@needs_data
@pytest.mark.parametrize("name", FILES)
def test_real_rows(name):
    """Every row: counted, nobody holds all the facts, each sentence is there, golds score 1."""
    source = raw(name)
    seen = set()
    for agents in (2, 3):
        for seed in range(4):
            tasks = load(DATA / name, agents, seed)
            assert len(tasks) == len(source) == FILES[name]
            assert len({task.id for task in tasks}) == len(tasks)
            for task, row in zip(tasks, source, strict=True):
                context = list(pairs(row))
                needed = supporting(row)
                # By letters of the whole paragraph: a title may begin another ("X", "X: the film").
                letters = {
                    title: "".join(f"{title}:{''.join(sentences)}".split())
                    for title, sentences in context
                }
                shares = [["".join(p.split()) for p in share] for share in task.contexts]
                held = [{t for t in needed if letters[t] in share} for share in shares]
                assert len(needed) >= 2
                assert set().union(*held) == needed
                assert all(share != needed for share in held)
                # Each of the distinct facts is in exactly one agent's hands.
                assert sum(map(len, held)) == len(needed)
                sizes = [len(share) for share in task.contexts]
                assert sum(sizes) == len(context)
                assert max(sizes) - min(sizes) <= 1
                everything = [p for share in task.contexts for p in share]
                # Letter for letter, nothing lost or doubled; only spaces may differ.
                assert sorted(p for share in shares for p in share) == sorted(letters.values())
                for title, sentences in context:
                    named = [p for p in everything if p.startswith(f"{title}: ")]
                    assert all(any(" ".join(s.split()) in p for p in named) for s in sentences)
                assert f1(task.answers[0], task.answers) == 1.0
                assert task.answers == (row["answer"].strip(),)
                seen.add((task.id, agents, task.contexts))
    # Other seeds, other splits: hardly any two are equal.
    assert len(seen) > 0.9 * len(source) * 8


@needs_data
def test_hand_checked_records():
    gallu = load(DATA / "train_official_60.json")[0]
    assert gallu.id == "hotpotqa/train/5a77ec115542992a6e59dff7"
    assert gallu.question == "If Gallu is a demon Lilu is what?"
    assert gallu.answers == ("a spirit",)
    assert gallu.meta["supporting"] == ["Alû", "Lilu (mythology)"]
    assert (gallu.meta["type"], gallu.meta["level"]) == ("bridge", "easy")

    derrickson = load(DATA / "dev_hf_schema_40.json", split="dev")[0]
    assert derrickson.question == "Were Scott Derrickson and Ed Wood of the same nationality?"
    assert derrickson.answers == ("yes",)
    assert derrickson.meta["supporting"] == ["Scott Derrickson", "Ed Wood"]
    assert sorted(derrickson.meta["holders"].values()) == [0, 1]
    # Facts stand in the holder's first sentence; the last sentence has not been cut off.
    holder = derrickson.contexts[derrickson.meta["holders"]["Scott Derrickson"]]
    (paragraph,) = (p for p in holder if p.startswith("Scott Derrickson: "))
    assert "is an American director" in paragraph
    assert paragraph.endswith('"Doctor Strange."')

    smith = load(DATA / "official_rows_as_jsonl_6.jsonl")[0]
    assert smith.id == "hotpotqa/train/5ade063d5542995b365fabcd"
    assert smith.meta["supporting"] == ["Donnie Smith", "Major League Soccer"]

    palms = load(DATA / "dev_hf_schema_40.json")[27]  # a row with two paragraphs
    assert [len(share) for share in palms.contexts] == [1, 1]


@needs_data
def test_deterministic_and_row_by_row(tmp_path):
    """Same seed, same bytes; a row's split does not depend on the rows around it."""
    path = DATA / "train_official_60.json"
    tasks = load(path, seed=7)
    assert tasks == load(path, seed=7)
    assert tasks != load(path, seed=8)
    few = load(write(tmp_path / "few.json", *reversed(raw(path.name)[20:30])), seed=7)
    assert few[::-1] == tasks[20:30]


@needs_data
def test_parquet_equals_json(tmp_path):
    import pyarrow
    import pyarrow.parquet

    items = raw("dev_hf_schema_40.json")
    for i, part in enumerate((items[:25], items[25:])):
        path = tmp_path / "distractor" / f"validation-0000{i}-of-00002.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), path)
    expected = load(DATA / "dev_hf_schema_40.json", split="validation")
    assert load(tmp_path, split="dev") == expected
    assert load(path, split="validation") == expected[25:]
