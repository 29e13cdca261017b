"""What a run found: figures of contenders, and lines that compare two of them with a goal.

Everything here goes to JSON and comes back, so that tables, plot and page are made from one file.

Example:
    >>> section = Section("batches", "Random batches")
    >>> section.add("256", "rlio", [1e-7, 3e-7, 2e-7])
    >>> section.add("256", "cpprb", [4e-7, 4e-7, 4e-7])
    >>> section.compare("batches of 256", case="256", ours="rlio", beside="cpprb", at_least=3)
    >>> section.lines[0].value, section.lines[0].verdict
    (2.0, 'missed')
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.timing import Taken

__all__ = ["Figure", "Line", "Run", "Section"]


@dataclass
class Figure:
    """What one contender did in one case.

    Attributes:
        case: What was measured: ``"256"``, ``"write, vectors"``.
        name: The contender.
        values: Seconds a row, one a round.
        cpu: The same of all processors together; empty where it was not taken.
        at: Where the figure lies on the axis of a case that grows: rows, columns, bytes.
    """

    case: str
    name: str
    values: list[float]
    cpu: list[float] = field(default_factory=list)
    at: float | None = None

    @property
    def median(self) -> float:
        """Seconds a row."""
        return statistics.median(self.values)

    @property
    def rate(self) -> float:
        """Rows a second."""
        return 1 / self.median

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles of the rounds, as a part of the median."""
        if len(self.values) < 4:
            return (max(self.values) - min(self.values)) / 2 / self.median
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2 / self.median


@dataclass
class Line:
    """A comparison, with a goal or without.

    Attributes:
        work: What was done.
        beside: With what it is compared, or what the value is.
        value: A ratio (how many times as fast as the other), or a quantity in ``unit``; None: not measured.
        unit: ``"x"`` for ratios; else s, us, bytes.
        goal: None: there is none.
        sense: Whether the value should be at least or at most the goal.
        why: Why there is no value.
    """

    work: str
    beside: str
    value: float | None
    unit: str = "x"
    goal: float | None = None
    sense: Literal[">=", "<="] = ">="
    why: str = ""

    @property
    def verdict(self) -> Literal["met", "missed", "not measured", ""]:
        """Empty without a goal."""
        if self.value is None:
            return "not measured"
        if self.goal is None:
            return ""
        met = self.value >= self.goal if self.sense == ">=" else self.value <= self.goal
        return "met" if met else "missed"


@dataclass
class Section:
    """What one part of the benchmark found.

    Attributes:
        part: Its name on the command line.
        title: Of its table.
        unit: What its figures count: rows, or calls, of which seconds say more than a rate.
        absent: Contender -> why it did not run.
        facts: Sizes and the like, by name: what was measured besides time.
        tables: What is counted of many cases: title -> case -> column -> value.
    """

    part: str
    title: str
    unit: Literal["row", "call"] = "row"
    figures: list[Figure] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def add(self, case: str, name: str, values: list[float], *, at: float | None = None) -> None:
        """Add a figure: seconds a row of each round."""
        self.figures.append(Figure(case, name, values, at=at))

    def add_taken(self, case: str, taken: Mapping[str, Taken], *, at: float | None = None) -> None:
        """Add what `interleave` gave."""
        for name, each in taken.items():
            self.figures.append(Figure(case, name, each.seconds, each.cpu, at))

    def find(self, case: str, name: str) -> Figure | None:
        """The figure of a contender in a case."""
        return next((each for each in self.figures if (each.case, each.name) == (case, name)), None)

    def compare(self, work: str, *, case: str, ours: str, beside: str, at_least: float | None = None) -> None:
        """Add a line: how many times as fast ``ours`` was as ``beside``, the median of the rounds' ratios."""
        self.compare_best(work, case=case, ours=ours, besides=[beside], at_least=at_least)

    def compare_best(
        self,
        work: str,
        *,
        case: str,
        ours: str,
        besides: list[str],
        label: str | None = None,
        at_least: float | None = None,
    ) -> None:
        """Add a line that compares ``ours`` with the best of others in each round; ``label`` names them."""
        mine = self.find(case, ours)
        others = [figure.values for name in besides if (figure := self.find(case, name)) is not None]
        label = label or " or ".join(besides)
        if mine is None or not others:
            missing = [ours] if mine is None else besides
            self.missing(work, beside=label, at_least=at_least, names=missing)
        else:
            best = [min(them) for them in zip(*others, strict=True)]
            self.ratio(work, beside=label, ours=mine.values, theirs=best, at_least=at_least)

    def ratio(
        self, work: str, *, beside: str, ours: list[float], theirs: list[float], at_least: float | None
    ) -> None:
        """Add a line: the median of the rounds' ratios of the seconds of others to ours."""
        value = statistics.median(them / us for them, us in zip(theirs, ours, strict=True))
        self.lines.append(Line(work, beside, value, goal=at_least))

    def missing(self, work: str, *, beside: str, at_least: float | None, names: list[str]) -> None:
        """Add a line without a value: contenders did not run."""
        # "rlio, views" is absent where "rlio" is.
        found = (self.absent.get(name) or self.absent.get(name.split(",")[0]) for name in names)
        why = "; ".join(f"{name}: {reason}" for name, reason in zip(names, found, strict=True))
        self.lines.append(Line(work, beside, None, goal=at_least, why=why))

    def quantity(
        self, work: str, what: str, value: float | None, unit: str, *, at_most: float | None, why: str = ""
    ) -> None:
        """Add a line about a quantity of ours that should be small."""
        self.lines.append(Line(work, what, value, unit, at_most, "<=", why))


@dataclass
class Run:
    """A whole run: the machine, the options, and the sections."""

    machine: dict[str, Any]
    options: dict[str, Any]
    sections: list[Section] = field(default_factory=list)

    @property
    def lines(self) -> list[Line]:
        """The lines of all sections."""
        return [line for section in self.sections for line in section.lines]

    def to_json(self) -> dict[str, Any]:
        """Everything, with the verdicts that follow from it."""
        written = asdict(self)
        for section, plain in zip(self.sections, written["sections"], strict=True):
            for line, fields in zip(section.lines, plain["lines"], strict=True):
                fields["verdict"] = line.verdict
        return written

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Run:
        """What `to_json` wrote."""
        sections = []
        for plain in written["sections"]:
            figures = [Figure(**figure) for figure in plain["figures"]]
            lines = [Line(**{k: v for k, v in line.items() if k != "verdict"}) for line in plain["lines"]]
            sections.append(Section(**{**plain, "figures": figures, "lines": lines}))
        return cls(dict(written["machine"]), dict(written["options"]), sections)
