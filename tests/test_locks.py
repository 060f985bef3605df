from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from optima_lite.errors import OutputError
from optima_lite.jsonl import ResumableOutput, atomic_output
from optima_lite.locks import only_writer

HOLD = """
import sys, time
from optima_lite.locks import only_writer
with only_writer(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of a path."""
    started: list[subprocess.Popen[bytes]] = []

    def hold(path: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, cwd=tmp_path
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_the_second_writer_is_refused_and_leaves_the_first_alone(holder, tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    process = holder(path)
    for _ in range(2):  # a refusal must not remove the lock
        with pytest.raises(OutputError, match=r"another run is writing .*out\.jsonl"):
            ResumableOutput(str(path)).__enter__()
    assert not path.exists()
    with only_writer(tmp_path / "other.jsonl"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with only_writer(path):  # what a killed run leaves behind keeps nobody out
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_appends_to_is_not_replaced(holder, tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"{}\n")
    holder(path)
    with (
        pytest.raises(OutputError, match="another run is writing"),
        atomic_output(str(path), overwrite=True),
    ):
        pytest.fail("it may be written")
    assert path.read_bytes() == b"{}\n"


def test_two_names_of_one_file(holder, tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    (tmp_path / "link").symlink_to(path)
    holder(path)
    with pytest.raises(OutputError, match="link"), only_writer(tmp_path / "link"):
        pass
    with pytest.raises(OutputError), only_writer(os.path.relpath(path)):
        pass


def test_the_lock_goes_with_an_error(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyError), ResumableOutput(str(path)):
        raise KeyError
    path.write_bytes(b"")
    with pytest.raises(OutputError, match="exists"), ResumableOutput(str(path)):
        pass
    with only_writer(path):
        pass
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_locked(tmp_path) -> None:
    with only_writer("/dev/null"), only_writer("/dev/null"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with only_writer(tmp_path / "pipe"), only_writer(tmp_path / "pipe"):
        pass


def test_where_no_lock_can_be_made_nobody_is_kept_out(tmp_path) -> None:
    with only_writer(tmp_path / "missing" / "out"), only_writer(tmp_path / "missing" / "out"):
        pass
