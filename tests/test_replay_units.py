"""The units of a live store, kept up as rows come and go, are those that the rows that are there say."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from counter_env import episode
from further import further

from rlio import MultiAgentBatch, ReplayStore, SampleBatch, concat_samples
from rlio.query.filters import RowFilter
from rlio.replay.buffers import Buffers
from rlio.replay.draw_options import draw_of
from rlio.replay.n_step import NStep
from rlio.replay.numbers import Numbers
from rlio.replay.sequences import Sequences, WholeEpisodes, chain_rows
from rlio.replay.table import Plan, RowTable

LENGTH = 9
FILTER = "rewards > 2 and rewards < 7"
CUTS = [
    {"draw": Sequences(3)},
    {"draw": Sequences(4, burn_in=2)},
    {"draw": Sequences(4, burn_in=3, overlap=1)},
    {"draw": Sequences(3, burn_in=5, overlap=2)},
]
DRAWS: list[dict[str, Any]] = [
    {},
    {"draw": NStep(3)},
    {"filter": FILTER},
    {"draw": NStep(2), "filter": FILTER},
    {"draw": WholeEpisodes()},
    {"draw": WholeEpisodes(), "filter": "rewards < 2 and eps_id > 0"},
    *CUTS,
    {**CUTS[2], "filter": FILTER},
]
JOINT: list[dict[str, Any]] = [{"columns": None}, {"filter": FILTER}]


class World:
    """Environments that give their steps bit by bit; some leave a tenth of their episodes unfinished."""

    def __init__(self, seed: int, *, leaves: float = 0.1) -> None:
        self.leaves = leaves
        self.rng = np.random.default_rng(seed)
        self.kind = str(self.rng.choice(["vector", "vector", "stack"]))
        self.joint = bool(self.rng.integers(2))
        self._times: dict[Any, int] = {}

    def batch(self) -> Any:
        """Rows of one policy, or of two, of which one may be absent."""
        one = self._part("a")
        if not self.joint:
            return one
        other = {"b": self._part("b")} if self.rng.integers(2) else {}
        return MultiAgentBatch({"a": one, **other}, len(one))

    def _part(self, policy: str) -> SampleBatch:
        """The next steps of some environments, whose rows alternate or do not."""
        parts = []
        for env in range(int(self.rng.integers(1, 4))):
            number = self._times.setdefault((policy, env), 0)
            start = self._times.get((policy, env, number), 0)
            stop = min(start + int(self.rng.integers(1, 7)), LENGTH)
            parts.append(episode(env, number, LENGTH, start=start, stop=stop, kind=self.kind))
            self._times[policy, env, number] = stop
            self._times[policy, env] += stop == LENGTH or self.rng.random() < self.leaves
        joined = concat_samples(parts)
        return joined[np.argsort(joined["t"], kind="stable")] if self.rng.integers(2) else joined


def all_of(units: Any) -> Any:
    """Every unit, as lists."""
    if not units.count:
        return []
    found = units.batch(np.arange(units.count))
    parts = found if isinstance(found, MultiAgentBatch) else {"": found}
    return {pid: {name: values.tolist() for name, values in own.items()} for pid, own in parts.items()}


def first_rows(table: RowTable, draw: dict[str, Any], chosen: np.ndarray) -> list[tuple[int, int]]:
    """(first row, burn-in) of the units of one table, by their definition, row by row."""
    found = []
    for row in range(table.tail, table.head):
        place, after = int(table.places(np.array([row]))[0]), [row]
        while (following := int(table.successors(np.array(after[-1:]))[0])) >= 0:
            after.append(following)
        if not chosen[row - table.tail]:
            continue
        cut = draw.get("draw")
        if not isinstance(cut, Sequences):
            found += [(row, 0)] if not isinstance(cut, WholeEpisodes) or place == 0 else []
            continue
        for burn_in in range(cut.burn_in + 1):
            begin = place + burn_in  # Place of the first row that is trained.
            starts = place == 0 or burn_in == cut.burn_in
            own = burn_in + (cut.overlap if begin else 0)  # A row that the sequence before has not.
            if starts and begin % (cut.length - cut.overlap) == 0 and len(after) > own:
                found.append((row, burn_in))
    return found


def passing(store: ReplayStore, table: RowTable, text: str | None) -> np.ndarray:
    """Which rows of a table the filter of a draw lets pass, oldest first."""
    rows = np.arange(table.tail, table.head)
    if text is None:
        return np.ones(len(rows), bool)
    columns = table.gather(rows, table.plan())
    return RowFilter.of(text).mask(columns, rows=len(rows))


def check_definition(store: ReplayStore, options: dict[str, Any]) -> None:
    """Raise where the units of one policy are not those that their definition says."""
    table = store.tables[options.get("policy", next(iter(store.tables)))]
    units = store.units(draw_of(options))  # type: ignore[arg-type]
    expected = first_rows(table, options, passing(store, table, options.get("filter")))
    assert units.count == len(expected), options
    shape = options.get("draw")
    if not expected or isinstance(shape, NStep):
        return
    drawn = units.batch(np.arange(units.count))
    firsts, burn_in = (np.array(values) for values in zip(*expected, strict=True))
    if "seq_lens" not in drawn:
        begin = np.arange(len(drawn))
    elif isinstance(shape, WholeEpisodes):
        begin = np.cumsum(drawn["seq_lens"]) - drawn["seq_lens"]
    else:
        assert isinstance(shape, Sequences)
        size = shape.length + shape.burn_in
        begin = np.arange(len(firsts)) * size
        if shape.burn_in:
            assert drawn["burn_in"].reshape(-1, size).sum(axis=1).tolist() == burn_in.tolist()
    recorded = table.gather(firsts, table.plan())
    for name in ("eps_id", "t"):
        assert drawn[name][begin].tolist() == recorded[name].tolist(), options


@pytest.mark.further
@pytest.mark.parametrize("seeds", [range(2), *further(range(2, 16))])
def test_units_that_are_kept_up_are_those_of_a_store_that_looks_at_all_its_rows(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        store = ReplayStore(int(world.rng.integers(3, 50)), frames=90 if seed % 3 else None)
        draws = [{**draw, "policy": "a"} for draw in DRAWS] + JOINT if world.joint else DRAWS
        samplers = [store.uniform(seed=7, batch_size=5, **options) for options in draws]
        for _ in range(int(world.rng.integers(1, 12))):
            store.append(world.batch(), writer=str(world.rng.choice(["one", "other"])))
            for options, sampler in zip(draws, samplers, strict=True):
                fresh = store.units(draw_of(options))  # type: ignore[arg-type]
                if fresh.count and world.rng.random() < 0.7:  # Not every sampler draws after each append.
                    assert all_of(sampler._seen()) == all_of(fresh), (seed, options)
                    again = store.uniform(batch_size=5, **options)
                    again.load_state_dict(sampler.state_dict())
                    assert sampler.sample().equals(again.sample())
                if options not in JOINT:
                    check_definition(store, options)


@pytest.mark.further
def test_an_append_and_a_draw_look_at_no_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what makes their cost that of the rows which come and go, however many there are."""
    looked: Counter[str] = Counter()

    def counted(name: str, found: Any) -> Any:
        looked[name] += len(found)
        return found

    places, mask = RowTable.places, RowFilter.mask
    monkeypatch.setattr(RowTable, "places", lambda *args: counted("places", places(*args)))
    monkeypatch.setattr(RowFilter, "mask", lambda *args, **rows: counted("mask", mask(*args, **rows)))
    world = World(2)
    world.joint, world.kind = False, "vector"
    for options in [*DRAWS, *JOINT]:
        world.joint = options in JOINT[1:]
        store = ReplayStore(60)
        while sum(map(len, store.tables.values())) < 60:
            store.append(world.batch())
        sampler = store.uniform(seed=0, batch_size=4, **options)
        sampler.sample()
        looked.clear()
        appended = 0
        for _ in range(15):
            before = sum(table.head for table in store.tables.values())
            store.append(world.batch())
            appended += sum(table.head for table in store.tables.values()) - before
            sampler.sample()
        is_cut = isinstance(options.get("draw"), Sequences | WholeEpisodes)
        assert looked["places"] == (appended if is_cut else 0), options
        assert looked["mask"] <= (appended if "filter" in options else 0), options
        assert looked["mask"] > 0 or "filter" not in options


