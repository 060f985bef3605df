"""Examples to rows: what is cut to fit, what is trained, and what stops a run."""

from __future__ import annotations

import pytest
from tiny import STYLES, tiny_tokenizer

from optima_lite.chat import ChatEncoder, Encoded
from optima_lite.errors import TrainingError
from optima_lite.records import Example
from optima_lite.training.encode import IGNORED, Row, audit, fit, marked

#: p p | A A A | b b | C | d d: prompt, partner, own, partner, own. Ids are their positions, and
#: 90, 91 … stand for the template's literals.
HAND = Encoded(
    ids=[90, 1, 2, 91, 11, 12, 13, 92, 21, 22, 93, 31, 94, 41, 42, 95],
    spans=[(8, 11), (13, 16)],
    messages=[
        ("system", 1, 3),
        ("user", 4, 7),
        ("assistant", 8, 10),
        ("user", 11, 12),
        ("assistant", 13, 15),
    ],
)


def example(*turns: tuple[str, str], prompt: str = "You are Alice.") -> Example:
    messages = [{"role": "system", "content": prompt}]
    messages += [{"role": role, "content": text} for role, text in turns]
    return Example(tuple(messages), "Alice", "t/1#0", 1.0)


def trained_ids(row: Row) -> list[list[int]]:
    return [row.ids[start:end] for start, end in row.spans]


def test_what_fits_is_left_alone() -> None:
    row = fit(HAND, "x", 16)
    assert row is not None
    assert (row.ids, row.spans, row.cut) == (HAND.ids, HAND.spans, 0)


@pytest.mark.parametrize(
    ("max_length", "ids"),
    [
        # 16 tokens; the partner's first turn goes first, from its beginning …
        (15, [90, 1, 2, 91, 12, 13, 92, 21, 22, 93, 31, 94, 41, 42, 95]),
        (13, [90, 1, 2, 91, 92, 21, 22, 93, 31, 94, 41, 42, 95]),
        # … then the second one, and there is nothing else to cut: 16 - 3 - 1 = 12.
        (12, [90, 1, 2, 91, 92, 21, 22, 93, 94, 41, 42, 95]),
    ],
)
def test_the_oldest_partner_turns_are_cut_first(max_length: int, ids: list[int]) -> None:
    row = fit(HAND, "x", max_length)
    assert row is not None
    assert row.ids == ids
    assert row.cut == 16 - max_length
    assert trained_ids(row) == [[21, 22, 93], [41, 42, 95]]


@pytest.mark.parametrize("max_length", [11, 1])
def test_prompt_and_own_turns_are_never_cut(max_length: int) -> None:
    assert fit(HAND, "x", max_length) is None


def test_labels_are_the_ids_of_the_spans() -> None:
    row = fit(HAND, "x", 16)
    assert row is not None
    none = [IGNORED]
    assert row.labels == none * 8 + [21, 22, 93] + none * 2 + [41, 42, 95]
    assert row.trained == 6


@pytest.mark.parametrize("style", STYLES)
def test_every_length_on_every_template(style: str) -> None:
    """Each shorter row loses one token more of the partner's words; own turns decode the same."""
    chat = ChatEncoder(tiny_tokenizer(style))
    turns = [
        ("user", "Bob: the red key opens the blue door"),
        ("assistant", "Which door?"),
        ("user", "Bob: the blue one, I said"),
        ("assistant", "<A>blue</A>"),
        ("user", "Bob: never seen by the model"),
    ]
    encoded = chat.encode(example(*turns).messages)
    whole = len(encoded.ids)
    own = [encoded.ids[start:end] for start, end in encoded.spans]
    ends = STYLES[style]["end"]
    assert [chat.tokenizer.decode(ids).strip() for ids in own] == [
        f"Which door?{ends}",
        f"<A>blue</A>{ends}",
    ]
    # Where the prompt shares a message with the partner's first turn, that turn is not cut.
    partners = sum(e - s for role, s, e in encoded.messages[1:] if role == "user")
    assert partners > 0
    before = encoded.ids
    for length in range(whole - 1, whole - partners - 1, -1):
        row = fit(encoded, "x", length)
        assert row is not None
        assert len(row.ids) == length
        assert trained_ids(row) == own
        assert any(before[:i] + before[i + 1 :] == row.ids for i in range(len(before)))
        end = encoded.messages[0][2]
        assert row.ids[:end] == encoded.ids[:end], "the prompt is whole"
        before = row.ids
    assert fit(encoded, "x", whole - partners - 1) is None


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [("user", "Bob: hello")],
        [("assistant", "")],
        [("user", "Bob: hello"), ("assistant", ""), ("user", "Bob: well?")],
    ],
)
def test_an_example_that_trains_nothing_stops_the_run(turns: list[tuple[str, str]]) -> None:
    chat = ChatEncoder(tiny_tokenizer("qwen"))
    good = example(("assistant", "Who?"))
    with pytest.raises(TrainingError, match="would train nothing"):
        audit([good, example(*turns)], chat, 100)


def test_the_audit_counts() -> None:
    chat = ChatEncoder(tiny_tokenizer("llama3"))
    small = example(("user", "Bob: it is seven"), ("assistant", "Yes."))
    cut = example(("user", "Bob: " + "seven " * 60), ("assistant", "Yes."))
    large = example(("assistant", "seven " * 60))
    report = audit([small, cut, large], chat, 60)
    assert [bool(row.cut) for row in report.rows] == [False, True]
    assert [len(row.ids) for row in report.rows][1] == 60
    assert report.dropped == ["t/1#0 Alice"]
    assert dict(report.bos) == {1: 2}
    # "Yes." has as many tokens as it has, and the end-of-turn is one more.
    trained = len(chat.text("Yes.")) + 1
    assert [row.trained for row in report.rows] == [trained, trained]
    text = "\n".join(report.lines(chat))
    assert "2 examples; 1 dropped" in text
    assert "1 shortened" in text
    assert f"trained: {trained}-{trained} (mean {trained})" in text
    assert "BOS <|begin_of_text|>: 1× in 2" in text
    assert text.endswith("⟦Yes.<|eot_id|>⟧")


def test_nothing_left_stops_the_run() -> None:
    chat = ChatEncoder(tiny_tokenizer("llama3"))
    with pytest.raises(TrainingError, match="all 1 exceed --max-length 16"):
        audit([example(("assistant", "seven " * 60))], chat, 16)
    with pytest.raises(TrainingError, match="no examples"):
        audit([], chat, 16)


def test_marked_shows_the_whole_example() -> None:
    chat = ChatEncoder(tiny_tokenizer("qwen"))
    row = fit(
        chat.encode(example(("assistant", "a"), ("user", "b"), ("assistant", "c")).messages),
        "x",
        99,
    )
    assert row is not None
    assert marked(row, chat) == (
        "<|im_start|>system\nYou are Alice.<|im_end|>\n"
        "<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
        "<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n⟦c<|im_end|>⟧"
    )
