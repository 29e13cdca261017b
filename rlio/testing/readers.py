"""`ReaderTests`: the requirements of every `InputReader`; and `assert_resumes`, the law of resuming.

Nothing here needs pytest, but pytest collects the suites: write a subclass whose name it collects, and
nothing else.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.errors import EndOfData
    >>> from rlio.reader import InputReader
    >>> class Three(InputReader):
    ...     number = 0
    ...     def _next(self):
    ...         if self.number == 3:
    ...             raise EndOfData("three batches")
    ...         self.number += 1
    ...         return SampleBatch(t=[2 * self.number - 2, 2 * self.number - 1])
    ...     def _position(self):
    ...         return {"number": self.number}
    ...     def _seek(self, position):
    ...         self.number = position["number"]
    >>> assert_resumes(Three)
    >>> assert_resumes(Three, n=4)
    >>> class TestThree(ReaderTests):
    ...     def make_reader(self):
    ...         return Three()
    ...     def expected_rows(self):
    ...         return SampleBatch(t=[0, 1, 2, 3, 4, 5])
    >>> TestThree().test_one_pass_gives_the_expected_rows()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from rlio.batch import Batch, SampleBatch, concat_samples, count_units, split_units
from rlio.batch.arrays import equal_columns
from rlio.batch.nested import leaves, path_text
from rlio.errors import ClosedError, EndOfData, OptionError, RlioError, StateError
from rlio.reader import InputReader, JsonState

__all__ = ["ReaderTests", "assert_resumes", "assert_same"]

# A state is a position: even that of a mixture of many readers fits into this limit.
_STATE_BYTES = 64 * 1024

# `assert_resumes` follows every fourth remainder to its end, and reads so many batches of the others.
_FOLLOWED = 4
_LOOKED_AT = 3


def assert_same(found: Batch, expected: Batch, what: str = "the batch") -> None:
    """Check that two batches are equal in kind, columns, dtypes, shapes and values; NaN equals NaN.

    Raises:
        AssertionError: They differ; the message says where.
    """
    kinds = f"a {type(found).__name__}, expected a {type(expected).__name__}"
    assert type(found) is type(expected), f"{what}: {kinds}"
    ours, theirs = found.policies(), expected.policies()
    _assert_equal(list(ours), list(theirs), f"{what}: its policies are")
    for policy, rows in ours.items():
        _assert_same_rows(rows, theirs[policy], what if rows is found else f"{what}: policy {policy!r}")
    _assert_equal(found.env_steps(), expected.env_steps(), f"{what}: its env steps are")


def assert_resumes(
    make_reader: Callable[[], InputReader], n: int | None = None, *, batches: int = 20
) -> None:
    """Check the law of resuming: a state from before each batch, in a new reader, gives the same remainder.

    Every fourth remainder, including the first, is followed to its end; of the others, three batches are
    checked.

    Args:
        make_reader: Returns a new reader with the same arguments each time, including the seed.
        n: The argument of `sample`.
        batches: How many batches to check; a reader that ends earlier is followed to its end.

    Raises:
        AssertionError: A remainder differs, or a state is not JSON; the message names the batch.
    """
    states: list[str] = []
    expected: list[Batch | None] = []
    with make_reader() as reader:
        for number in range(batches):
            states.append(_json_text(reader.state_dict(), f"state before batch {number}"))
            batch = _sample(reader, n)
            expected.append(None if batch is None else batch.copy())
            if batch is None:
                break

    def check_remainder(reader: InputReader, number: int, kind: str) -> None:
        end = len(expected) if number % _FOLLOWED == 0 else number + _LOOKED_AT
        for later in range(number, min(end, len(expected))):
            what = f"sample({n}) number {later}, {kind} before number {number}"
            _assert_same_or_end(_sample(reader, n), expected[later], what)

    for number, text in enumerate(states):
        with make_reader() as restored:
            restored.load_state_dict(json.loads(text))
            saved_again = json.dumps(restored.state_dict(), sort_keys=True)
            check_remainder(restored, number, "restored")
        # A state saved right after loading must be as good; usually it is the same.
        if saved_again != text:
            with make_reader() as again:
                again.load_state_dict(json.loads(saved_again))
                check_remainder(again, number, "restored and saved again")


# A reader that should end but gives more batches than this is taken as endless.
_MANY = 20_000


class ReaderTests:
    """Conformance suite of readers. Subclass it and implement the two accessors; pytest finds the tests.

    Attributes:
        finite: Whether the readers end.
        ordered: Whether one pass gives the expected rows in their order, or in any order.
        size_free: Whether the order of rows is the same for all sizes. A mixture's is not, because it groups
            the rows of each batch.
        batches: How many batches to check of readers that do not end.
        sizes: The arguments of `sample`.
    """

    finite: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    size_free: ClassVar[bool] = True
    batches: ClassVar[int] = 12
    sizes: ClassVar[tuple[int | None, ...]] = (None, 1, 3, 7)

    # ---- the two accessors ----

    def make_reader(self) -> InputReader:
        """Return a new reader of the same data with the same arguments, including the seed."""
        raise NotImplementedError(f"{type(self).__name__}.make_reader() must give a fresh reader")

    def expected_rows(self) -> Batch | None:
        """Return the rows of one pass, found without the reader; None if they cannot be known."""
        raise NotImplementedError(f"{type(self).__name__}.expected_rows() must give the rows, or None")

    # ---- reading ----

    def test_one_pass_gives_the_expected_rows(self) -> None:
        expected = self.expected_rows()
        if expected is None:
            return
        for n in self.sizes:
            with self.make_reader() as reader:
                rows = concat_samples(list(self._batches(reader, n)))
            if not self.finite:
                assert self.ordered, "an endless reader in another order has no first pass to compare"
                size = min(count_units(batch, reader.unit) for batch in (expected, rows))
                rows, expected = (split_units(batch, size, reader.unit)[0] for batch in (rows, expected))
            if not self.ordered:
                rows, expected = rows._each(_sorted_rows), expected._each(_sorted_rows)
            assert_same(rows, expected, f"the rows of one pass in sample({n})")

    def test_sizes_are_exact_until_the_last_batch(self) -> None:
        for n in self.sizes:
            if n is None:
                continue
            with self.make_reader() as reader:
                counts = [count_units(batch, reader.unit) for batch in self._batches(reader, n)]
            short = [count for count in counts[:-1] if count != n]
            assert not short, f"sample({n}) gave {short} {reader.unit} before the last batch"
            assert not counts or 0 < counts[-1] <= n, f"the last sample({n}) gave {counts[-1]}"

    def test_what_is_left_over_comes_first_next_time(self) -> None:
        with self.make_reader() as one, self.make_reader() as other:
            whole = _sample(one, 7)
            assert whole is not None, "the reader has no data at all: the suite needs some rows"
            parts = []
            for n in (1, 4, 2):
                if (part := _sample(other, n)) is not None:
                    parts.append(part)
        if one.replayable and self.size_free:
            assert_same(concat_samples(parts), whole, "sample(1), sample(4), sample(2) beside sample(7)")

    def test_next_is_sample(self) -> None:
        with self.make_reader() as one, self.make_reader() as other:
            if one.replayable:
                for _ in range(3):
                    if (batch := _sample(one, None)) is None:
                        break
                    assert_same(other.next(), batch, "next() beside sample()")

    def test_a_batch_is_the_callers_own(self) -> None:
        for n in (None, 3):
            with self.make_reader() as reader:
                kept = [(batch, batch.copy()) for batch in islice(self._batches(reader, n), 4)]
            for number, (batch, copy) in enumerate(kept):
                assert_same(batch, copy, f"sample({n}) number {number}, after later ones")

    def test_writing_to_a_batch_changes_no_other(self) -> None:
        with self.make_reader() as one, self.make_reader() as other:
            if not one.replayable:
                return
            for number in range(6):
                batch, clean = _sample(one, 3), _sample(other, 3)
                _assert_same_or_end(batch, clean, f"sample(3) number {number}, after others were written to")
                if batch is None:
                    break
                _overwrite(batch)

    def test_illegal_sizes_raise(self) -> None:
        with self.make_reader() as reader:
            for n in (0, -1):
                assert_raises(OptionError, reader.sample, n)

    # ---- the end ----

    def test_iteration_stops_and_the_end_stays_the_end(self) -> None:
        if not self.finite:
            return
        for n in (None, 3):
            with self.make_reader() as reader:
                for _ in self._batches(reader, n):
                    pass
                for size in (None, 1, 3):
                    assert_raises(EndOfData, reader.sample, size)
                assert list(reader) == [], "iteration at the end gave batches"

    def test_a_closed_reader_raises_and_may_be_closed_again(self) -> None:
        reader = self.make_reader()
        _sample(reader, 1)
        reader.close()
        reader.close()
        assert_raises(ClosedError, reader.sample)
        assert_raises(ClosedError, reader.sample, 1)
        self.make_reader().close()

    def test_leaving_the_with_block_closes(self) -> None:
        with self.make_reader() as reader:
            pass
        assert_raises(ClosedError, reader.sample)

    # ---- state ----

    def test_the_state_is_small_json(self) -> None:
        with self.make_reader() as reader:
            for _ in range(4):
                text = _json_text(reader.state_dict(), "the state")
                assert len(text) <= _STATE_BYTES, f"the state has {len(text)} bytes: it must be a position"
                if _sample(reader, 2) is None:
                    break

    def test_saving_the_state_changes_nothing(self) -> None:
        with self.make_reader() as one, self.make_reader() as other:
            if not one.replayable:
                return
            for _ in range(5):
                one.state_dict()
                _assert_same_or_end(_sample(one, 3), _sample(other, 3), "sample(3) after state_dict()")

    def test_a_saved_state_does_not_change_afterwards(self) -> None:
        with self.make_reader() as reader:
            _sample(reader, 2)
            state = reader.state_dict()
            text = json.dumps(state)
            for _ in range(3):
                _sample(reader, 2)
            assert json.dumps(state) == text, "sampling changed a state that was saved before"

    def test_it_resumes_before_every_batch(self) -> None:
        with self.make_reader() as reader:
            if not reader.replayable:
                return
        for n in self.sizes:
            assert_resumes(self.make_reader, n, batches=self.batches)

    def test_a_state_loads_into_a_reader_that_has_been_used(self) -> None:
        with self.make_reader() as one, self.make_reader() as other:
            if not one.replayable:
                return
            _sample(one, 4)
            state = one.state_dict()
            for _ in self._batches(other, 3):
                if not self.finite:
                    break
            other.load_state_dict(json.loads(_json_text(state, "the state")))
            for _ in range(3):
                _assert_same_or_end(_sample(other, 2), _sample(one, 2), "sample(2) of a used reader")

    def test_a_foreign_state_raises(self) -> None:
        with self.make_reader() as reader:
            state = reader.state_dict()
            for key, value in (("reader", "SomethingElse"), ("version", -1), ("position", None)):
                assert_raises(StateError, reader.load_state_dict, {**state, key: value})

    def test_after_a_load_that_failed_nothing_is_given_until_one_succeeds(self) -> None:
        with self.make_reader() as reader, self.make_reader() as other:
            _sample(other, 3)
            state = other.state_dict()
            assert_raises(StateError, reader.load_state_dict, {**state, "version": -1})
            assert_raises(StateError, reader.sample)
            assert_raises(StateError, reader.sample, 1)
            assert_raises(StateError, reader.state_dict)
            reader.load_state_dict(state)
            again = _sample(reader, 3)
            if reader.replayable:
                _assert_same_or_end(again, _sample(other, 3), "sample(3) after a second load, which fits")
        with self.make_reader() as failed:
            assert_raises(StateError, failed.load_state_dict, {**state, "version": -1})

    def _batches(self, reader: InputReader, n: int | None) -> Iterator[Batch]:
        """The batches of one pass, or the first few of an endless reader."""
        for _ in range(_MANY if self.finite else self.batches):
            if (batch := _sample(reader, n)) is None:
                return
            yield batch
        assert not self.finite, f"no end after {_MANY:,} batches: set finite = False if there is none"


def _sample(reader: InputReader, n: int | None) -> Batch | None:
    """The next batch; None at the end."""
    try:
        return reader.sample(n)
    except EndOfData:
        return None


def assert_raises(kind: type[RlioError], call: Callable[..., Any], *args: Any, what: str = "") -> None:
    """Check that ``call(*args)``, in words ``what``, raises ``kind``; ``Any``: any call may be checked."""
    try:
        result = call(*args)
    except kind:
        return
    what = what or f"{call.__name__}({', '.join(map(repr, args))})"
    raise AssertionError(f"{what} must raise {kind.__name__} but returned {result!r}")


def _json_text(state: JsonState, what: str) -> str:
    try:
        # A program that stores the state may sort its keys.
        text = json.dumps(state, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} is not JSON: {error}") from error
    assert json.loads(text) == state, (
        f"{what} changes on its way through JSON (tuples, keys that are numbers?)"
    )
    return text


def _assert_same_or_end(found: Batch | None, expected: Batch | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what}: {found}, expected {expected} (None: the end of the data)"
        return
    assert_same(found, expected, what)


def _assert_equal(found: object, expected: object, what: str) -> None:
    assert found == expected, f"{what} {found}, expected {expected}"


def _assert_same_rows(found: SampleBatch, expected: SampleBatch, what: str) -> None:
    _assert_equal(sorted(found), sorted(expected), f"{what}: its columns are")
    for name in found:
        _assert_same_column(found[name], expected[name], f"{what}: column {name!r}")
    assert found.equals(expected), f"{what}: the batches' attributes (seq_lens, padding, ...) differ"


def _assert_same_column(found: Any, expected: Any, what: str) -> None:
    """``Any``, because a column may be nested."""
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    names, others = sorted(map(path_text, ours)), sorted(map(path_text, theirs))
    _assert_equal(names, others, f"{what}: its leaves are")
    for path, leaf in ours.items():
        one, other = np.asarray(leaf), np.asarray(theirs[path])
        where = f"{what} {path_text(path)}" if path else what
        _assert_equal(f"{one.dtype} {one.shape}", f"{other.dtype} {other.shape}", f"{where}: its values are")
        if not equal_columns(one, other):
            rows = [i for i in range(len(one)) if not equal_columns(one[i : i + 1], other[i : i + 1])]
            differ = f"rows {rows[:5]} of {len(one)} differ"
            raise AssertionError(f"{where}: {differ}: {one[rows[:1]]}, expected {other[rows[:1]]}")


def _overwrite(batch: Batch) -> None:
    """Write other numbers into every writable array of ``batch``."""
    for part in batch.policies().values():
        for name in part:
            for _, leaf in leaves(part[name]):
                if isinstance(leaf, np.ndarray) and leaf.flags.writeable and leaf.dtype.kind in "biuf":
                    leaf[...] = leaf == 0


def _sorted_rows(batch: SampleBatch) -> SampleBatch:
    """The rows in an order that depends only on their values."""
    columns = [np.asarray(leaf).tolist() for name in sorted(batch) for _, leaf in leaves(batch[name])]
    # Object columns use the repr of their rows: dicts, texts, numbers.
    keys = [repr(row) for row in zip(*columns, strict=True)]
    rows: SampleBatch = batch[np.asarray(sorted(range(len(keys)), key=keys.__getitem__), np.int64)]
    return rows
