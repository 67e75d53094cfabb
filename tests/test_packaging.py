"""The import name, the links behind it, what an installation carries, and the pinned versions."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import shardwright
from shardwright.cli.examining import LEAST_PYTHON
from shardwright.pcg.versions import TESTED, release
from tests.each import each

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pcg", "substitutions", "verifier", "search", "cost", "lowering")
# What the command line and `import shardwright` must not pay for: each takes a good part of a second.
HEAVY = ("torch", "transformers", "z3", "sympy", "networkx", "scipy")


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement_name(requirement: str) -> str:
    """`pyright[nodejs]>=1.1.400` -> `pyright`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def newest() -> dict[str, str]:
    """What `make newest` installs."""
    return pins() | pins("constraints-newest.txt")


def bounds(requirement: str) -> tuple[str, str]:
    """`torch>=2.13,<2.15` -> ("2.13", "2.15"); "" where there is no upper one."""
    found = re.fullmatch(r"[^<>=]+>=([0-9.]+)(?:,<([0-9.]+))?", requirement)
    assert found, requirement
    return found[1], found[2] or ""


def test_the_tested_versions_are_the_same_everywhere() -> None:
    assert [release(TESTED[0]), release(TESTED[-1])] == [release(pins()["torch"]), release(newest()["torch"])]
    (torch,) = (r for r in pyproject()["project"]["dependencies"] if requirement_name(r) == "torch")
    major, minor = release(TESTED[-1])
    assert bounds(torch) == (TESTED[0], f"{major}.{minor + 1}")
    assert pyproject()["project"]["requires-python"] == f">={'.'.join(map(str, LEAST_PYTHON))}"


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter that knows this checkout and nothing else of ours."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def python_files() -> list[Path]:
    """Every Python file of the project, once."""
    homes = (*FOLDERS, "tests", "examples", "bench")
    own = [path for home in homes for path in (ROOT / home).rglob("*.py")]
    own += [path for path in (ROOT / "shardwright").rglob("*.py") if not reached_by_link(path)]
    return sorted(own)


def reached_by_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT and parent.is_relative_to(ROOT))


