"""`DatasetSource`: a data set as a Ray Data datasource. Only `read_dataset` imports it: it needs Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from rlio.dataset.part_reader import PartReader
from rlio.distributed.ray_data.file_parts import FilePart

__all__ = ["DatasetSource"]


class DatasetSource(Datasource):
    """Parts of a data set, each read by one task.

    Args:
        parts: What each task reads, at least one part; all with one plan.
    """

    def __init__(self, parts: Sequence[PartReader] | Sequence[FilePart]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Ray's is not annotated.
        self._plan = parts[0].plan
        self._parts = parts
        # Ray sets this in a copy of this object if `select_columns` follows the read.
        self._projection_map: dict[str, str] | None = None

    def get_name(self) -> str:
        """Return the name for Ray's messages."""
        return "Rlio"

    def supports_projection_pushdown(self) -> bool:
        """Return True: unused columns are not read."""
        return True

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the bytes of all rows in memory, if known."""
        return sum(map(len, self._parts)) * self._plan.row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        """Return one task for each part, because which rows a task has must depend on the data alone."""
        names = self._get_data_columns()
        plan = self._plan if names is None else self._plan.only(names)
        # The number of rows that pass a filter, or belong to one policy, is unknown before reading.
        counted = plan.row_filter is None and plan.policy is None
        tasks = []
        for part in self._parts:
            rows = len(part)
            metadata = BlockMetadata(
                num_rows=rows if counted and not plan.options.skip_damage else None,
                size_bytes=rows * plan.row_bytes,
                input_files=None,
                exec_stats=None,
            )
            tasks.append(
                ReadTask(
                    replace(part, plan=plan).tables,
                    metadata,
                    schema=plan.shows(plan.layout.empty()).schema,
                    per_task_row_limit=per_task_row_limit,
                )
            )
        return tasks
