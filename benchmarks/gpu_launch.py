"""Becomes the command in its arguments, which ends when the process that launched it does.

A program of its own, because `Popen(preexec_fn=)` in a thread runs Python in a copy of the process:
the states of all other threads are deleted there, and what torch keeps in them has crashed.
"""

import ctypes
import os
import signal
import sys

PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG

if __name__ == "__main__":
    # Ctrl-C is ignored if the report runs in a shell's background; a step is ended by it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
