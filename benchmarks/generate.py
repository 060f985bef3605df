"""Generation: our engine against transformers' generate in plain padded batches, in one run.

    python benchmarks/generate.py --model relay --tasks 16 -n 6

Both hold the same conversations (same tasks, same team, sampling at the same temperature) in the
same process, one after the other; the ratio of tokens per second is what counts, since the
absolute figures depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import islice

import torch

from optima_lite.dialogue import Sampling, run, start
from optima_lite.engines.base import Completion, Pull, Request
from optima_lite.engines.hf import HFEngine
from optima_lite.engines.loading import LoadOptions
from optima_lite.tasks.relay import Relay
from optima_lite.teams import load_team


class PaddedEngine:
    """What one would write first: due turns in a left-padded batch, all waiting for the longest."""

    def __init__(self, engine: HFEngine, batch_size: int):
        self.name = engine.name
        self._engine = engine
        self._batch_size = batch_size

    def count_tokens(self, text: str) -> int:
        return self._engine.count_tokens(text)

    def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
        chat, model = self._engine.chat, self._engine.model
        while requests := list(pull(self._batch_size)):
            prompts = [chat.prompt(request.messages) for request in requests]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            temperature = requests[0].temperature
            said = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=requests[0].max_tokens,
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0,
                pad_token_id=chat.end_of_turn,
                eos_token_id=chat.end_of_turn,
            )[:, width:].tolist()
            for request, tokens in zip(requests, said, strict=True):
                ended = chat.end_of_turn in tokens
                text = chat.decode(tokens[: tokens.index(chat.end_of_turn)] if ended else tokens)
                yield (
                    request,
                    Completion(text, self.count_tokens(text), "end" if ended else "length"),
                )


def measure(engine: HFEngine | PaddedEngine, args: argparse.Namespace) -> tuple[int, int, float]:
    """Conversations, tokens and seconds of one pass over the tasks."""
    team = load_team("relay")
    tasks = islice(Relay().tasks(split="train", seed=args.seed), args.tasks)
    groups = (start(task, team, args.n, Sampling(args.temperature)) for task in tasks)
    conversations = tokens = 0
    began = time.perf_counter()
    for group in run(groups, engine):  # type: ignore[arg-type]
        conversations += len(group)
        tokens += sum(turn.tokens for c in group for turn in c.turns)
    return conversations, tokens, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="relay")
    parser.add_argument("--load", default="auto")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("-n", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ours = HFEngine.load(args.model, LoadOptions(args.load), slots=args.batch_size)
    rates = []
    for label, engine in (("padded", PaddedEngine(ours, args.batch_size)), ("ours", ours)):
        conversations, tokens, seconds = measure(engine, args)
        rates.append(tokens / seconds)
        print(
            f"{label:7s} {conversations} conversations, {tokens} tokens, {seconds:.1f} s: "
            f"{rates[-1]:.0f} tokens/s, {conversations / seconds:.2f} conversations/s"
        )
    print(f"ratio   {rates[1] / rates[0]:.2f} on {os.cpu_count()} cores, {ours.model.dtype}")


if __name__ == "__main__":
    main()
