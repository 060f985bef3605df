"""Run many `optima-lite` processes that need torch without importing torch in each.

One server process imports the heavy modules and forks a child per command line; the child is a
process of its own (own memory, own pid, can be killed) that runs `optima_lite.cli.main.run`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds until a child that hangs is killed

_SERVER = """
import json, os, sys
control, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(2, 1)
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast
import optima_lite.engines.hf, optima_lite.training.sft
from optima_lite.cli import gen, main, score, select, sft, tasks, tree

def child(job):
    os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(job["stdout"], flags, 0o666), 1)
    os.dup2(os.open(job["stderr"], flags, 0o666), 2)
    os.chdir(job["cwd"])
    code = main.run(job["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code

for line in control:
    job = json.loads(line)
    if "wait" in job:
        answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:
            code = 99
            try:
                code = child(job)
            finally:
                os._exit(code)
    print(answer, file=answers, flush=True)
"""


@dataclass
class Process:
    """A started child; `wait` gives its exit code, negative where a signal ended it."""

    pid: int
    stderr_path: Path
    _launcher: Launcher
    _code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            timer = threading.Timer(TIMEOUT, self.kill)
            timer.start()
            self._code = self._launcher._ask({"wait": self.pid})
            timer.cancel()
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(encoding="utf-8")


@dataclass
class Result:
    code: int
    stdout: bytes
    stderr: str


class Launcher:
    """Starts command lines in `directory`, where it also keeps what they print."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._count = 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            },
        )

    def start(
        self, *argv: object, stdin: object = os.devnull, stdout: object = None, cwd: object = None
    ) -> Process:
        """Start `optima-lite ARGV`; a fifo may be its stdin or stdout."""
        self._count += 1
        stderr = self.directory / f"{self._count}.err"
        job = {
            "argv": [str(a) for a in argv],
            "stdin": str(stdin),
            "stdout": str(stdout or self.directory / f"{self._count}.out"),
            "stderr": str(stderr),
            "cwd": str(cwd or self.directory),
        }
        return Process(self._ask(job), stderr, self)

    def run(self, *argv: object, stdin: object = os.devnull, cwd: object = None) -> Result:
        """Run `optima-lite ARGV` to its end."""
        process = self.start(*argv, stdin=stdin, cwd=cwd)
        code = process.wait()
        stdout = process.stderr_path.with_suffix(".out").read_bytes()
        return Result(code, stdout, process.stderr)

    def ok(self, *argv: object, **kwargs: object) -> Result:
        """The same for a command line that must succeed."""
        result = self.run(*argv, **kwargs)
        assert result.code == 0, (argv, result.stderr)
        return result

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(TIMEOUT)

    def _ask(self, job: dict[str, object]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()
