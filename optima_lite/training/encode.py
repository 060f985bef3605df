"""SFT examples to token ids and labels, and the audit that is printed before step 0.

Labels come from spans that tokenisation itself reports (chat.py), never from searching for header
tokens: every own turn and its end-of-turn token is trained, nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optima_lite.chat import ChatEncoder, Encoded
from optima_lite.errors import TrainingError
from optima_lite.records import Example

IGNORED = -100  # what torch's cross-entropy passes over


@dataclass(frozen=True)
class Row:
    """A tokenised example: `ids`, and the half-open `spans` of them that are trained."""

    name: str
    ids: list[int]
    spans: list[tuple[int, int]]
    cut: int = 0  # tokens removed from partners' turns to fit

    @property
    def labels(self) -> list[int]:
        """`ids` inside the spans, IGNORED elsewhere; same length as `ids`."""
        labels = [IGNORED] * len(self.ids)
        for start, end in self.spans:
            labels[start:end] = self.ids[start:end]
        return labels

    @property
    def trained(self) -> int:
        """How many tokens are trained."""
        return sum(end - start for start, end in self.spans)


def fit(encoded: Encoded, name: str, max_length: int) -> Row | None:
    """Shorten a view to `max_length` tokens, or None where that cannot be done.

    Partners' turns lose their tokens, the oldest turn first and each from its beginning. The
    prompt (the first message) and the agent's own turns are never touched.
    """
    excess = len(encoded.ids) - max_length
    if excess <= 0:
        return Row(name, encoded.ids, encoded.spans)
    partners = [(s, e) for role, s, e in encoded.messages[1:] if role != "assistant"]
    if excess > sum(end - start for start, end in partners):
        return None
    removed: list[tuple[int, int]] = []  # disjoint ranges of ids, ascending
    left = excess
    for start, end in partners:
        if not left:
            break
        taken = min(left, end - start)
        removed.append((start, start + taken))
        left -= taken

    def shifted(position: int) -> int:
        return position - sum(min(e, position) - s for s, e in removed if s < position)

    gone = {i for start, end in removed for i in range(start, end)}
    ids = [token for i, token in enumerate(encoded.ids) if i not in gone]
    spans = [(shifted(start), shifted(end)) for start, end in encoded.spans]
    return Row(name, ids, spans, excess)


@dataclass(frozen=True)
class Audit:
    """What a training run is about to see."""

    rows: list[Row]
    dropped: list[str]  # names of examples that cannot be shortened to fit
    max_length: int
    bos: Counter[int]  # BOS tokens in an example -> how many examples

    def lines(self, chat: ChatEncoder) -> list[str]:
        """The audit as text: counts, lengths, and the first example with what is trained marked."""
        trained = [row.trained for row in self.rows]
        lengths = [len(row.ids) for row in self.rows]
        cut = [row for row in self.rows if row.cut]
        out = [
            f"{len(self.rows)} examples; {len(self.dropped)} dropped (prompt and own turns exceed "
            f"{self.max_length} tokens), {len(cut)} shortened in partners' turns"
        ]
        out += dropped_line(self.dropped)
        out.append(f"tokens an example: {_range(lengths)}; trained: {_range(trained)}")
        if chat.tokenizer.bos_token_id is not None and chat.tokenizer.bos_token_id not in (
            chat.tokenizer.eos_token_id,
        ):
            counts = ", ".join(f"{n}× in {count}" for n, count in sorted(self.bos.items()))
            out.append(f"BOS {chat.tokenizer.bos_token}: {counts}")
        out.append(f"first example ({self.rows[0].name}), trained parts in ⟦ ⟧:")
        out.append(marked(self.rows[0], chat))
        return out


def audit(examples: Iterable[Example], chat: ChatEncoder, max_length: int) -> Audit:
    """Tokenise all examples and check them.

    Raises TrainingError for an example that would train nothing, or when none is left.
    """
    rows, dropped = [], []
    bos: Counter[int] = Counter()
    for number, example in enumerate(examples, start=1):
        name = f"{example.trajectory_id} {example.agent}".strip() or f"example {number}"
        if not any(m["role"] == "assistant" and m["content"] for m in example.messages):
            raise TrainingError(f"{name} would train nothing: it has no assistant message")
        row = fit(chat.encode(example.messages), name, max_length)
        if row is None:
            dropped.append(name)
            continue
        if not row.trained:
            raise TrainingError(f"{name} would train nothing: its own turns are empty")
        bos[row.ids.count(chat.tokenizer.bos_token_id)] += 1
        rows.append(row)
    if not rows:
        raise TrainingError(
            f"no example is left: all {len(dropped)} exceed --max-length {max_length}"
            if dropped
            else "there are no examples to train on"
        )
    return Audit(rows, dropped, max_length, bos)


def dropped_line(names: Sequence[str]) -> list[str]:
    """Which examples or pairs were dropped, in at most one line."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"dropped: {', '.join(names[:3])}{more}"] if names else []


def marked(row: Row, chat: ChatEncoder) -> str:
    """The decoded example with ⟦ ⟧ around what is trained."""
    parts, position = [], 0
    for start, end in row.spans:
        parts.append(chat.tokenizer.decode(row.ids[position:start]))
        parts.append(f"⟦{chat.tokenizer.decode(row.ids[start:end])}⟧")
        position = end
    return "".join(parts)


def _range(values: Sequence[int]) -> str:
    mean = sum(values) / len(values)
    return f"{min(values)}-{max(values)} (mean {mean:.0f})"
