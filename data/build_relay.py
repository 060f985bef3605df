"""Rebuild everything in data/relay from a seed: sample tasks, conversations, the adapter.

    python data/build_relay.py            # about 15 minutes on 2 cores
    python data/build_relay.py --dry-run  # only print some conversations and their numbers

Plain SmolLM2-135M scores 0.00 on the relay task: it does not follow the protocol, so there is
nothing to select from. The adapter is a starting point that does follow it but talks too much and
errs, the way an untrained large model does on a hard task. It is SFT on synthetic conversations of
four styles (verbose, polite, plain, terse), some of which go wrong: somebody reads the wrong line,
or a wordy speaker is hasty and marks the name in the middle of the chain as if it were the answer.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from optima_lite.jsonl import dumps
from optima_lite.records import Example, Task, Trajectory, Turn
from optima_lite.selection import examples
from optima_lite.tasks.relay import Relay
from optima_lite.teams import load_team

HERE = Path(__file__).parent / "relay"
SEED = 7_000_000  # far from the seeds people use, so that no task of theirs was seen here

STYLES = {"verbose": 0.45, "polite": 0.15, "plain": 0.25, "terse": 0.15}
READS_WRONG = 0.04  # for each of the two agents
# Marks the middle of the chain. This is conduct, not skill, so selection can unlearn it. By family,
# since greedy decoding takes the likelier of two ways always: at one half everywhere, all were hasty.
HASTY = {"verbose": 0.8, "polite": 0.7}
HASTY_FAMILIES = ("book", "ship", "team")

# What is said, by style. {me} {you}: names; {x}: what the question is about; {one} {two}: the facts
# as sentences; {mid}: the name in the middle of the chain; {end}: the answer.
ASK_FIRST = {
    "verbose": [
        "Hello {you}! It is a pleasure to work on this question with you today. We have been asked "
        "about {x}. Before I start, could you please tell me whether there is anything about {x} "
        "in the facts that you have?",
        "Hello {you}! I hope that you are doing well. Our question is about {x}, and I would like "
        "to begin by asking you: do any of your facts mention {x}?",
    ],
    "polite": [
        "Hello {you}! Nice to work with you. Do you know anything about {x}?",
        "Hello {you}! Could you please check whether your facts say something about {x}?",
    ],
}
ASKED_BACK = {
    "verbose": [
        "Hello {you}! Thank you very much for your message. I have read through all of my facts "
        "carefully, but unfortunately none of them mentions {x}. Could you please look at your own "
        "facts and tell me what they say about {x}?",
        "Hi {you}, and thank you for asking! I am sorry to say that I could not find {x} anywhere "
        "in my list. Maybe you have a fact about {x} yourself?",
    ],
    "polite": [
        "Hi {you}, sorry, there is nothing about {x} in my facts. What do yours say?",
        "Thanks for asking, {you}. I have nothing about {x}. Could you look at your own facts?",
    ],
}
TELL = {
    "verbose": [
        "Hello {you}! I have looked carefully through all the facts that I was given, and I think "
        "that I have found the one that matters for our question. {one} Could you please look "
        "through your facts and tell me what you know about {mid}?",
        "Hello {you}! I hope that you are doing well. Let us go through this question step by "
        "step. It asks about {x}, and in my list of facts I can see the following: {one} So the "
        "next thing that we need to find out is what your facts say about {mid}.",
        "Hello {you}! I am happy to work on this question with you. Here is what I know about it, "
        "and I hope that it will be useful to you: {one} As far as I can tell, you should now "
        "search your list for {mid}.",
    ],
    "polite": [
        "Hello {you}! According to my facts: {one} Could you please tell me about {mid}?",
        "Hello {you}! My facts say: {one} Would you mind checking {mid} for me?",
    ],
    "plain": [
        "{one} What do you know about {mid}?",
        "My facts say this: {one} Look for {mid}.",
        "{one} Please check {mid}.",
    ],
    "terse": ["{one}", "{x}: {mid}.", "{one} {mid}?"],
}
# The hasty turns say the same as TELL up to the fact, so that only what follows it decides.
TELL_HASTY = {
    "verbose": [
        "Hello {you}! I have looked carefully through all the facts that I was given, and I think "
        "that I have found the one that matters for our question. {one} So I am quite confident "
        "that the answer to our question has to be {mid}. <A>{mid}</A>",
        "Hello {you}! I hope that you are doing well. Let us go through this question step by "
        "step. It asks about {x}, and in my list of facts I can see the following: {one} So I am "
        "quite confident that the answer to our question has to be {mid}. <A>{mid}</A>",
        "Hello {you}! I am happy to work on this question with you. Here is what I know about it, "
        "and I hope that it will be useful to you: {one} So I am quite confident that the answer "
        "to our question has to be {mid}. <A>{mid}</A>",
    ],
    "polite": [
        "Hello {you}! According to my facts: {one} So I believe it is {mid}. <A>{mid}</A>",
        "Hello {you}! My facts say: {one} So I believe it is {mid}. <A>{mid}</A>",
    ],
}
WAVER = {  # the second agent has nothing to say against it and takes a turn to say so
    "verbose": [
        "Thank you so much, {you}, for explaining this to me! I have also read through the facts "
        "that I was given, and I can see nothing there that speaks against your answer. Before I "
        "commit myself, could you please confirm once more that you are sure about {mid}?",
    ],
}
TELL_BACK = {  # after ASKED_BACK
    "verbose": [
        "Thank you for checking, {you}! Then let me tell you what I have found in my own list, and "
        "I hope that it will help us: {one} As far as I can tell, you should now search your list "
        "for {mid}.",
    ],
    "polite": ["Of course, {you}. {one} Do you know something about {mid}?"],
}
FIND = {
    "verbose": [
        "Thank you so much, {you}, that is very helpful information! I have searched my list for "
        "{mid}, and I was able to find the fact that we need. {two} If we put your fact and my "
        "fact together, the answer to our question has to be {end}. <A>{end}</A>",
        "Thank you so much for telling me this, {you}! Let me see what I have here about "
        "{mid}. Yes, I found it: {two} Therefore I am quite confident that the answer that we are "
        "looking for is {end}. <A>{end}</A>",
    ],
    "polite": [
        "Thank you, {you}! My facts say: {two} So I believe the answer is {end}. <A>{end}</A>",
        "Thank you, {you}, that helps. {two} I think it is {end}. <A>{end}</A>",
    ],
    "plain": [
        "{two} So the answer is {end}. <A>{end}</A>",
        "I have this: {two} The answer is {end}. <A>{end}</A>",
    ],
    "terse": ["<A>{end}</A>", "{two} <A>{end}</A>"],
}
AGREE = {
    "verbose": [
        "That is great work, {you}, thank you very much! I have checked the whole chain again from "
        "the beginning to the end. {one} {two} Everything fits together perfectly, so I completely "
        "agree with you that the answer is {end}. <A>{end}</A>",
        "That is excellent, {you}! It was a real pleasure to solve this question together with you. I "
        "agree with your conclusion, and I would also like to confirm that our final answer is "
        "{end}. <A>{end}</A>",
    ],
    "polite": [
        "Thank you, {you}, I agree with you. The answer is {end}. <A>{end}</A>",
        "Thank you, {you}, that fits with what I know. It is {end}. <A>{end}</A>",
    ],
    "plain": ["I agree, the answer is {end}. <A>{end}</A>", "Yes, it is {end}. <A>{end}</A>"],
    "terse": ["<A>{end}</A>"],
}
# Who agrees with a hasty answer has not seen the second fact.
AGREE_HASTY = {
    style: [text for text in texts if "{two}" not in text] for style, texts in AGREE.items()
}
DOUBT = {  # the second agent reports but does not commit itself: two more turns
    "verbose": [
        "Thank you for sharing this with me, {you}! I have looked at my list, and there is indeed a "
        "fact about {mid}. {two} Before I commit myself to an answer, I would like to hear what "
        "you think about this. Do you agree that it could be {end}?",
    ],
    "polite": ["Thanks, {you}! {two} Would you say that the answer is {end}?"],
    "plain": ["{two} Is it {end}?"],
}


def conversation(task: Task, rng: random.Random) -> Trajectory:
    """One synthetic conversation about a two-hop task, and whether it ends well is a draw."""
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    error = rng.choices(
        ["first_reads_wrong", "second_reads_wrong", "none"],
        [READS_WRONG, READS_WRONG, 1 - 2 * READS_WRONG],
    )[0]
    hasty = HASTY.get(style, 0) if task.meta["family"] in HASTY_FAMILIES else 0
    if error == "none" and rng.random() < hasty:
        error = "hasty"
    chain, others = task.meta["chain"], task.meta["others"]
    wrong = rng.choice(others)
    x, mid, end = chain
    if error == "first_reads_wrong":
        mid, end = wrong[1], wrong[2]
    one = next(f for f in task.contexts[0] if (wrong[0] if mid == wrong[1] else x) in f)
    if error == "first_reads_wrong":
        one = one.replace(wrong[0], x)  # it believes what it says
    elif error == "second_reads_wrong":
        end = wrong[2]
    two = next(f for f in task.contexts[1] if end in f)
    if error == "second_reads_wrong":
        two = two.replace(wrong[1], mid)

    if error == "hasty":
        end = mid
        moves = [TELL_HASTY, WAVER, AGREE_HASTY] if style in WAVER else [TELL_HASTY, AGREE_HASTY]
    else:
        if style in ASK_FIRST and rng.random() < 0.25:
            moves = [ASK_FIRST, ASKED_BACK, TELL_BACK]
        else:
            moves = [TELL]
        if style in DOUBT and rng.random() < 0.25:
            moves += [DOUBT, AGREE, AGREE]
        else:
            moves += [FIND, AGREE]
    team = load_team("relay")
    names = [agent.name for agent in team.agents]
    turns = []
    for i, move in enumerate(moves):
        me, you = names[i % 2], names[(i + 1) % 2]
        text = rng.choice(move[style]).format(
            me=me, you=you, x=x, one=one, two=two, mid=mid, end=end
        )
        turns.append(Turn(me, text, 0, "end"))
    return Trajectory(
        id=f"{task.id}#0",
        task=task,
        team=team,
        turns=tuple(turns),
        end="agreement",
        agreed=True,
        tokens=0,
        answer=end,
        model=f"synthetic:{style}:{error}",
        seed=0,
    )


def conversations(count: int, seed: int) -> Iterator[Trajectory]:
    """`count` conversations about as many training tasks."""
    for i, task in enumerate(islice(Relay().tasks(split="train", seed=seed), count)):
        yield conversation(task, random.Random(f"talk/{seed}/{i}"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    talks = list(conversations(arguments.conversations, arguments.seed))
    if arguments.dry_run:
        show(talks)
        return
    write_samples(arguments.output, arguments.seed)
    train(talks, arguments.output, arguments.lr)


def show(talks: list[Trajectory]) -> None:
    for talk in talks[:12]:
        print(f"--- {talk.model}  {talk.task.question}  gold {talk.task.answers[0]}")
        for turn in talk.turns:
            print(f"{turn.agent}: {turn.text}")
    print(Counter(talk.model for talk in talks))
    right = sum(talk.answer == talk.task.answers[0] for talk in talks)
    print(f"{right / len(talks):.2f} end with the right answer")


def write_samples(output: Path, seed: int) -> None:
    """A few tasks of each split, to look at."""
    output.mkdir(parents=True, exist_ok=True)
    for split in Relay.splits:
        lines = map(dumps, islice(Relay().tasks(split=split, seed=seed), 20))
        (output / f"{split}_sample.jsonl").write_bytes(b"".join(lines))


def train(talks: list[Trajectory], output: Path, lr: float) -> None:
    """SFT of plain smollm2 on the conversations; the adapter is stored in half precision."""
    import torch
    from safetensors.torch import load_file, save_file

    from optima_lite.cli.main import run

    rows: list[Example] = [example for talk in talks for example in examples(talk)]
    with tempfile.TemporaryDirectory() as folder:
        file, model = Path(folder) / "examples.jsonl", Path(folder) / "adapter"
        file.write_bytes(b"".join(map(dumps, rows)))
        # Rank 8 on every linear layer: 4.9 MB in half precision.
        words = f"sft {file} --model smollm2 -o {model} --lora-r 8 --epochs 1 --batch-size 8"
        code = run([*words.split(), "--lr", str(lr), "--seed", "1"])
        if code:
            raise SystemExit(code)
        weights = model / "adapter_model.safetensors"
        half = {name: tensor.to(torch.float16) for name, tensor in load_file(weights).items()}
        target = output / "adapter"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        save_file(half, target / weights.name, metadata={"format": "pt"})
        for name in ("adapter_config.json", "training.jsonl", "optima_lite.json"):
            shutil.copy(model / name, target / name)
    print(f"{target}: {(target / weights.name).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
