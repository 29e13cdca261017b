"""Imports point one way: each module imports from its own layer and those below, also inside functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layers")  # What is parsed is kept.

# Lowest first: each folder of `rlio/`, and each module of `rlio/` itself, has one rank and imports from lower
# ranks only. Folders inside a folder belong to it. CONTRIBUTING.md shows the same chain.
LAYERS: tuple[str, ...] = (
    "errors",
    "limits",
    "support",
    "batch",
    "mapping",
    "writer",
    "read_options",
    "reader",
    "schemas",  # rows <-> bytes
    "storage",  # bytes <-> a store
    "catalog",  # which rows are live
    "log",
    "source",  # what is stored: the contract, and rlio's own shards
    "query",  # which rows are read, and in which order
    "formats",
    "opening",
    "replay",
    "look",  # what is in it
    "writers",
    "readers",  # the engine
    "resolve",
    "dataset",
    "following",
    "maintenance",
    "conversion",
    "envs",
    "connectors",
    "policies",
    "evaluation",
    "sampling",
    "serving",
    "worker",
    "recording",
    "bridges",
    "torch",
    "checkpoint",
    "distributed",
    "integrations",
    "testing",
    "cli",
)
RANKS = {name: rank for rank, name in enumerate(LAYERS)}
# The version is a literal at the top of rlio/__init__.py: reading it is no step back.
VERSION = "rlio.__version__"


def modules_of(root: Path) -> dict[str, Path]:
    """Module name -> file, of a checkout; the symlinks in rlio/ are left out, their targets are in."""
    found = {}
    for folder, package in (
        ("rlio", "rlio"),
        ("readers", "rlio.readers"),
        ("writers", "rlio.writers"),
        ("schemas", "rlio.schemas"),
    ):
        for file in sorted((root / folder).rglob("*.py")):
            relative = file.relative_to(root / folder)
            if any(parent.is_symlink() for parent in file.parents if parent != root):
                continue
            parts = [package, *relative.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports_of(file: Path, known: frozenset[str]) -> tuple[tuple[int, str], ...]:
    """Line and name of each rlio module that a file imports at run time, or that a string in it names.

    The tests of this file parse each module once.
    """
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    # A look at each expression takes as long as parsing; few files have a string that begins so.
    strings = names_in_strings(tree, known) if re.search(r"[\"']rlio\.", text) else ()
    return (*imported(tree, known), *strings)


def imported(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each module that ``tree`` imports at run time."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield node.lineno, member if member in known or member == VERSION else str(node.module)


def names_in_strings(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each rlio module that a string names, alone or as ``module:object``.

    Left out is the registry of formats: the keywords of `rlio.formats.format.Format`.
    """
    registry = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Format"
        for value in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in registry:
            name, _, member = node.value.partition(":")
            if name in known and name != "rlio" and (member.isidentifier() or not member):
                yield node.lineno, name


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below ``tree``, those under ``if TYPE_CHECKING:`` excepted."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.If) and _is_for_types(node.test):
            for statement in node.orelse:
                yield statement
                yield from runtime_nodes(statement)
        else:
            yield node
            yield from runtime_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    return any(
        "TYPE_CHECKING" in (getattr(node, "id", None), getattr(node, "attr", None)) for node in ast.walk(test)
    )


def rank_of(module: str) -> int | None:
    """Rank of the folder of ``module``, or of the module of `rlio/` itself; None: it has none."""
    return RANKS.get(module.split(".")[1]) if "." in module else None


def steps_back(root: Path) -> list[str]:
    """Every import in the checkout that leads to a higher layer, or from or to a module that has no layer."""
    modules = modules_of(root)
    wrong = []
    for module, file in modules.items():
        own = rank_of(module)
        if module == "rlio":
            continue  # the facade imports nothing but names from everywhere, on use
        if own is None:
            wrong.append(f"{module} is in no layer: give it one in LAYERS")
            continue
        for line, target in imports_of(file, frozenset(modules)):
            if target.split(".")[0] != "rlio" or target == VERSION:
                continue
            # `import rlio` reaches every layer, so only the top may.
            rank = len(LAYERS) - 1 if target == "rlio" else rank_of(target)
            if rank is None or rank > own:
                wrong.append(f"{file.relative_to(root)}:{line}: {module} imports {target}")
    return wrong


