"""Python processes of their own, which have imported torch already: forked from one server.

To import torch takes longer than what most of them run. They import `moe_ops` themselves, with the
environment that they are given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code`` in the checkout, with more variables of the environment."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        printed = [f"{folder}/out", f"{folder}/err"]
        request = {"code": code, "environment": {**os.environ, **environment}, "printed": printed}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = (Path(path).read_text() for path in printed)
    return subprocess.CompletedProcess(code, status, out, err)


@cache
def _server() -> Any:
    """The server, which ends with this process: its input is closed then."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)


def _serve() -> dict[str, Any] | None:
    """Fork a process for each request; returns the request in that process, and None at the end."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(environment: dict[str, str], printed: list[str]) -> None:
    """Take over the environment, the files to print to, and the folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv, sys.path[0] = ["-c"], ""
    inherited = os.open(os.devnull, os.O_RDONLY)
    os.dup2(inherited, 0)
    for path, descriptor in zip(printed, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)


if __name__ == "__main__":
    import torch  # noqa: F401

    request = _serve()
    if request is not None:
        _become(request["environment"], request["printed"])
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
