"""Python imports this at its start where this folder is on PYTHONPATH: /proc/cpuinfo then names
the vendor of ONEPASS_TEST_VENDOR, in this process and in those that it starts."""

import os
import pathlib
import re

_read_text = pathlib.Path.read_text


def _with_other_vendor(self, *args, **options):
    text = _read_text(self, *args, **options)
    if str(self) != "/proc/cpuinfo":
        return text
    return re.sub(r"(?m)^(vendor_id\s*: ).*", rf"\1{os.environ['ONEPASS_TEST_VENDOR']}", text)


if "ONEPASS_TEST_VENDOR" in os.environ:
    pathlib.Path.read_text = _with_other_vendor
