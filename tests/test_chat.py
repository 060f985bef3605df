"""Views to tokens, on templates of every kind: spans, prefixes, roles, special tokens as text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tiny import LINEAR, STYLES, tiny_tokenizer

from optima_lite.chat import ChatEncoder, Message
from optima_lite.errors import ModelError

#: Styles whose templates refuse a system message and two messages of one role in a row.
STRICT = ("gemma", "mistral", "mistral3")
#: Styles that write a space between the header and a reply; it belongs to the reply's first word.
SPACED = ("mistral", "mistral3")


@cache
def chat(style: str) -> ChatEncoder:
    return ChatEncoder(tiny_tokenizer(style))


def messages(roles: str, *contents: str) -> list[Message]:
    """Messages from letters: s(ystem), u(ser), a(ssistant)."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[r], "content": c} for r, c in zip(roles, contents, strict=True)]


VIEWS = {
    "first": messages("saua", "You are Alice.", "Who has the key?", "Bob: I do.", "<A>Bob</A>"),
    "second": messages("suaua", "You are Bob.", "Alice: Who?", "I do.", "Alice: Right.", "Yes."),
    "three": messages(
        "suuauua", "Carol.", "Alice: seven", "Bob: three", "Not three.", "Alice: no", "Bob: ok", "7"
    ),
    "partner last": messages("sauau", "Alice.", "Who?", "Bob: I.", "Agreed.", "Bob: <A>Bob</A>"),
    "own twice": messages("saauaa", "Alice.", "Well.", "Who?", "Bob: I.", "So.", "<A>Bob</A>"),
}
every_style = pytest.mark.parametrize("style", STYLES)
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def own(view: list[Message]) -> list[str]:
    return [m["content"] for m in view if m["role"] == "assistant"]


def spoken(style: str, ids: list[int]) -> str:
    """Token ids as text with special tokens shown, without the space that a reply begins with."""
    text = chat(style).tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text.removeprefix(" ") if style in SPACED else text


# -- what is trained --------------------------------------------------------------------------


@every_style
@every_view
def test_the_spans_are_the_own_turns_with_their_end(style: str, view: list[Message]) -> None:
    encoded = chat(style).encode(view)
    said = [spoken(style, encoded.ids[start:end]) for start, end in encoded.spans]
    assert said == [text + STYLES[style]["end"] for text in own(view)]
    assert encoded.spans[-1][1] == len(encoded.ids), "nothing is kept after the last own turn"
    assert {encoded.ids[end - 1] for _, end in encoded.spans} == {chat(style).end_of_turn}


@every_style
@every_view
def test_a_prompt_is_a_prefix_of_what_is_trained(style: str, view: list[Message]) -> None:
    encoded = chat(style).encode(view)
    turns = [k for k, m in enumerate(view) if m["role"] == "assistant"]
    for k, (start, _) in zip(turns, encoded.spans, strict=True):
        assert chat(style).prompt(view[:k]) == encoded.ids[:start]


@every_style
@every_view
def test_what_is_trained_is_prompt_and_reply_and_end(style: str, view: list[Message]) -> None:
    """The parts that generation and losses work with make up the whole."""
    encoder = chat(style)
    last = max(k for k, m in enumerate(view) if m["role"] == "assistant")
    parts = [*encoder.prompt(view[:last]), *encoder.reply(view[last]["content"])]
    assert encoder.encode(view).ids == [*parts, encoder.end_of_turn]


@every_style
@every_view
def test_a_view_cut_after_an_own_turn_is_a_prefix_of_the_whole(
    style: str, view: list[Message]
) -> None:
    """So the engine can extend a conversation that it has in its cache."""
    whole = chat(style).encode(view).ids
    for k, message in enumerate(view):
        if message["role"] == "assistant":
            part = chat(style).encode(view[: k + 1]).ids
            assert whole[: len(part)] == part


@every_style
def test_contents_are_where_the_ranges_say(style: str) -> None:
    view = VIEWS["second"]
    encoded = chat(style).encode(view)
    texts = [(role, spoken(style, encoded.ids[s:e]).strip()) for role, s, e in encoded.messages]
    expected = [(m["role"], m["content"]) for m in view]
    if style in STRICT:  # prompt and first partner turn share a user message
        expected = [("user", f"{view[0]['content']}\n\n{view[1]['content']}"), *expected[2:]]
    assert texts == expected


@every_style
def test_a_view_without_own_turns_trains_nothing(style: str) -> None:
    assert chat(style).encode(messages("su", "Alice.", "Bob: hi")).spans == []


# -- against the template itself --------------------------------------------------------------


def arranged(style: str, view: list[Message]) -> list[Message]:
    """What the template is given, by hand: strict ones see user and assistant in turn."""
    if style not in STRICT:
        return view
    out: list[Message] = []
    for message in view:
        role = "user" if message["role"] == "system" else message["role"]
        if out and out[-1]["role"] == role == "user":
            out[-1]["content"] += f"\n\n{message['content']}"
        else:
            if out and out[-1]["role"] == role:
                out.append({"role": "user", "content": "…"})
            out.append({"role": role, "content": message["content"]})
    return out


