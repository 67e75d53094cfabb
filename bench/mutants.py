"""Check that the tests notice faults: `make mutants` puts small ones into the core, one at a time, and runs its tests.

Every mutant (`bench/faults.py`) is a module with one fault. A process that has imported torch once forks for each,
imports the mutant in the module's place, and runs the module's tests, first those that reach the faulty line, until
one fails: the mutant is killed. What survives is shown, unless `equivalent_mutants.toml` says why no test could
notice. Nothing on disk is changed. The sample of `make mutants` takes 15 to 25 minutes on two cores, `--all` of them
about an hour; a mutant that runs three times as long as the tests without it, and ten seconds more, is killed too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from bench.faults import Mutant, mutants, mutated

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
CORE: dict[str, tuple[str, ...]] = {
    "shardwright.search.exact.eliminate": (
        "tests/search/exact/test_eliminate.py",
        "tests/search/exact/test_shared_tables.py",
    ),
    "shardwright.search.choices.reshard": ("tests/search/choices/test_reshard.py",),
    "shardwright.pcg.choice": ("tests/pcg/test_choice.py", "tests/pcg/test_inference.py", "tests/pcg/test_rows.py"),
    "shardwright.pcg.inference": ("tests/pcg/test_graph.py", "tests/pcg/test_inference.py", "tests/pcg/test_rows.py"),
    "shardwright.pcg.layout": ("tests/pcg/test_layout.py", "tests/pcg/test_types.py"),
    "shardwright.verifier.placement.typing": (
        "tests/verifier/placement/test_typing.py",
        "tests/verifier/placement/test_typing_at_sizes.py",
    ),
    "shardwright.substitutions.match": ("tests/substitutions/test_match.py", "tests/substitutions/test_rewrite.py"),
    "shardwright.lowering.runtime.reducer": ("tests/lowering/runtime/test_reducer.py",),
    "shardwright.pcg.moves": ("tests/pcg/test_moves.py", "tests/search/choices/test_reshard.py"),
    "shardwright.cost.collectives.moves": ("tests/cost/collectives/test_moves.py",),
    "shardwright.cost.timeline.clock": ("tests/cost/timeline/test_clock.py", "tests/cost/timeline/test_streams.py"),
}
"""Modules whose faults would be wrong plans or wrong training, and the tests that have to notice them."""
WARM = (
    "torch",
    "torch.distributed",
    "torch.export",
    "numpy",
    "networkx",
    "sympy",
    "z3",
    "scipy.optimize",
    "rich",
    "click",
)
"""Imported once, before the first fork: none of it imports anything of ours."""
SAMPLE = 300
ENOUGH = 0.95
MAX_BYTES = 12 << 30


@dataclass
class Baseline:
    """A module's tests without any fault: seconds in all, seconds of each, and which reach which line."""

    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    reaching: dict[int, set[str]] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        return 3 * self.wall_s + 10


@dataclass(frozen=True)
class Result:
    """The fate of a mutant, and the output of the tests."""

    mutant: Mutant
    killed: bool
    output: str


# ---- in a forked process ----


class _Faulty(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with a fault in it."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__(module, str(_path(module)))
        self.tree = tree

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.tree, self.path, "exec", dont_inherit=True)


class _Watch:
    """A pytest plugin: which tests reach which line of a file, and how long they take."""

    def __init__(self, path: Path) -> None:
        self.path, self.baseline, self.test, self.begin = str(path), Baseline(), "", 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test, self.begin = nodeid, time.perf_counter()
        sys.settrace(self._enter)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.baseline.seconds[nodeid] = time.perf_counter() - self.begin

    def _enter(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        return self._line if frame.f_code.co_filename.endswith(self.path) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        self.baseline.reaching.setdefault(frame.f_lineno, set()).add(self.test)
        return self._line


class _Order:
    """A pytest plugin: the tests that reach the faulty line first, the quickest of them at the front."""

    def __init__(self, baseline: Baseline, lines: range) -> None:
        self.seconds = baseline.seconds
        self.reaching = set[str]().union(*(baseline.reaching.get(line, set()) for line in lines))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: (item.nodeid not in self.reaching, self.seconds.get(item.nodeid, 0.0)))