def test_no_module_imports_from_a_layer_above_its_own(checkout: Path) -> None:
    assert steps_back(checkout) == []


def test_each_folder_has_one_rank(checkout: Path) -> None:
    folders = {module.split(".")[1] for module in modules_of(checkout) if module != "rlio"}
    assert sorted(LAYERS) == sorted(folders)


def test_the_guide_shows_the_chain(checkout: Path) -> None:
    text = (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chain = text.split("<!-- layers -->")[1].replace("`", "")
    assert tuple(name.strip(" .\n") for name in chain.replace("\n", " ").split("→")) == LAYERS


# They read stored rows through `rlio.source`, whatever stores them.
ENGINE = ("rlio.query", "rlio.replay", "rlio.look", "rlio.readers.cold_pass", "rlio.readers.group_source")
ENGINE += ("rlio.readers.stored_pass",)
LAYOUTS = ("rlio.catalog", "rlio.formats", "rlio.dataset", "rlio.source.shards", "rlio.source.json_shard")


def test_the_engine_knows_no_layout_of_stored_rows(checkout: Path) -> None:
    modules = modules_of(checkout)
    found = {
        (module, target)
        for module, file in modules.items()
        if module.startswith(ENGINE)
        for _, target in imports_of(file, frozenset(modules))
        if target.startswith(LAYOUTS)
    }
    assert found == {("rlio.query.order", "rlio.catalog.names")}  # What ids of writers mean.


def test_every_module_is_looked_at(checkout: Path) -> None:
    modules = modules_of(checkout)
    assert {"rlio", "rlio.batch.columns", "rlio.readers", "rlio.schemas", "rlio.cli.main"} <= set(modules)
    assert len(set(modules.values())) == len(modules)


PLANTED = {
    "at the top of a module": "from rlio.worker import RolloutWorker\n",
    "as a module": "import rlio.worker\n",
    "by the package's name": "from rlio import worker\n",
    "inside a function": "def f():\n    from rlio.worker import RolloutWorker\n",
    "inside a method under a condition": (
        "class A:\n    def f(self):\n        if self:\n            import rlio.worker as w\n"
    ),
    "through the facade": "import rlio\n",
    "by a string": 'PLACE = "rlio.worker:RolloutWorker"\n',
    "by a string in a call": 'def f():\n    return load("rlio.sampling.config")\n',
    "where types are not checked": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1\nelse:\n    import rlio.worker\n"
    ),
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_step_back_is_caught(tmp_path: Path, source: str) -> None:
    for folder in ("rlio/sampling", "readers"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "rlio" / "sampling" / "config.py").write_text("from rlio.readers import planted\n")
    (tmp_path / "rlio" / "worker.py").write_text("from rlio.readers import planted\n")
    (tmp_path / "readers" / "planted.py").write_text(source)
    (found,) = steps_back(tmp_path)
    assert found.startswith("readers/planted.py:")


def test_an_import_for_type_checkers_only_is_no_step_back(tmp_path: Path) -> None:
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "planted.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from rlio import __version__\n"
        "if TYPE_CHECKING:\n    from rlio.worker import RolloutWorker\n"
    )
    assert steps_back(tmp_path) == []


def test_a_module_without_a_layer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rlio").mkdir()
    (tmp_path / "rlio" / "novelty.py").write_text("")
    assert steps_back(tmp_path) == ["rlio.novelty is in no layer: give it one in LAYERS"]


def order_of(root: Path) -> list[str]:
    """The modules in an order in which each imports from earlier ones alone, inside functions too.

    Raises:
        CycleError: Some import each other in a circle; it names them.
    """
    modules = modules_of(root)
    names = frozenset(modules)
    graph = {
        module: {target for _, target in imports_of(file, names) if target in names - {module, "rlio"}}
        for module, file in modules.items()
        if module != "rlio"
    }
    return list(TopologicalSorter(graph).static_order())


def test_no_modules_import_each_other_in_a_circle(checkout: Path) -> None:
    assert "rlio.worker" in order_of(checkout)


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    (tmp_path / "rlio").mkdir()
    (tmp_path / "rlio" / "one.py").write_text("from rlio.two import x\n")
    (tmp_path / "rlio" / "two.py").write_text("def f():\n    from rlio.one import y\n")
    with pytest.raises(CycleError, match=r"rlio\.one"):
        order_of(tmp_path)
