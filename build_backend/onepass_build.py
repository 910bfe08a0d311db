"""PEP 517 wrapper around scikit-build-core, for what its oldest version cannot be configured to do.

The build needs torch's headers. Listing torch under build-system.requires would download one into
every isolated build, of whatever version is newest, even where the environment has its own. So it
is asked for only when the environment has none. CMake finds an installed one by its headers, and
the one that an isolated build brought through the hint below.

An editable install rebuilds itself on import after an edit to C++ (`editable.rebuild`), but only
where the tools for that outlive the build: where cmake came with an isolated build alone, every
later import would fail.

MAX_JOBS limits the compilers that run at once, as in torch's own builds.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import scikit_build_core
from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_HEADER = "torch/csrc/stable/library.h"


def _site_packages() -> list[Path]:
    return [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]


def _torch_requirement() -> list[str]:
    if os.environ.get("ONEPASS_TORCH_INCLUDE"):
        return []
    installed = any((site / "torch/include" / _HEADER).exists() for site in _site_packages())
    return [] if installed else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings=None):
    return [*_build.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings=None):
    return [*_build.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def _prepare() -> None:
    """Sets what CMake reads from the environment."""
    _hint_torch()
    if jobs := os.environ.get("MAX_JOBS"):
        os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", jobs)


def _hint_torch() -> None:
    """Tells CMake where the torch of this build environment is, if that is where it is."""
    if os.environ.get("ONEPASS_TORCH_INCLUDE"):
        return
    spec = importlib.util.find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec else []:
        include = Path(location, "include")
        if (include / _HEADER).exists():
            os.environ["ONEPASS_TORCH_INCLUDE"] = str(include)


def _can_rebuild() -> bool:
    """Whether cmake and torch's headers will still be there when the package is imported."""
    backend = Path(scikit_build_core.__file__)
    isolated = not any(backend.is_relative_to(site) for site in _site_packages())
    if isolated and _torch_requirement():
        return False
    lasting = [
        entry
        for entry in os.environ.get("PATH", "").split(os.pathsep)
        if not (isolated and backend.is_relative_to(Path(entry).parent))
    ]
    found = [shutil.which(tool, path=os.pathsep.join(lasting)) for tool in ("cmake", "ninja")]
    return None not in found


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _prepare()
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _prepare()
    rebuild = {"editable.rebuild": "true" if _can_rebuild() else "false"}
    return _build.build_editable(
        wheel_directory, rebuild | (config_settings or {}), metadata_directory
    )
