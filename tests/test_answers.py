r"""Marked answers and their normal form."""

from __future__ import annotations

import pytest

from optima_lite.answers import MARKS, extract, normalize


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<A>Quelby</A>", "Quelby"),
        ("I think <A> Quelby \n</A>, Bob?", "Quelby"),
        ("<a>Quelby</a>", "Quelby"),
        ("<A>Quelby</a>", "Quelby"),
        ("<A>two\nlines</A>", "two\nlines"),
        ("<A>x</A> no: <A>y</A>", "y"),  # the last one counts
        ("<A>x</A> well <A></A>", "x"),  # an empty mark marks nothing
        ("<A>x</A> well <A>  </A>", "x"),
        ("<A></A>", None),
        ("<A>x", None),  # never closed: cut, or an afterthought
        ("x</A>", None),
        ("<A>x <A>y</A>", "y"),  # begun anew
        ("<A>x</A> or <A>y", "x"),
        ("< A>x</ A>", None),
        ("<B>x</B>", None),
        ("Alice", None),
        ("", None),
        (r"\boxed{x}", None),
        ("<A>伦敦</A>", "伦敦"),
        ("<A>a < b</A>", "a < b"),
    ],
)
def test_tags(text, answer):
    assert extract(text, "tag") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"So $\boxed{ 42 }$.", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\sqrt{\frac{a}{b^{2}}}} done", r"\sqrt{\frac{a}{b^{2}}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{}", "1"),
        (r"\boxed{1} then \boxed{2", "1"),  # the second is never closed
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces do not count
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{x\\", None),
        (r"\boxed 42", None),
        (r"\fbox{42}", None),
        ("<A>42</A>", None),
        ("", None),
    ],
)
def test_boxes(text, answer):
    assert extract(text, "boxed") == answer


def test_marks_are_the_ones_tested_here():
    assert MARKS == ("tag", "boxed")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  a   man, a plan ", "man plan"),
        ("another theory anthem", "another theory anthem"),  # articles are words, not beginnings
        ("U.S.A.", "usa"),
        ("don't", "dont"),
        ("1,234", "1234"),
        ("mammoth", "mammoth"),  # a peer's strip("m=") made "ammoth" of it
        ("Alice's ice", "alices ice"),
        ("Ｑｕｅｌｂｙ", "quelby"),  # full-width
        ("New\u00a0York", "new york"),
        ("Москва", "москва"),
        ("伦敦，英国", "伦敦英国"),  # NFKC makes the comma ASCII
        ("ÉCOLE", "école"),
    ],
)
def test_normalize(text, normal):
    assert normalize(text) == normal
    assert normalize(normal) == normal


@pytest.mark.parametrize("pair", [("The", "A"), ("?", "!"), ("+", "-"), ("a", "an"), ("...", "")])
def test_different_answers_do_not_vanish_into_equality(pair):
    assert normalize(pair[0]) != normalize(pair[1])
    assert normalize(pair[0]) == pair[0].lower()
