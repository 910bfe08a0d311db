"""Finds and loads the op libraries, or keeps the reason why it cannot.

Two shared libraries hold the operators: libonepass_cpu.so (schemas and CPU kernels) always,
libonepass_cuda.so where this torch has CUDA. They are loaded by torch, not by Python's importer;
`onepass._C` is the extension module beside them. `load()` is called once, by the package's import.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

REINSTALL = "reinstall it: pip install --force-reinstall --no-deps onepass"
OLDEST_TORCH = (2, 10)
OLDEST_CAPABILITY = (8, 0)  # of CUDA devices; that of csrc/ops/runtime.h

# Facts for `onepass doctor`: library name -> path once loaded, or -> the reason why it is not.
loaded: dict[str, Path] = {}
not_loaded: dict[str, str] = {}
# The reason why nothing works: torch is missing or too old, or a part of this package is missing or
# was built for another Python; the message names the remedy.
failure: ImportError | None = None


def load() -> None:
    """Loads the libraries for this host, or notes in `failure` why it cannot."""
    global failure
    try:
        _load()
    except ImportError as error:
        failure = error


def require() -> None:
    """Raises the error that kept the libraries from being loaded, if there was one."""
    if failure is not None:
        raise failure


def _load() -> None:
    torch = _import_torch()
    directory = library_directory()
    cpu = directory / "libonepass_cpu.so"
    _refuse_second_copy(torch, cpu)
    _load_library(torch, cpu)
    _attach(cpu)
    cuda = directory / "libonepass_cuda.so"
    if torch.version.cuda is None:
        not_loaded[cuda.name] = "this torch has no CUDA"
    elif not cuda.exists():
        not_loaded[cuda.name] = "this onepass was built without CUDA"
    else:
        _load_library(torch, cuda)
        _attach(cuda)


def no_cuda() -> str:
    """Why the operators cannot run on a CUDA device here; empty if they can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return not_loaded.get("libonepass_cuda.so", "") or too_old()


def too_old(device=None) -> str:
    """Why the kernels cannot run on a CUDA device, torch's current one by default, by its age."""
    import torch

    if not torch.cuda.is_available():
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST_CAPABILITY:
        return ""
    got, oldest = (".".join(map(str, version)) for version in (capability, OLDEST_CAPABILITY))
    return f"the device has compute capability {got}, and onepass needs {oldest} or newer"


def library_directory() -> Path:
    """The directory of the op libraries: beside the extension module.

    In editable installs that is not where this file is, so the extension module is located.
    """
    spec = importlib.util.find_spec("onepass._C")
    if spec is None or spec.origin is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"onepass: its extension module for Python {version} is missing: the package was "
            f"installed for another Python, or is imported from its source directory; {REINSTALL}"
        )
    return Path(spec.origin).parent / "_lib"


def _import_torch():
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name not in (None, "torch"):
            raise
        raise ImportError(
            "onepass: torch is not installed; install torch 2.10 or newer (pytorch.org says how)"
        ) from None
    except (ImportError, OSError) as error:
        raise ImportError(
            f"onepass: torch is installed but cannot be imported ({error}); "
            "reinstall torch (pytorch.org says how)"
        ) from None
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and (int(version[1]), int(version[2])) < OLDEST_TORCH:
        raise ImportError(
            f"onepass: needs torch 2.10 or newer, and this is torch {torch.__version__}; "
            "pip install 'torch>=2.10' upgrades it"
        )
    return torch


def _refuse_second_copy(torch, library: Path) -> None:
    """torch takes the operators of a process from one library; a second one would abort it."""
    if not torch._C._jit_get_schemas_for_operator("onepass::norm_forward"):
        return
    there = [(path, inode) for path, inode in _mapped() if Path(path).name == library.name]
    here = os.stat(library).st_ino if library.exists() else None
    if not there or any(inode == here for _, inode in there):
        return
    raise ImportError(
        f"onepass: this process has the operators of another copy, {there[0][0]}, and cannot load "
        f"those of {library} besides; start a new process, with one of the two on sys.path"
    )


def _mapped() -> set[tuple[str, int]]:
    """(path, inode) of the files that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        entries = (line.rstrip("\n").split(maxsplit=5) for line in lines)
        return {
            (entry[5].removesuffix(" (deleted)"), int(entry[4]))
            for entry in entries
            if len(entry) == 6
        }


def _attach(library: Path) -> None:
    try:
        from onepass import _C

        _C.attach(os.fspath(library))
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"onepass: its extension module does not work with its libraries ({error}); {REINSTALL}"
        ) from None


def _load_library(torch, path: Path) -> None:
    if not path.exists():
        raise ImportError(f"onepass: {path.name} is missing from the installation; {REINSTALL}")
    try:
        torch.ops.load_library(os.fspath(path))
    except OSError as error:
        reason = str(error).replace(os.fspath(path), path.name)
        raise ImportError(
            f"onepass: {path.name} cannot be loaded under torch {torch.__version__}: {reason}; "
            f"{REINSTALL}"
        ) from None
    loaded[path.name] = path
