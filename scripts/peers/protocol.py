"""How the engine benchmark talks to an engine in a process, and an environment, of its own: a line of JSON each way.

Only the standard library: this file is imported by environments that have nothing of ours.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Jobs = dict[str, Callable[..., dict[str, Any]]]


def serve(start: Callable[[], tuple[Jobs, dict[str, str]]]) -> None:
    """``start`` loads the engine and returns its jobs by name and the versions of what it runs on. Each line read is
    ``{"job": name, …arguments}``; each line written is what the job returned. What the engine prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs, versions = start()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply({"versions": versions})
    for line in sys.stdin:
        arguments = json.loads(line)
        reply(jobs[arguments.pop("job")](**arguments))
