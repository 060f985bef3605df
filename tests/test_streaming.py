"""A pipe is read as it fills, and running conversations do not wait for a slow writer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from optima_lite.dialogue import Conversation, Sampling, run, start
from optima_lite.engines.replay import ReplayEngine
from optima_lite.jsonl import PipeLines
from optima_lite.tasks.relay import Relay
from optima_lite.teams import load_team


def test_lines_come_out_as_they_are_written() -> None:
    reading, writing = os.pipe()
    lines = PipeLines(reading)
    each = iter(lines)
    assert not lines.ready()
    os.write(writing, b"one\ntwo\nthr")
    assert lines.ready()
    assert next(each) == b"one\n"
    assert next(each) == b"two\n"
    assert not lines.ready()  # half a line is no line
    os.write(writing, b"ee")
    os.close(writing)
    assert lines.ready()
    assert list(each) == [b"three"]
    assert lines.ready()
    os.close(reading)


def test_a_blocking_read_waits_for_the_writer() -> None:
    reading, writing = os.pipe()
    timer = threading.Timer(0.2, lambda: (os.write(writing, b"late\n"), os.close(writing)))
    timer.start()
    assert list(PipeLines(reading)) == [b"late\n"]
    timer.join()
    os.close(reading)


def test_a_line_longer_than_the_buffer() -> None:
    reading, writing = os.pipe()
    long = b"x" * 300_000 + b"\n"
    thread = threading.Thread(target=lambda: (os.write(writing, long), os.close(writing)))
    thread.start()
    assert list(PipeLines(reading)) == [long]
    thread.join()
    os.close(reading)


def test_running_conversations_do_not_wait_for_tasks_that_are_not_there() -> None:
    """The writer offers its second task only after the first group has come out. An engine with
    room for eight turns must go on with the one group it has."""
    tasks = Relay().tasks(split="train")
    team = load_team("relay")
    finished: list[str] = []

    def groups() -> Iterator[list[Conversation]]:
        for number in range(3):
            # Asked for the next group while the last is unfinished, a real pipe would hang here.
            assert len(finished) == number
            yield start(next(tasks), team, 2, Sampling())

    engine = ReplayEngine(lambda request: "<A>Pelham</A>", capacity=8)
    for group in run(groups(), engine, ready=lambda: False):
        finished.append(group[0].task.id)
    assert len(finished) == 3