def imported_names(source: str) -> set[str]:
    """The top-level names that a module imports; relative imports count as `.`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").split(".")[0])
    return names


# ---------------------------------------------------------------------------------------------------- the import name


@each("folder", FOLDERS)
def test_folder_is_linked_relatively(folder: str) -> None:
    link = ROOT / "shardwright" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder


def test_nothing_else_is_linked() -> None:
    assert {path.name for path in (ROOT / "shardwright").iterdir() if path.is_symlink()} == set(FOLDERS)


@each("folder", FOLDERS)
def test_folder_imports_under_the_import_name(folder: str) -> None:
    module = importlib.import_module(f"shardwright.{folder}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / folder / "__init__.py"
    assert module.__doc__, f"{folder}/__init__.py says what belongs there and who may import it"


def test_folder_init_holds_a_docstring_only() -> None:
    for folder in FOLDERS:
        body = ast.parse((ROOT / folder / "__init__.py").read_text()).body
        assert [type(statement) for statement in body] == [ast.Expr], folder


def test_no_module_is_imported_by_its_bare_name() -> None:
    offenders = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in python_files()
        if (found := imported_names(path.read_text()) & {*FOLDERS, "."})
    }
    assert not offenders, f"these load a second copy; import from shardwright.<folder>: {offenders}"


def test_bare_names_are_banned_in_lint() -> None:
    banned = pyproject()["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(FOLDERS)


def test_imported_names_sees_every_form() -> None:
    source = "import pcg.graph\nfrom cost import x\nfrom . import y\nimport shardwright.search as s"
    assert imported_names(source) == {"pcg", "cost", ".", "shardwright"}


# ----------------------------------------------------------------------------------------------------- cheap to import


def test_import_is_cheap() -> None:
    """What `compile` needs with a given plan is loaded without looking for garbage, and no more than that."""
    ours = ("search.tree.planner", "search.exact.eliminate", "cost.predict", "verifier.judge", "checking", "reports")
    late = "torch._dynamo", "z3", "transformers", *(f"shardwright.{name}" for name in ours)
    code = (
        "import gc, sys, torch, shardwright\n"
        "gc.collect(); phases = []; gc.callbacks.append(lambda phase, _: phases.append(phase))\n"
        "shardwright.compile\n"
        f"print(len(phases), gc.isenabled(), [name for name in {late} if name in sys.modules])"
    )
    light = f"import shardwright, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(light).strip() == "[]"
    num, enabled, late = run_python(code).split(maxsplit=2)
    assert (int(num) < 20, enabled, late.strip()) == (True, "True", "[]")


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(shardwright.__all__) <= set(dir(shardwright))


@each("name", [name for name in shardwright.__all__ if name != "__version__"])
def test_public_name_loads_from_its_module(name: str) -> None:
    home = importlib.import_module(shardwright._EXPORTS[name])
    assert getattr(shardwright, name) is getattr(home, name)


def test_export_table_matches_all() -> None:
    assert {*shardwright._EXPORTS, "__version__"} == set(shardwright.__all__)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'comple'"):
        getattr(shardwright, "comple")  # noqa: B009


# ----------------------------------------------------------------------------------------------------- what is shipped


def test_version_has_one_value() -> None:
    assert pyproject()["project"]["version"] == shardwright.__version__


def test_every_package_is_shipped() -> None:
    """A new folder below one of ours needs a line in pyproject.toml, or wheels would lack it."""
    setuptools = pyproject()["tool"]["setuptools"]
    homes = {path.parent.relative_to(ROOT) for path in python_files()}
    ours = {home for home in homes if home.parts[0] in (*FOLDERS, "shardwright")}
    names = {".".join(home.parts if home.parts[0] == "shardwright" else ("shardwright", *home.parts)) for home in ours}
    assert names == set(setuptools["packages"])
    assert setuptools["package-dir"] == {"shardwright": "shardwright"} | {f"shardwright.{f}": f for f in FOLDERS}


def test_every_module_is_on_the_map_of_its_folder() -> None:
    """The docstring of a folder's `__init__` says in a few words what each file is."""
    maps = [path for path in python_files() if path.name == "__init__.py"]
    assert len(maps) > 30
    for path in maps:
        words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text())) or ""))
        rooms = {other.stem for other in path.parent.glob("*.py")} - {"__init__"}
        assert rooms <= words, f"{path.relative_to(ROOT)} does not name {sorted(rooms - words)}"


def test_every_data_file_is_shipped() -> None:
    patterns = pyproject()["tool"]["setuptools"]["package-data"]["*"]
    files = [path for folder in (*FOLDERS, "shardwright") for path in (ROOT / folder).rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc")]
    missing = [str(path.relative_to(ROOT)) for path in data if not any(fnmatch(path.name, p) for p in patterns)]
    assert not missing, f"no pattern of [tool.setuptools.package-data] matches {missing}"


def test_types_are_shipped() -> None:
    assert (ROOT / "shardwright" / "py.typed").is_file()


def test_command_is_declared() -> None:
    assert pyproject()["project"]["scripts"] == {"shardwright": "shardwright.__main__:main"}


# ------------------------------------------------------------------------------------------------------ tested versions


def test_every_direct_dependency_is_pinned() -> None:
    project = pyproject()["project"]
    direct = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    missing = {requirement_name(requirement) for requirement in direct} - set(pins())
    assert not missing, f"constraints.txt does not pin {sorted(missing)}"


def test_pins_satisfy_what_is_required() -> None:
    project = pyproject()["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        lowest, bound = bounds(requirement)
        for pinned in (pins()[requirement_name(requirement)], newest()[requirement_name(requirement)]):
            assert version_key(pinned) >= version_key(lowest), requirement
            assert not bound or version_key(pinned) < version_key(bound), requirement


def test_pins_are_exact_and_for_every_build() -> None:
    """A local suffix such as +cpu would shut out machines with another build of torch."""
    for name, version in [*pins().items(), *newest().items()]:
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)*(\.post[0-9]+)?", version), f"{name}=={version}"


def test_pins_are_the_only_ones() -> None:
    project = pyproject()["project"]
    direct = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert not [requirement for requirement in direct if "==" in requirement]
