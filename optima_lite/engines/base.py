"""The protocol between conversations and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, eq=False)
class Request:
    """One turn to be said.

    `messages` is the speaker's view. `temperature` 0 is greedy. `seed` alone decides the draws:
    the same request gives the same turn whatever runs beside it, up to floating-point rounding.
    """

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """A turn that was said.

    `tokens` counts `text` without the end-of-turn token. `stop` is `end`, `length` (max_tokens
    reached), `context` (the window is full) or `error`, with `error` saying what failed.
    """

    text: str
    tokens: int
    stop: str
    error: str | None = None


@dataclass(frozen=True)
class Utterance:
    """A text whose loss is wanted; `context` is the dialogue before it, or None for none."""

    text: str
    context: str | None = None


#: Gives up to so many requests, fewer or none when nothing is due just now.
Pull = Callable[[int], Sequence[Request]]


class Engine(Protocol):
    """A model behind a uniform face."""

    #: What records call this model.
    name: str

    def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
        """Say turns until there are none.

        Whenever there is room, `pull` is asked for as many requests as fit; each completion is
        yielded as soon as it is finished, and what the caller learns from it may be pulled next.
        Ends when nothing is running and `pull` gives nothing. Every request pulled is yielded
        exactly once, a failed one with `stop` error.
        """
        ...

    def losses(self, utterances: Sequence[Utterance]) -> list[float | None]:
        """Mean negative log-likelihood per token of each text, in nats; None for an empty text."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` by the model's tokenizer, without special tokens."""
        ...
