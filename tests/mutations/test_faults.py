"""The list of faults against the files that it names."""

import pytest

from tests.mutations.__main__ import ROOT, planted
from tests.mutations.faults import FAULTS


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_can_be_planted(number):
    fault = FAULTS[number]
    before = (ROOT / fault.file).read_text()
    assert planted(before, fault, number) != before
    for path in fault.tests.split():
        assert (ROOT / path).exists()
