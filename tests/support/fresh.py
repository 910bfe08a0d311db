"""Separate processes for a few lines of Python, without the second that importing torch takes.

They are forked from a process that has imported torch and nothing else, and otherwise behave as
`python -c`. Tests of the import of torch, or of settings that glibc reads when a process starts,
need a new process instead.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import costs

SERVER = Path(__file__).with_name("fresh_server.py")


def run(
    code: str, *arguments: str | Path, env: dict[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess:
    """As subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    in this folder."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        call = {
            "code": code,
            "arguments": [os.fspath(argument) for argument in arguments],
            "environment": dict(os.environ if env is None else env),
            "folder": os.getcwd(),
            "outputs": [os.fspath(output) for output in outputs],
        }
        print(json.dumps(call), file=server.stdin, flush=True)
        status, seconds = json.loads(server.stdout.readline())
        costs.elsewhere += seconds
        done = subprocess.CompletedProcess(code, status, *(path.read_text() for path in outputs))
    assert status == 0 or not check, f"ended with {status}: {done.stderr}"
    return done


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.stdin.close)
    return server
