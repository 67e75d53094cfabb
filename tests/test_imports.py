"""No module of the product imports one that imports it back, not even inside a function or for its types."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
FOLDERS = ("pcg", "substitutions", "verifier", "search", "cost", "lowering")


def modules() -> dict[str, Path]:
    """Every module of the product under its import name, with its file."""
    own = (p for p in (ROOT / "shardwright").rglob("*.py") if p.relative_to(ROOT).parts[1] not in FOLDERS)
    files = {p.relative_to(ROOT): p for p in own}
    files |= {Path("shardwright", p.relative_to(ROOT)): p for f in FOLDERS for p in (ROOT / f).rglob("*.py")}
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): file for path, file in files.items()}


def imported(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """The known modules that a source names, wherever it imports them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = parts & known.keys()
            yield from inside
            if parts - inside and node.module in known:  # names, not modules, of a package
                yield node.module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that lead to each other."""
    edges = [(name, other) for name, others in graph.items() for other in others]
    found = nx.strongly_connected_components(nx.DiGraph(edges))
    return sorted(sorted(group) for group in found if len(group) > 1)


def test_imports_do_not_go_in_circles() -> None:
    files = modules()
    graph = {name: set(imported(file.read_text(), files)) - {name} for name, file in files.items()}
    assert len(graph) > 150
    assert circles(graph) == []


def test_circles_are_seen_wherever_imports_stand() -> None:
    known = {"shardwright.a": 0, "shardwright.b": 0, "shardwright.c": 0}
    late = "def f():\n    from shardwright.b import g\n"
    typing = "if TYPE_CHECKING:\n    from shardwright import a\n"
    graph = {"shardwright.a": set(imported(late, known)), "shardwright.b": set(imported(typing, known))}
    assert graph == {"shardwright.a": {"shardwright.b"}, "shardwright.b": {"shardwright.a"}}
    assert circles(graph) == [["shardwright.a", "shardwright.b"]]
    assert list(imported("import shardwright.c", known)) == ["shardwright.c"]
