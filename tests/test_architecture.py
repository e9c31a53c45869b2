"""What import contracts cannot say: who may import NIXL, and that each package explains itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcourier

SOURCE = Path(kvcourier.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# The only files that may import these packages; everything else asks them.
OWNERS = {
    "nixl": {"transport/nixl.py"},
    "nixl_cu12": set(),
    "nixl_cu13": set(),
}
# They draw conclusions from events and times that they are given; a clock of their own, a thread
# or a draw of chance would make them untestable.
PURE_FOLDERS = ("core", "layout")
IMPURE_CALLS = {"open", "input", "exec", "eval", "__import__"}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named by an import, or as a literal in importlib.import_module(...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            literal = node.args[0]
            if called in ("import_module", "__import__") and isinstance(literal, ast.Constant):
                yield str(literal.value)


def owners_violated(name: str, tree: ast.AST) -> list[str]:
    roots = {module.partition(".")[0] for module in imports(tree)}
    return sorted(root for root in roots & OWNERS.keys() if name not in OWNERS[root])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_owner_imports_a_package(path: Path) -> None:
    assert owners_violated(name_of(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import nixl",
        "import os, nixl._api as api",
        "from nixl._api import nixl_agent",
        "from importlib import import_module\nimport_module('nixl._api')",
        "if True:\n    def f():\n        import nixl_cu12",
    ],
)
def test_a_forbidden_import_would_be_found(line: str) -> None:
    assert owners_violated("engine/engine.py", ast.parse(line)) != []


@pytest.mark.parametrize(
    "path", [path for path in FILES if name_of(path).split("/")[0] in PURE_FOLDERS], ids=name_of
)
def test_pure_packages_touch_nothing_outside(path: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls & IMPURE_CALLS == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