def held(*objects: Any) -> int:
    """Bytes of everything that some objects refer to, memory for batches apart."""
    seen: dict[int, Any] = {}
    waiting = list(objects)
    apart = (type, ModuleType, FunctionType, Buffers, Plan)
    while waiting:
        found = waiting.pop()
        if id(found) not in seen and not isinstance(found, apart):
            seen[id(found)] = found
            waiting += gc.get_referents(found)
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.further
def test_a_store_that_is_full_keeps_nothing_of_rows_that_it_has_forgotten() -> None:
    """Whatever is drawn, and if nothing is: rows that were there before take no memory."""
    for kind, joint in (("stack", False), ("vector", True)):
        world = World(1, leaves=0.0)
        world.joint, world.kind = joint, kind
        store = ReplayStore(40)
        store.append(world.batch())
        options = [{**draw, "policy": "a"} for draw in DRAWS] + JOINT if joint else DRAWS
        samplers = [store.uniform(seed=0, batch_size=2, **draw) for draw in options]
        sizes = []
        for _ in range(4):
            for _ in range(20):
                store.append(world.batch())
                for sampler in samplers[::3]:  # Others wait until the end.
                    sampler.sample()
            for sampler in samplers:
                sampler.sample()
            sizes.append(held(store, *samplers))
        assert max(sizes[2:]) < 1.1 * max(sizes[:2]), sizes


