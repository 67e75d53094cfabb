"""Docstrings of the product and of the benchmarks begin with a sentence or a name, not with a fragment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pcg", "substitutions", "verifier", "search", "cost", "lowering", "shardwright", "bench")
WORDS = (
    "As Beside But By From How In Into Of On Than That Those What When Where Whether Which Who Whose Why With Without"
)
FRAGMENT = re.compile(rf"(?:{'|'.join(WORDS.split())})\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(folder: str) -> Iterator[Path]:
    """Yield the folder's own Python files. In `shardwright`, the other folders are links."""
    links = tuple(path for path in (ROOT / folder).iterdir() if path.is_symlink())
    return (path for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(link) for link in links))


def fragments(source: str) -> list[tuple[int, str]]:
    """Return line and text of each docstring that begins with a fragment."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [(node.body[0].lineno, ast.get_docstring(node) or "") for node in nodes if node.body]
    return [(line, text.split("\n")[0]) for line, text in texts if FRAGMENT.match(text)]


def test_a_fragment_is_noticed() -> None:
    source = '''
def rate(x):
    """Of a link, in bytes per second."""

class Link:
    """Where bytes pass."""

    def rate(self):
        """Whatever the rate is, return it."""
'''
    assert fragments(source) == [(3, "Of a link, in bytes per second."), (6, "Where bytes pass.")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_fragment(folder: str) -> None:
    files = list(sources(folder))
    assert files
    bad = [(path.relative_to(ROOT), *one) for path in files for one in fragments(path.read_text(encoding="utf-8"))]
    assert not bad
