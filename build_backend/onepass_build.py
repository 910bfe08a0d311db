"""PEP 517 wrapper around scikit-build-core.

The build needs torch's headers. Listing torch under build-system.requires would download one into
every isolated build, of whatever version is newest, even where the environment has its own. So it
is asked for only when the environment has none. CMake finds an installed one by its headers, and
the one that an isolated build brought through the hint below.
"""

import importlib.util
import os
import sysconfig
from pathlib import Path

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

_HEADER = "torch/include/torch/csrc/stable/library.h"


def _has_torch() -> bool:
    if os.environ.get("ONEPASS_TORCH_INCLUDE"):
        return True
    return any(Path(sysconfig.get_path(key), _HEADER).exists() for key in ("purelib", "platlib"))


def _torch_requirement() -> list[str]:
    return [] if _has_torch() else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings=None):
    return [*_build.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings=None):
    return [*_build.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def _hint_torch() -> None:
    """Tells CMake where the torch of this build environment is, if that is where it is."""
    if os.environ.get("ONEPASS_TORCH_INCLUDE"):
        return
    spec = importlib.util.find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec else []:
        include = Path(location, "include")
        if (include / "torch/csrc/stable/library.h").exists():
            os.environ["ONEPASS_TORCH_INCLUDE"] = str(include)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _hint_torch()
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _hint_torch()
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
