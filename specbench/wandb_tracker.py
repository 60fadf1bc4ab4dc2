"""Weights & Biases, spoken to by a process of its own (``wandb_process``).

wandb brings threads, hooks, a second process and a hundred megabytes of memory, and it waits for networks. None of that
belongs in a process whose rounds are timed and whose memory is measured, and a process of its own can be left or ended
whatever becomes of it: it has no terminal, so it asks nothing, and no output, so it says nothing.
"""

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from specbench.errors import ConfigError, RunError, nearest
from specbench.tracking import Ending, Page, Tracker

log = logging.getLogger(__name__)

MODES = ("online", "offline")
START = 90.0  # seconds for Python, wandb and its service to begin, a try to reach the network included
CLOSE = 30.0  # seconds for all but the network once a run is done


class Wandb(Tracker):
    """Shows a run for each record, under the record's id. Settings: conf/tracker/wandb.yaml."""

    command = (sys.executable, "-m", "specbench.wandb_process")

    def __init__(
        self,
        project: str = "specbench",
        entity: str | None = None,
        group: str | None = None,
        mode: str | None = None,
        every: float | None = 5.0,
        wait: float = 30.0,
        figures: bool = False,
        artifacts: bool = False,
    ):
        if mode is not None and mode not in MODES:
            raise ConfigError(f"tracker.mode={mode} is unknown. {nearest(str(mode), MODES)}")
        for name, seconds in (("every", wait if every is None else every), ("wait", wait)):
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
                raise ConfigError(f"tracker.{name}={seconds} is no number of seconds above 0")
        for name, asked in (("figures", figures), ("artifacts", artifacts)):
            if type(asked) is not bool:
                raise ConfigError(f"tracker.{name}={asked} is neither true nor false")
        self.every = every
        self._group, self._figures, self._artifacts, self._wait = group, figures, artifacts, wait
        self._where = {"project": project, "entity": entity, "mode": mode, "wait": wait}
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()

    def begin(self, page: Page) -> None:
        """Start the process, and wait until its run has begun. Raises RunError, or what is wrong with the machine."""
        self._leave()
        root = str(Path(__file__).parent.parent)
        paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH")) if path)
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
        )
        os.set_blocking(self._input.fileno(), False)
        shown = {**asdict(page), "group": self._group or page.group, "folder": str(page.folder)}
        if self._ask({**shown, **self._where}, START).get("offline"):
            self._where["mode"] = "offline"  # the next run need not find out

    def log(self, row: Mapping[str, float], step: int | None = None) -> None:
        """Hand the row over, or drop it where the process is behind."""
        self._say({"row": dict(row), "step": step}, 0)

    def end(self, ending: Ending) -> None:
        """Hand over all that is known, wait until it is sent or kept, and let the process go."""
        artifacts = [{**asdict(a), "folder": str(a.folder)} for a in ending.artifacts] if self._artifacts else []
        record = str(ending.record) if self._figures and ending.record is not None and ending.error is None else None
        told = {**asdict(ending), "artifacts": artifacts, "record": record}
        try:
            self._ask(told, CLOSE + self._wait)
        finally:
            self._leave()

    @property
    def _input(self) -> IO[bytes]:
        if self._process is None or self._process.stdin is None:
            raise RunError("no run of Weights & Biases is open")
        return self._process.stdin

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Say something, pass on what the user should know of the answer, once. Leaves the process if it fails."""
        try:
            until = time.monotonic() + seconds
            self._say(message, seconds)
            answer = self._answer(until - time.monotonic())
            if "error" in answer:
                raise RunError(f"Weights & Biases: {answer['error']}")
        except BaseException:
            self._leave()
            raise
        for note in answer["notes"]:
            if note not in self._said:
                self._said.add(note)
                log.info("%s", note)
        return answer

    def _say(self, message: Mapping[str, Any], seconds: float) -> None:
        """A line of JSON, within so many seconds; of no seconds, now or never."""
        pipe = self._input.fileno()
        line = json.dumps(message).encode() + b"\n"
        until = time.monotonic() + seconds
        while line:
            # a pipe that can be written to takes at least PIPE_BUF bytes, so a row goes whole or not at all
            if not select.select([], [pipe], [], max(0.0, until - time.monotonic()))[1]:
                if not seconds:
                    return
                raise RunError(f"Weights & Biases: its process took nothing for {seconds:.0f} s")
            try:
                line = line[os.write(pipe, line) :]
            except BrokenPipeError as error:
                self._leave()
                raise RunError("Weights & Biases: its process is gone") from error

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, seconds))[0]:
            raise RunError(f"Weights & Biases: no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RunError(f"Weights & Biases: its process ended with code {self._process.wait(CLOSE)}")
        return json.loads(line)

    def _leave(self) -> None:
        """Let the process go, whatever it is at."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()
        self._process = None