def _pytest(tests: Sequence[str], plugin: object) -> int:
    import pytest
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", derandomize=True, database=None, phases=phases, deadline=None)
    settings.load_profile("mutants")
    quiet = ["-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"]
    options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *quiet]
    return int(pytest.main([*options, *tests], plugins=[plugin]))


@contextlib.contextmanager
def _forked(output: int) -> Generator[int]:
    """Fork. Yield 0 in the child, whose process ends with the block, and the child's process id in the parent."""
    sys.stdout.flush()
    if pid := os.fork():
        yield pid
        return
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
        yield 0
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        os._exit(code)


# ---- in the parent ----


def baseline(module: str, tests: Sequence[str]) -> Baseline:
    """Run a module's tests as they are, once to see what they reach and once for the time."""
    found = Baseline()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "watched"
        for watch in (True, False):
            begin = time.perf_counter()
            with (Path(folder) / "output").open("w+b") as output:
                with _forked(output.fileno()) as pid:
                    if not pid:
                        plugin = _Watch(_path(module).relative_to(ROOT))
                        code = _pytest(tests, plugin if watch else object())
                        if watch:
                            report.write_bytes(pickle.dumps(plugin.baseline))
                        sys.exit(code)
                _, status = os.waitpid(pid, 0)
                if status:
                    output.seek(0)
                    raise SystemExit(f"{module}: its tests fail without any fault\n{output.read().decode()}")
            if watch:
                found = pickle.loads(report.read_bytes())
            found.wall_s = time.perf_counter() - begin
    return found


class _Trial:
    """One mutant's tests in a process of their own."""

    def __init__(self, mutant: Mutant, known: Baseline) -> None:
        self.mutant, self.deadline = mutant, time.monotonic() + known.limit_s
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `result`
        source = _source(mutant.module)
        lines = _lines(source, mutant.line)
        with _forked(self.output.fileno()) as pid:
            if not pid:
                sys.meta_path.insert(0, _Faulty(mutant.module, mutated(source, mutant.edit)))
                sys.exit(_pytest(CORE[mutant.module], _Order(known, lines)))
        self.pid = pid

    def result(self) -> Result | None:
        """Return the fate of the mutant, or None as long as it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() < self.deadline:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # it, and what it started
        if not pid:
            os.waitpid(self.pid, 0)
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        return Result(self.mutant, not pid or status != 0, text)


def trials(chosen: Sequence[Mutant], known: Mapping[str, Baseline], num_jobs: int) -> Iterator[Result]:
    """Every mutant's result, as they come."""
    pending, running = list(reversed(chosen)), list[_Trial]()
    while pending or running:
        while pending and len(running) < num_jobs:
            mutant = pending.pop()
            running.append(_Trial(mutant, known[mutant.module]))
        time.sleep(0.02)
        for trial in list(running):
            if (result := trial.result()) is not None:
                running.remove(trial)
                yield result


@cache
def _source(module: str) -> str:
    """Return a module's source when the run began: an edit is a place in this text."""
    return _path(module).read_text()


