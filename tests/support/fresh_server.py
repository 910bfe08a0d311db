"""The program from which fresh.py forks its processes: it has imported torch."""

import gc
import json
import os
import signal
import sys
import time
import traceback
import types

import torch  # noqa: F401

SECONDS = 120  # for one of them


def run(code: str, arguments: list, environment: dict, folder: str, outputs: list) -> None:
    """The work of a child; it ends the process."""
    status = 1
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # it was the pipe of the next calls
    for stream, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # the normal exit of torch takes half a second


def serve() -> None:
    """Answers each call with its exit code and CPU seconds; the first includes torch's import."""
    told = 0.0
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(**json.loads(line))
        _, status, usage = os.wait4(child, 0)
        seconds = time.process_time() - told
        told += seconds
        answer = os.waitstatus_to_exitcode(status), seconds + usage.ru_utime + usage.ru_stime
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path[0] = ""  # as for -c
    gc.collect()
    gc.freeze()  # garbage collections would copy these pages
    serve()
