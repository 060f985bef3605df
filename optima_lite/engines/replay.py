"""An engine that says what it is told: for tests, and for looking at prompts without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from optima_lite.engines.base import Completion, Pull, Request, Utterance


class ReplayEngine:
    """Turns come from a function of the request; tokens are white-space separated words.

    `capacity` requests are taken at a time and finished in reverse order, so that nothing can
    come to rely on completions arriving in the order asked.
    """

    def __init__(
        self,
        script: Callable[[Request], Completion | str],
        name: str = "replay",
        capacity: int = 8,
        loss: Callable[[Utterance], float] = lambda u: 2.0,
    ):
        self.name = name
        self.capacity = capacity
        self.requests: list[Request] = []
        self._script = script
        self._loss = loss

    def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
        while batch := list(pull(self.capacity)):
            self.requests += batch
            for request in reversed(batch):
                said = self._script(request)
                if isinstance(said, str):
                    said = Completion(said, self.count_tokens(said), "end")
                yield request, said

    def losses(self, utterances: Sequence[Utterance]) -> list[float | None]:
        return [self._loss(u) if u.text.strip() else None for u in utterances]

    def count_tokens(self, text: str) -> int:
        return len(text.split())
