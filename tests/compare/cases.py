"""Settings for tests of single pieces of a run."""

from __future__ import annotations

import argparse

from onepass.compare.settings import Settings, add_arguments, read_settings


def settings_of(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(["--quick", "--threads", "1", *flags]))
