"""Imports point one way: each module imports from its own layer and those below, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layers")  # What is parsed is kept.

# Lowest first. A package stands for all of its modules.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("rlio.errors", "rlio.limits"),
    ("rlio.support",),
    ("rlio.batch",),
    ("rlio.mapping", "rlio.readers.read_options", "rlio.writer"),
    ("rlio.reader",),
    ("rlio.schemas",),
    ("rlio.storage",),
    ("rlio.source",),
    (  # what is stored, by name
        "rlio.dataset.commit",
        "rlio.dataset.json_shard",
        "rlio.dataset.listing",
        "rlio.dataset.markers",
        "rlio.dataset.names",
        "rlio.dataset.rows",
        "rlio.dataset.schema_files",
        "rlio.dataset.shards",
        "rlio.following.marks",
    ),
    ("rlio.log",),
    ("rlio.dataset", "rlio.look", "rlio.formats.format", "rlio.replay", "rlio.following.samples_per_insert"),
    ("rlio.readers", "rlio.writers", "rlio.following", "rlio.formats", "rlio.log.recovery"),
    ("rlio.maintenance",),
    ("rlio.resolve",),
    ("rlio.formats.convert", "rlio.formats.episodes"),
    ("rlio.connectors", "rlio.envs", "rlio.policies", "rlio.sampling", "rlio.serving", "rlio.evaluation"),
    ("rlio.bridges", "rlio.checkpoint", "rlio.recording", "rlio.worker"),
    ("rlio.distributed", "rlio.integrations", "rlio.torch", "rlio.testing"),
    ("rlio.cli", "rlio.report"),
)
RANKS = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}
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
def parsed(file: Path) -> ast.Module:
    """The tests of this file parse each module once."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each rlio module that ``tree`` imports at run time."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield node.lineno, member if member in known or member == VERSION else str(node.module)


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
    """Layer of ``module`` or of the package around it."""
    while module:
        if module in RANKS:
            return RANKS[module]
        module = module.rpartition(".")[0]
    return None


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
        for line, target in imports_of(parsed(file), set(modules)):
            if target.split(".")[0] != "rlio" or target == VERSION:
                continue
            # `import rlio` reaches every layer, so only the top may.
            rank = len(LAYERS) - 1 if target == "rlio" else rank_of(target)
            if rank is None or rank > own:
                wrong.append(f"{file.relative_to(root)}:{line}: {module} imports {target}")
    return wrong


def test_no_module_imports_from_a_layer_above_its_own(checkout: Path) -> None:
    assert steps_back(checkout) == []


# They read stored rows through `rlio.source`. `rlio.replay.store` also opens data sets for users.
ENGINE = ("rlio.source", "rlio.replay", "rlio.readers.cold_pass", "rlio.readers.group_source")
ENGINE += ("rlio.readers.stored_pass",)


def test_the_engine_knows_no_layout_of_stored_rows(checkout: Path) -> None:
    modules = modules_of(checkout)
    found = {
        (module, target)
        for module, file in modules.items()
        if module.startswith(ENGINE)
        for _, target in imports_of(parsed(file), set(modules))
        if target.startswith(("rlio.dataset", "rlio.formats"))
    }
    assert found == {
        ("rlio.replay.order", "rlio.dataset.names"),  # What ids of writers mean.
        ("rlio.replay.store", "rlio.dataset.dataset"),
        ("rlio.replay.store", "rlio.dataset.opening"),
    }


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
    "where types are not checked": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1\nelse:\n    import rlio.worker\n"
    ),
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_step_back_is_caught(tmp_path: Path, source: str) -> None:
    for folder in ("rlio", "readers"):
        (tmp_path / folder).mkdir()
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
    known = set(modules) - {"rlio"}
    graph = {
        module: {target for _, target in imports_of(parsed(modules[module]), known) if target in known}
        for module in known
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