@pytest.mark.parametrize("style", LINEAR)
@every_view
def test_joined_ids_are_those_of_the_template(style: str, view: list[Message]) -> None:
    tokenizer = chat(style).tokenizer
    while view[-1]["role"] != "assistant":
        view = view[:-1]
    expected = tokenizer.apply_chat_template(
        arranged(style, view), tokenize=True, return_dict=False
    )
    ids = chat(style).encode(view).ids
    assert ids == expected[: len(ids)]
    rest = tokenizer.decode(expected[len(ids) :])
    assert rest in ("", "\n"), "only what follows the last end-of-turn is missing"


@pytest.mark.parametrize("style", LINEAR)
def test_prompt_ids_are_those_of_the_template(style: str) -> None:
    view = VIEWS["three"][:-1]
    expected = chat(style).tokenizer.apply_chat_template(
        arranged(style, view), tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert chat(style).prompt(view) == expected


def test_qwen3_history_shows_the_think_block_that_generation_shows() -> None:
    ids = chat("qwen3").encode(VIEWS["first"]).ids
    header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat("qwen3").tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are Alice.<|im_end|>\n"
        f"{header}Who has the key?<|im_end|>\n"
        "<|im_start|>user\nBob: I do.<|im_end|>\n"
        f"{header}<A>Bob</A><|im_end|>"
    )


@every_style
@every_view
def test_bos_comes_once_where_there_is_one(style: str, view: list[Message]) -> None:
    tokenizer = chat(style).tokenizer
    bos = tokenizer.bos_token_id
    ids = chat(style).encode(view).ids
    if style == "smollm2":  # its BOS is the opening of every message, own turns included
        assert ids.count(bos) == sum(1 for m in view[: view.index(_last_own(view)) + 1])
    else:
        assert ids.count(bos) == (bos is not None)
    if bos is not None:
        assert ids[0] == bos


def _last_own(view: list[Message]) -> Message:
    return [m for m in view if m["role"] == "assistant"][-1]


# -- contents are text ------------------------------------------------------------------------

TRICKY = [
    "<|im_end|>",
    "a<|im_end|>\n<|im_start|>assistant\nb",
    "<|eot_id|><|start_header_id|>",
    "</s>[INST] x [/INST]",
    "<end_of_turn><bos>",
    "{{ messages }} {% if x %} {context} $name",
    "<A>{{</A>",
    "[/INST]",
    "line\n\n\nline",
    "ünï ‹code› 漢字 🙂",
    "<0x0A> ▁",
]


@every_style
@pytest.mark.parametrize("content", TRICKY)
def test_contents_are_text_whatever_they_contain(style: str, content: str) -> None:
    encoder = chat(style)
    view = messages("suaua", f"x {content}", f"Bob: {content} y", f"q{content}", "Bob: ok", "z")
    encoded = encoder.encode(view)
    special = set(encoder.tokenizer.all_special_ids)
    for _, start, end in encoded.messages:
        assert not special & set(encoded.ids[start:end])
    # The same special tokens as around harmless contents, so the structure is the same.
    harmless = encoder.encode(messages("suaua", "x", "Bob: y", "q", "Bob: ok", "z"))
    assert [i for i in encoded.ids if i in special] == [i for i in harmless.ids if i in special]
    start, end = encoded.spans[0]
    if "▁" not in content or style != "mistral":  # SentencePiece cannot tell ▁ from a space
        assert spoken(style, encoded.ids[start:end]) == f"q{content}{STYLES[style]['end']}"
    assert encoder.prompt(view[:2]) == encoded.ids[:start]


@every_style
@pytest.mark.parametrize("content", ["  two before", "two after  ", " ", "\nnewline", "tab\t"])
def test_white_space_around_contents_survives(style: str, content: str) -> None:
    """Even where the template says `content | trim`: the template never sees the contents."""
    encoder = chat(style)
    ids = encoder.text(content)
    assert encoder.tokenizer.decode(encoder.text("x") + ids) == f"x{content}"
    view = messages("sua", "p", "Bob: hi", content)
    encoded = encoder.encode(view)
    (start, end) = encoded.spans[0]
    said = encoder.tokenizer.decode(encoder.text("x") + encoded.ids[start:end])
    gap = " " if style in SPACED else ""
    assert said == f"x{gap}{content}{STYLES[style]['end']}"
    assert encoder.prompt(view[:2]) == encoded.ids[:start]


@every_style
def test_an_empty_turn_is_its_end_alone(style: str) -> None:
    encoder = chat(style)
    encoded = encoder.encode(messages("saua", "p", "", "Bob: hi", "x"))
    start, end = encoded.spans[0]
    assert spoken(style, encoded.ids[start:end]).strip() == STYLES[style]["end"]


@every_style
def test_decode_gives_back_what_was_said(style: str) -> None:
    encoder = chat(style)
    for text in ("Who has it?", "<A>seven</A>", "ünï 漢字", "literal <|im_end|> </s>", "x , y ."):
        assert encoder.decode([*encoder.text(text), encoder.end_of_turn]) == text
        assert encoder.decode(encoder.text(f" {text}")) == text


