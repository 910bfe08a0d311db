"""How the workers of `make test` share its tests: file by file, and the longest files first.

Things that a file makes once, such as a process that has imported torch, are made in one worker.
And the scheduling process, which goes through all assigned shares at every test, has a hundred
shares and not ten thousand. Tests of one `xdist_group` stay together across files.
"""

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.support import costs


class FileByFile(LoadGroupScheduling):
    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if scope == nodeid else scope

    def _assign_work_unit(self, node) -> None:
        """Long files first: a long one at the end would leave the other workers idle."""
        self.workqueue.move_to_end(max(self.workqueue, key=self._budget), last=False)
        super()._assign_work_unit(node)

    def _budget(self, scope: str) -> int:
        files = {nodeid.partition("::")[0] for nodeid in self.workqueue[scope]}
        return sum(costs.BUDGETS.get(file, 0) for file in files)


def scheduler(config: pytest.Config, log) -> FileByFile | None:
    """None, for xdist's own, if single tests take minutes: slow tests of a file are shared."""
    grouped = config.getoption("dist") == "loadgroup"
    return FileByFile(config, log) if grouped and costs.is_quick(config) else None