def _path(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def _lines(source: str, line: int) -> range:
    """The lines of the statement that begins at one: of its head, where it holds others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno == line:
            body = getattr(node, "body", None)
            return range(line, max(line, body[0].lineno - 1) + 1 if body else (node.end_lineno or line) + 1)
    return range(line, line + 1)


# ---- the command ----


def every_mutant(modules: Sequence[str]) -> list[Mutant]:
    """All mutants of some modules of the core."""
    return [mutant for module in modules for mutant in mutants(module, _source(module))]


def equivalent() -> dict[tuple[str, str, str, str], str]:
    """The mutants that do the same as the code, as far as anybody could care, and why."""
    listed = tomllib.loads(EQUIVALENT.read_text()).items()
    return {(m, e["within"], e["before"], e["after"]): e["why"] for m, entries in listed for e in entries}


def shown(mutant: Mutant) -> str:
    """Show the place of the fault, and the lines before and after."""
    path = _path(mutant.module).relative_to(ROOT / "shardwright")
    start = _common(mutant.before, mutant.after)
    end = _common(mutant.before[start:][::-1], mutant.after[start:][::-1])
    before, after = (_around(text, start, len(text) - end) for text in (mutant.before, mutant.after))
    return f"{path}:{mutant.line} {mutant.within}\n    - {before}\n    + {after}"


def _common(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, start: int, end: int, width: int = 80) -> str:
    """Return the text between two places and some characters around it, on one line."""
    left, right = max(0, start - width), min(len(text), end + width)
    return ("…" if left else "") + " ".join(text[left:right].split()) + ("…" if right < len(text) else "")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    modules = [m for m in CORE if any(name in m for name in options.module)] if options.module else list(CORE)
    if not modules:
        raise SystemExit(f"no module of the core is called {options.module}; there are {', '.join(CORE)}")
    found, excused = every_mutant(modules), equivalent()
    if stale := [key for key in excused if key[0] in modules and key not in {m.key for m in found}]:
        print("\n".join(f"{EQUIVALENT.name}: no such mutant any more: {key}" for key in stale))
    candidates = [m for m in found if options.line in (None, m.line)]
    chosen = candidates
    if not options.all and len(candidates) > options.sample:
        chosen = sorted(random.Random(options.seed).sample(candidates, options.sample), key=candidates.index)
    if options.list:
        print("\n".join(map(shown, chosen)), f"\n{len(chosen)} of {len(found)} mutants")
        return 0
    for name in WARM:
        importlib.import_module(name)
    tested = [m for m in chosen if m.key not in excused]
    known: dict[str, Baseline] = {}
    for module in dict.fromkeys(m.module for m in tested):
        known[module] = baseline(module, CORE[module])
        print(f"{module}: {len(known[module].seconds)} tests in {known[module].wall_s:.1f} s", flush=True)
    results: list[Result] = []
    begin = time.monotonic()
    for result in trials(tested, known, options.jobs):
        results.append(result)
        if not result.killed:
            print(f"survived: {shown(result.mutant)}", flush=True)
        if options.verbose:
            last = (result.output.strip().splitlines() or [""])[-1]
            print(f"{'killed  ' if result.killed else 'survived'} {shown(result.mutant)}\n    {last}", flush=True)
        elif len(results) % 50 == 0:
            print(f"{len(results)} of {len(tested)} mutants in {time.monotonic() - begin:.0f} s", flush=True)
    return _report(modules, chosen, results)


def _report(modules: Sequence[str], chosen: Sequence[Mutant], results: Sequence[Result]) -> int:
    print(f"\n{'module':<42}{'mutants':>8}{'killed':>8}{'survived':>10}{'equivalent':>12}{'killed of the rest':>20}")
    for name in (*modules, "all"):
        num = sum(name in (m.module, "all") for m in chosen)
        tried = [r for r in results if name in (r.mutant.module, "all")]
        killed = sum(r.killed for r in tried)
        share = f"{killed / len(tried):.1%}" if tried else "-"
        print(f"{name:<42}{num:>8}{killed:>8}{len(tried) - killed:>10}{num - len(tried):>12}{share:>20}")
    return int(sum(r.killed for r in results) < ENOUGH * len(results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--module", action="append", default=[], help="only this module of the core, e.g. eliminate")
    parser.add_argument("--line", type=int, help="only the mutants of this line")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"so many mutants at most ({SAMPLE})")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--verbose", action="store_true", help="say of every mutant what killed it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
