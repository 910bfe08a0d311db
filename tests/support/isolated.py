"""Calls that may crash: each in a forked child, whose exit is reported by name."""

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable

import torch


def each(
    run: Callable[[str], object],
    names: Iterable[str],
    seconds: int = 60,
    prepare: Callable[[], object] | None = None,
) -> dict:
    """{name: the JSON-able result of run(name), or how its process ended}.

    One child runs all names in turn. Where it dies, another one goes on with the next name. It has
    one thread: OpenMP's others do not live on in a fork, and a parallel region would wait for them.
    prepare() is called in each child first: limits and settings that this process must not keep.
    """
    waiting, found = list(names), {}
    while waiting:
        done, end = _child(run, waiting, seconds, prepare)
        found.update(done)
        waiting = waiting[len(done) :]
        if waiting:
            found[waiting.pop(0)] = end
    return found


def _child(run, names, seconds, prepare) -> tuple[dict, str]:
    """({name: result} of those that finished, how the child ended)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            torch.set_num_threads(1)
            if prepare is not None:
                prepare()
            with os.fdopen(write, "w") as pipe:
                for name in names:
                    signal.alarm(seconds)  # ends the process
                    print(json.dumps(run(name)), file=pipe, flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    done = {name: json.loads(line) for name, line in zip(names, lines, strict=False)}
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return done, f"took more than {seconds} seconds"
    return done, f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
