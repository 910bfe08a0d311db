"""A machine for `gpu_report.py --rehearse`: the CPU in the place of the device, and stand-ins for
NVIDIA's programs. The libraries are those of the installed onepass, in the place of carried ones.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import gpu_build
from gpu_machine import commit

FOLDER = gpu_build.WORK / "rehearsal"
CAPABILITY = 90
PROGRAMS = {
    # Prints a ceiling, as the program that it would have compiled.
    "nvcc": """
import os, sys
program = sys.argv[sys.argv.index("-o") + 1]
with open(program, "w") as file:
    file.write("#!/bin/sh\\necho 'figure ceiling, copy: 1 GB/s'\\n")
os.chmod(program, 0o755)
""",
    # Runs its program, without the options of its own, which come in pairs.
    "compute-sanitizer": """
import subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words = words[2:]
code = subprocess.run(words).returncode
print("========= ERROR SUMMARY: 0 errors", flush=True)
raise SystemExit(code)
""",
    "ncu": "raise SystemExit('ncu: ERR_NVGPUCTRPERM')\n",
}


def machine() -> dict:
    return {
        "gpu": "rehearsal on the CPU",
        "capability": CAPABILITY,
        "torch": importlib.metadata.version("torch"),
        "cuda": "none",
        "commit": commit(),
    }


def tools() -> dict[str, str]:
    """Writes the programs, and puts the installed libraries where carried ones would lie."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, code in PROGRAMS.items():
        program = FOLDER / name
        program.write_text(f"#!{sys.executable}\n{code}")
        program.chmod(0o755)
    _carry()
    return {name: str(FOLDER / name) for name in PROGRAMS}


def python() -> str:
    """A Python with the packages of this one, but not its editable onepass: a line of a .pth file
    adds a folder without the .pth files in it."""
    folder = FOLDER / "python"
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    (Path(site) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def _carry() -> None:
    import onepass

    libraries = Path(onepass._C.__file__).parent / "_lib"
    gpu_build.CARRIED = FOLDER / "carried"
    gpu_build.CARRIED.mkdir(exist_ok=True)
    for name in gpu_build.LIBRARIES:
        if (libraries / name).exists():
            shutil.copy(libraries / name, gpu_build.CARRIED)
    built = onepass._C.build_info()
    facts = {"ONEPASS_TORCH_HEADERS": built["torch_headers"]}
    facts |= {"ONEPASS_CPU_LEVELS_TEXT": built["cpu_levels"]}
    facts |= {"ONEPASS_CUDA_ARCHS_TEXT": str(CAPABILITY), "ONEPASS_CUDA_VERSION": "13.0"}
    lines = [f'set({name} "{text}")\n' for name, text in facts.items()]
    (gpu_build.CARRIED / gpu_build.FACTS).write_text("".join(lines))
    (gpu_build.CARRIED / gpu_build.SOURCES).write_text(f"{CAPABILITY} {gpu_build.digest()}\n")