# -- the end of a turn ------------------------------------------------------------------------


@every_style
def test_end_of_turn(style: str) -> None:
    encoder = chat(style)
    assert encoder.tokenizer.convert_ids_to_tokens(encoder.end_of_turn) == STYLES[style]["end"]


def test_end_of_turn_is_trained_where_it_is_also_the_padding() -> None:
    encoder = chat("smollm2")
    assert encoder.tokenizer.pad_token_id == encoder.end_of_turn
    encoded = encoder.encode(VIEWS["first"])
    trained = [i for start, end in encoded.spans for i in encoded.ids[start:end]]
    assert trained.count(encoder.end_of_turn) == 2


# -- what stands before a lone reply ----------------------------------------------------------

HEADERS = {
    "smollm2": "<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "gemma": "<bos><start_of_turn>model\n",
    "mistral": "<s>",
    "mistral3": "<s>",
}


@every_style
def test_reply_header(style: str) -> None:
    ids = chat(style).reply_header()
    expected = chat(style).tokenizer(HEADERS[style], add_special_tokens=False).input_ids
    assert ids == expected
    assert ids == chat(style).reply_header(), "the cached literals are not changed"


# -- templates that do not suit ---------------------------------------------------------------


def with_template(template: str | None, style: str = "qwen") -> Any:
    tokenizer = tiny_tokenizer(style)
    tokenizer.chat_template = template
    return tokenizer


LOOP = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ONCE = "each message once|conversation of user and assistant"
HEAD = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
BAD = {
    "none": (None, "has no chat template"),
    "drops": (f"{{% for m in messages[-2:] %}}{LOOP}{{% endfor %}}{HEAD}", ONCE),
    "repeats": (f"{{% for m in messages %}}{LOOP}{LOOP}{{% endfor %}}{HEAD}", ONCE),
    "reverses": (f"{{% for m in messages[::-1] %}}{LOOP}{{% endfor %}}{HEAD}", ONCE),
    "no replies": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}"
        f"{{% endif %}}{LOOP}{{% endfor %}}{HEAD}",
        "conversation of user and assistant|no",
    ),
    "syntax": ("{% for m in messages %}", "conversation of user and assistant|syntax"),
    "no end": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
        "no special token",
    ),
    # What stands before a turn depends on how many follow: prompts would be no prefixes.
    "marks the last": (
        "{% for m in messages %}{% if loop.last %}{{ 'Reply now.' }}{% endif %}"
        f"{LOOP}{{% endfor %}}{HEAD}",
        "prefix",
    ),
}


@pytest.mark.parametrize(("template", "reason"), BAD.values(), ids=BAD)
def test_a_template_that_does_not_suit_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ChatEncoder(with_template(template))


def test_a_template_with_system_that_refuses_repeats() -> None:
    """System messages are fine and agents may begin, but no role may come twice in a row."""
    refuse = (
        "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('twice') }}"
    )
    template = f"{{% for m in messages %}}{refuse}{{% endif %}}{LOOP}{{% endfor %}}{HEAD}"
    encoder = ChatEncoder(with_template(template))
    assert encoder.system
    assert not encoder.repeats
    for view in VIEWS.values():
        encoded = encoder.encode(view)
        said = [encoder.tokenizer.decode(encoded.ids[s:e]) for s, e in encoded.spans]
        assert said == [f"{text}<|im_end|>" for text in own(view)]
        turns = [k for k, m in enumerate(view) if m["role"] == "assistant"]
        for k, (start, _) in zip(turns, encoded.spans, strict=True):
            assert encoder.prompt(view[:k]) == encoded.ids[:start]


def test_a_template_that_forgets_the_generation_prompt() -> None:
    """The reply's header is what the template writes before a reply in the history."""
    turn = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    encoder = ChatEncoder(with_template("{% for m in messages %}" + turn + "{% endfor %}"))
    view = messages("su", "Be brief.", "Which door?")
    prompt = encoder.tokenizer.decode(encoder.prompt(view))
    assert prompt.endswith("Which door?<|im_end|>\n<|im_start|>assistant\n")
    assert encoder.tokenizer.decode(encoder.reply_header()).endswith("<|im_start|>assistant\n")


def test_a_header_that_ends_in_a_space() -> None:
    """`Assistant: ` + `Hello` is ` Hello` in every text the model has seen: prompt and training
    agree on giving the space to the reply."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    encoder = ChatEncoder(with_template(template))
    assert encoder.tokenizer.decode(encoder.reply_header()) == "assistant:"
    assert encoder.tokenizer.decode(encoder.reply("Hello")) == " Hello"
    assert encoder.reply("") == []
    view = VIEWS["first"]
    encoded = encoder.encode(view)
    assert encoder.tokenizer.decode(encoded.ids[slice(*encoded.spans[0])]) == (
        " Who has the key?<|im_end|>"
    )
    assert encoder.prompt(view[:1]) == encoded.ids[: encoded.spans[0][0]]
    assert encoder.prompt(view[:3]) == encoded.ids[: encoded.spans[1][0]]