def test_numbers_are_a_sorted_queue() -> None:
    rng = np.random.default_rng(0)
    numbers, model, most = Numbers(), list[int](), 0
    for _ in range(600):
        fresh = rng.integers(0, 10**6, rng.integers(0, 40))
        fresh += model[len(model) // 2] if model else 0
        numbers.insert(fresh)
        model = sorted([*model, *fresh.tolist()])
        most = max(most, len(model))
        if rng.random() < 0.4:
            least = model[len(model) * 2 // 3] if model else 0
            numbers.drop_below(least)
            model = [each for each in model if each >= least]
        assert numbers.values.tolist() == model
        assert len(numbers._array) <= max(64, 1.5 * most)


def test_chains_are_followed_however_far_apart_their_rows_lie() -> None:
    """Side by side, at equal distances, at changing ones, and over the end of a ring's memory."""
    rng = np.random.default_rng(1)
    for capacity, count in ((500, 300), (500, 2_000), (5_000, 4_000)):
        store = ReplayStore(capacity)
        envs = 1 + int(rng.integers(6))
        t = np.zeros(envs, int)
        for start in range(0, count, 100):
            which = rng.integers(0, envs, 100) if start % 400 == 0 else np.arange(100) % envs
            rows = []
            for env in which.tolist():
                rows.append((env, t[env]))
                t[env] += 1
            env_id, times = np.array(rows).T
            store.append(SampleBatch(env_id=env_id, eps_id=env_id, t=times, rewards=times))
        (table,) = store.tables.values()
        starts = rng.integers(table.tail, table.head, 20)
        for most in (np.full(20, 10**9), rng.integers(1, 100, 20)):
            rows, sizes = chain_rows(table, starts, most, head=table.head)
            expected = []
            for row, limit in zip(starts.tolist(), most.tolist(), strict=True):
                chain = [row]
                while len(chain) < limit and (row := int(table.successors(np.array([row]))[0])) >= 0:
                    chain.append(row)
                expected.append(chain)
            assert sizes.tolist() == [len(chain) for chain in expected]
            assert rows.tolist() == [row for chain in expected for row in chain]
