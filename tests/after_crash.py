"""Tests go on after one that ends its process: pytest-xdist 3.8 hands that test out again, without end.

Its scheduler of groups also hands out the groups that the process had completed, one for each test that ends
elsewhere. Once no test is left to end, the run waits forever.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

__all__ = ["EachOnce"]


class EachOnce(LoadGroupScheduling):
    """Runs each test once, whatever it does to its process."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out; returns the test that ended it, which is not run again."""
        groups = self.assigned_work[node]
        crashed = None
        for name, tests in list(groups.items()):
            if crashed is None and not all(tests.values()):
                crashed = next(test for test, is_done in tests.items() if not is_done)
                tests[crashed] = True
            if all(tests.values()):
                del groups[name]
        super().remove_node(node)
        return crashed

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note that a test is done, and forget a group that is: all groups are counted after each test."""
        super().mark_test_complete(node, item_index, duration)
        group = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][group].values()):
            del self.assigned_work[node][group]

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process more tests: two, as it begins one when it knows the next."""
        if node not in self.registered_collections:  # It takes the place of another, and still collects.
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
