r"""Find the answer an agent marked, and bring answers to a form that can be compared.

Two marks exist (Optima, Appendix A): `<A>answer</A>`, and `\boxed{answer}` for GSM8K and MATH.
"""

from __future__ import annotations

import re
import string
import unicodedata

MARKS = ("tag", "boxed")
_TAG = re.compile(r"<A>(.*?)</A>", re.DOTALL | re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract(text: str, mark: str) -> str | None:
    """The last answer marked in `text`, stripped; None where none is marked or it is empty.

    With `tag`, an opening mark inside a marked answer restarts it, so `<A>x <A>y</A>` marks y.
    """
    found = _boxed(text) if mark == "boxed" else _TAG.findall(text)
    for answer in reversed(found):
        answer = re.split(r"<A>", answer, flags=re.IGNORECASE)[-1].strip()
        if answer:
            return answer
    return None


def _boxed(text: str) -> list[str]:
    r"""Contents of every complete `\boxed{…}`, braces balanced (`\{` and `\}` do not count)."""
    found = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth, start, position = 1, match.end(), match.end()
        while position < len(text) and depth:
            character = text[position]
            if character == "\\":
                position += 1
            elif character == "{":
                depth += 1
            elif character == "}":
                depth -= 1
            position += 1
        if not depth:
            found.append(text[start : position - 1])
    return found


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces.

    Compatibility forms are unified first (NFKC), so that full-width letters and non-breaking
    spaces compare equal. Should nothing remain (the answer is "The" or "?"), the case-folded text
    is kept: two different answers must not become equal by vanishing.
    """
    plain = unicodedata.normalize("NFKC", text).lower()
    bare = " ".join(_ARTICLES.sub(" ", plain.translate(_PUNCTUATION)).split())
    return bare or " ".join(plain.split())
