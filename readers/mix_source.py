"""`MixSource`: one reader of a mixture, read in its own batch sizes or ahead, and cut to size.

It remembers the origin of its unserved rows, so the state of a mixture holds no rows.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rlio.batch import Batch, SampleBatch, count_units, split_units
from rlio.errors import EndOfData, OptionError, StateError
from rlio.reader import InputReader, JsonState
from rlio.replay.joint_gather import RowSource
from rlio.support.forks import cached_property
from rlio.support.states import whole_number

__all__ = ["MOST_AHEAD", "MixSource"]

#: Maximum number of units that are read ahead of a source.
MOST_AHEAD = 4096


class _Waiting(NamedTuple):
    """The unserved part of a batch, the source's state before the batch, and the number of served units.

    A batch that was read ahead may be longer than the source's own batches.
    """

    batch: Batch
    origin: JsonState
    served: int


class MixSource:
    """A reader of the mixture, read in its own batch sizes and cut to size here.

    Cutting a batch costs 2 us; reading a few rows costs ten times as much or more.
    """

    def __init__(self, name: str, reader: InputReader, *, rewinds: bool) -> None:
        self.name = name
        self.reader = reader
        self.served: int = 0
        self.ended = False
        #: The reader's message at its end.
        self.end: str = ""
        #: The state to rewind to; None: the source cannot rewind.
        self.start: JsonState | None = reader.state_dict() if rewinds and reader.replayable else None
        # Whether a rewind is pending, for example after a failed one.
        self._rewinds = False
        self._waiting: deque[_Waiting] = deque()

    def wait_for(self, n: int) -> int:
        """Read until ``n`` units wait, rewinding if allowed; return how many of them do: fewer at the end."""
        there, rewound = self.waiting_units(), False
        while there < n:
            if not self._rewinds and self._read():
                size = count_units(self._waiting[-1].batch, self.reader.unit)
                there, rewound = there + size, rewound and not size
                continue
            if self.start is None:
                break
            if rewound:
                raise OptionError(
                    f"source {self.name!r} of the mixture has no {self.reader.unit}: leave it out. Its "
                    f"reader ended with: {self.end}"
                )
            self._rewind(self.start)
            rewound = True
        return min(there, n)

    def head(self, n: int) -> list[Batch]:
        """The next ``n`` units, which wait, as whole batches; `give` takes them."""
        parts: list[Batch] = []
        while n:
            number = len(parts)
            waiting = self._waiting[number]
            size = count_units(waiting.batch, self.reader.unit)
            if size > n:
                head, tail = split_units(waiting.batch, n, self.reader.unit)
                left = _Waiting(tail, waiting.origin, waiting.served + n)
                waiting = waiting._replace(batch=head)
                cut = [*self._waiting]
                cut[number : number + 1] = [waiting, left]
                self._waiting = deque(cut)  # One step, which no signal divides.
                size = n
            parts.append(waiting.batch)
            n -= size
        return parts

    def _rewind(self, start: JsonState) -> None:
        self._rewinds = True
        self.reader.load_state_dict(start)
        self._rewinds = False

    @cached_property
    def rows(self) -> RowSource | None:
        """Its next rows in a store; None if they are not in a store."""
        found: RowSource | None = getattr(self.reader, "row_source", None)
        return found

    @property
    def is_cut(self) -> bool:
        """Whether a part of a batch is waiting."""
        return bool(self._waiting)

    @property
    def parts(self) -> list[SampleBatch]:
        """The waiting rows; none if they are not plain batches."""
        return [waiting.batch for waiting in self._waiting if isinstance(waiting.batch, SampleBatch)]

    def fill(self, n: int) -> None:
        """Read until ``n`` units wait, or to the end. Only for readers that `can_read_ahead`.

        Raises:
            Exception: An error of the reader; no rows are lost.
        """
        endless = self.reader._endless()
        most = n if endless is None or endless.units is None else endless.units  # For one call.
        while (missing := n - self.waiting_units()) > 0:
            if not self._read(min(missing, most)):
                return

    def give(self, rows: int) -> None:
        """Move past ``rows`` served rows, in the store or here."""
        if self._waiting:
            self._give_waiting(rows)
        else:
            source = self.rows
            assert source is not None
            source.advance(rows)
        self.served += rows

    def _give_waiting(self, rows: int) -> None:
        while rows:
            waiting = self._waiting.popleft()
            size = count_units(waiting.batch, self.reader.unit)
            if size > rows:
                _, tail = split_units(waiting.batch, rows, self.reader.unit)
                self._waiting.appendleft(_Waiting(tail, waiting.origin, waiting.served + rows))
                return
            rows -= size

    def peek(self) -> Batch | None:
        """The next rows, without taking them; None at the end."""
        return self._waiting[0].batch if self._waiting or self._read() else None

    def ends_after(self, n: int) -> bool:
        """Whether nothing is left after ``n`` units, and the source cannot rewind."""
        return self.start is None and self.wait_for(n + 1) <= n

    def waiting_units(self) -> int:
        """Units that were read and wait to be served."""
        return sum(count_units(waiting.batch, self.reader.unit) for waiting in self._waiting)

    def position(self) -> JsonState:
        """The state from which the reader gives the waiting rows; a live reader continues after them."""
        if self._waiting and self.reader.replayable:
            return {"state": self._waiting[0].origin, "served": self._waiting[0].served}
        return {"state": self.reader.state_dict(), "served": 0}

    def seek(self, position: JsonState, start: JsonState | None = None) -> None:
        """Move to a saved position.

        Args:
            position: The position.
            start: The saved state that the source rewinds to, loaded first to see that it fits; None: none.
        """
        self._waiting.clear()
        self._rewinds = False
        served = whole_number(position, "served", of=f"the state of source {self.name!r}")
        if start is not None:
            self.reader.load_state_dict(start)
        self.start = start
        self.reader.load_state_dict(position["state"])
        if not served:
            return
        # A batch that was read ahead may be longer than the source's own batches.
        ahead, there = served < MOST_AHEAD and self.reader.can_read_ahead, 0
        while there <= served and (ahead or not self._waiting) and self._read():
            there += count_units(self._waiting[-1].batch, self.reader.unit)
        if not 0 < served < there:
            raise StateError(
                f"the state has {served} served {self.reader.unit} in a batch of source {self.name!r}, but "
                f"the batch has {there}: the data changed after the state was saved"
            )
        self._give_waiting(served)

    def _read(self, n: int | None = None) -> bool:
        """Read a batch, or return False at the end.

        Args:
            n: Its units; None: the reader's own size.
        """
        origin, before = self.reader.state_dict(), len(self._waiting)
        try:
            batch = self.reader.sample(n)
            self._waiting.append(_Waiting(batch, origin, 0))
        except EndOfData as end:
            self.end = str(end)
            return False
        except Exception:  # Reading failed: the reader has gone back by itself.
            raise
        except BaseException:  # A KeyboardInterrupt may have come between the two.
            if self.reader.replayable and len(self._waiting) == before:
                self.reader.load_state_dict(origin)
            raise
        return True
