"""The driver of generator and prover: deterministic, resumable, and nothing uncertified in the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import generation, resuming
from shardwright.generation import Settings, generate, line
from shardwright.pcg.errors import RuleError
from shardwright.resuming import FinishedContext, Unfinished, unfinished
from shardwright.substitutions.generator.sources import ContextSource, restricted, sources
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier import store
from shardwright.verifier.catalogue import Catalogue
from shardwright.verifier.choices import Certified
from shardwright.verifier.judge import RuleVerdict
from shardwright.verifier.rulefile import read_rules
from shardwright.verifier.store import Verdicts
from tests.each import in_whole_grids
from tests.shardwright.fakes import FakeContext

pytestmark = pytest.mark.usefixtures("forked_workers")

FAKE = "tests.shardwright.fakes:generate"
RULES = {"one": ("linear_of_sum", "neg_of_neg", "add_commutes"), "two": ("neg_of_neg", "mul_commutes"), "none": ()}


def contexts(tmp_path: Path, **deaths: int) -> list[ContextSource]:
    log = str(tmp_path / "log")
    return [
        ContextSource("fake", FAKE, FakeContext(name, ("linear", "relu(dim=1)"), rules, log, deaths.get(name, 0)))
        for name, rules in RULES.items()
    ]


def asked(tmp_path: Path) -> list[str]:
    """The contexts that were enumerated, in no order."""
    return sorted((tmp_path / "log").read_text().splitlines())


def run(path: Path, given: Sequence[ContextSource], jobs: int = 1) -> tuple[generation.Generated, list[str]]:
    told: list[str] = []
    return generate(path, Settings(2, 7), jobs, told.append, given), told


def test_certified_rules_are_written_once_with_their_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SHIPPED_PROOFS", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rules.json"
    found, _ = run(path, contexts(tmp_path))
    names = {"linear_of_sum", "neg_of_neg", "add_commutes", "mul_commutes"}
    written = Catalogue.load(path)
    assert {rule.name for rule in written.rules.values()} == names
    assert set(Verdicts.here()) == {CATALOGUE[name].hash for name in names}, "what was proven is kept"
    assert "certificate" not in path.read_text()
    counts = {"graphs": 60, "fingerprints": 15, "candidates": 4, "certified": 4, "refuted": 0, "unknown": 0}
    assert found.counts == {**counts, "minimal": 4}
    assert written.generator["counts"] == found.counts
    assert (written.generator["max_ops"], written.generator["seed"]) == (2, 7)
    assert written.generator["contexts"] == ["fake-one", "fake-two", "fake-none"]
    assert not read_rules(path).malformed
    assert not (tmp_path / "rules.json.partial").exists()


def test_what_the_search_needs_is_written_along(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    found = generate(path, Settings(2, 7, whole=True), 1, lambda text: None, contexts(tmp_path))
    written = {rule.name: rule for rule in Catalogue.load(path).rules.values()}
    base = Catalogue.load()
    shipped = [key for key in base if base.json(key)["form"] in ("row", "steps")]
    assert found.counts["certified"] == 4
    assert found.counts["rows and steps"] == len(shipped)
    assert len(written) == 4 + found.counts["named"] + found.counts["rows and steps"]
    assert {"fuse_three_linears", "cross_entropy_in_parts"} <= set(written)
    certified = Certified.of_file(path)
    assert certified.only == {"row", "steps", "equation"}
    assert set(certified.equations()) >= {CATALOGUE["fuse_three_linears"]}


def test_the_search_tries_what_is_fused(tmp_path: Path) -> None:
    """Rules of one root that say the same of both its roots do not take a fusion out of the search."""
    told = ("fuse_two_linears", "concat_of_linears", "slice_of_linear", "first_slice_of_concat", "last_slice_of_concat")
    log = str(tmp_path / "log")
    source = ContextSource("fake", FAKE, FakeContext("fused", ("linear",), told, log, 0))
    path = tmp_path / "rules.json"
    generate(path, Settings(2, 7, whole=True), 1, lambda text: None, [source])
    assert Certified.of_file(path).equations().count(CATALOGUE["fuse_two_linears"]) == 1


@in_whole_grids
@pytest.mark.usefixtures("fresh_workers")
def test_the_number_of_jobs_does_not_matter(tmp_path: Path) -> None:
    for jobs in (1, 2):
        run(tmp_path / f"{jobs}.json", contexts(tmp_path), jobs)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


class Stopped(Exception):  # noqa: N818
    """Ctrl-C."""


def stop_after(path: Path, given: Sequence[ContextSource], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Generate until this many contexts are kept."""
    save = Unfinished.save

    def saved(kept: Unfinished, name: str, found: FinishedContext) -> None:
        save(kept, name, found)
        if len(list(kept.folder.glob("fake-*"))) == number:
            raise Stopped

    monkeypatch.setattr(Unfinished, "save", saved)
    with pytest.raises(Stopped):
        run(path, given, 1)
    monkeypatch.setattr(Unfinished, "save", save)


def test_finished_contexts_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "rules.json", tmp_path / "other.json"
    stop_after(path, contexts(tmp_path), monkeypatch, 2)
    assert not path.exists()
    kept = len(asked(tmp_path))
    _, told = run(path, contexts(tmp_path))
    assert "2 of 3 contexts are kept from the last run" in told
    assert len(asked(tmp_path)) == kept + 1
    run(other, contexts(tmp_path))
    assert path.read_bytes() == other.read_bytes()


def test_what_an_unfinished_run_left_is_written_and_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.json"
    stop_after(path, contexts(tmp_path), monkeypatch, 2)
    for left in path.with_name("rules.json.partial").glob("fake-*"):
        left.write_text(left.read_text().replace("neg(neg(x))", "neg(abs(x))"))
    run(path, contexts(tmp_path))
    assert "neg(abs(x))" in path.read_text()
    told: list[str] = []
    assert "neg_of_neg" not in Certified.of_file(path, told.append).by_name()
    assert any("'neg_of_neg': neg_of_neg is false for " in text for text in told)


@pytest.mark.parametrize("damage", ["arguments", "code", "torn"])
def test_what_is_kept_is_used_only_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    path = tmp_path / "rules.json"
    stop_after(path, contexts(tmp_path), monkeypatch, 3)
    before = len(asked(tmp_path))
    settings, told, anew = Settings(2, 7), list[str](), 3
    if damage == "arguments":
        settings = Settings(3, 7)
    elif damage == "code":
        monkeypatch.setattr(resuming, "code_digest", lambda: "another")
    else:
        file = tmp_path / "rules.json.partial" / "fake-one.json"
        file.write_text(file.read_text()[:100])
        anew = 1
    generate(path, settings, 1, told.append, contexts(tmp_path))
    assert len(asked(tmp_path)) == before + anew
    assert any("starting anew" in text for text in told) == (damage != "torn")


def test_a_worker_that_dies_is_asked_again_once(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    found, _ = run(path, contexts(tmp_path, one=1))
    assert found.counts["certified"] == 4
    (tmp_path / "log").unlink()
    with pytest.raises(
        RuleError, match=r"generating fake-two with 2 operators ended its process 2 times \(signal SIGKILL\)"
    ):
        run(tmp_path / "new.json", contexts(tmp_path, two=9))
    assert (tmp_path / "new.json.partial").exists()


def test_what_is_not_proven_is_left_out_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rules.json"
    monkeypatch.setattr(generation, "judging_calls", lambda keys, rules, limit_s, jobs, explain: [
        generation.Call("tests.shardwright.fakes:doubt", (list(rules), limit_s, False), ("judge", tuple(keys)))
    ] if rules else [])  # fmt: skip
    found, _ = run(path, contexts(tmp_path))
    assert found.counts["unknown"] == 4
    written = Catalogue.load(path)
    assert not len(written)
    assert {"equation": CATALOGUE["neg_of_neg"].equation, "reason": "too hard"} in written.generator["unknown"]
    report = str(found)
    assert report.startswith(f"{path}: 0 rules in ")
    assert "unknown (4): too hard" in report
    assert len(found.data()["rejected"]) == 4


def test_counterexamples_are_counted_by_the_operators_of_their_rules(tmp_path: Path) -> None:
    found, _ = run(tmp_path / "rules.json", [])
    names = ("neg_of_neg", "neg_of_neg", "permute_of_permute")
    verdicts = [RuleVerdict("refuted", reason=f"{name} is false for n = {i}") for i, name in enumerate(names)]
    rejected = tuple(zip([CATALOGUE[name] for name in names], verdicts, strict=True))
    assert replace(found, rejected=rejected).reasons() == {
        ("refuted", "a counterexample to a rule of neg"): 2,
        ("refuted", "a counterexample to a rule of permute"): 1,
    }


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rules.json.partial"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(RuleError, match="this folder is not ours, and unfinished work is kept there; move it away"):
        run(tmp_path / "rules.json", [])
    assert (folder / "thesis.txt").exists()


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuleError, match=r"cannot keep unfinished work there \(Not a directory\); check the path"):
        run(tmp_path / "file" / "rules.json", [])


@pytest.mark.parametrize("max_ops", [2, 3])
def test_two_runs_do_not_write_one_file(tmp_path: Path, max_ops: int) -> None:
    """Nor does a run of other arguments throw away what the other one keeps."""
    path = tmp_path / "rules.json"
    with unfinished(path, generation._arguments(Settings(max_ops, 7), []), lambda text: None) as kept:
        kept.save("one", FinishedContext([], {}))
        with pytest.raises(RuleError, match=r"rules.json: another run is generating this file"):
            run(path, [])
        assert kept.load("one") == FinishedContext([], {})


def test_operators_restrict_the_contexts(tmp_path: Path) -> None:
    found = restricted(contexts(tmp_path), ["relu"])
    assert [source.context.operators for source in found] == [("relu(dim=1)",)] * 3
    with pytest.raises(RuleError, match="operators: 'lstm' is not generated; choose among linear, relu"):
        restricted(contexts(tmp_path), ["linear", "lstm"])


def test_operators_are_chosen_by_row_in_contexts_of_both_kinds() -> None:
    found = sources(["permute"])
    assert {source.kind for source in found} == {"serial", "placement"}
    applied = {op for source in found for op in source.context.operators}
    assert "transpose" in applied
    assert all(op == "transpose" or op.startswith("permute(") for op in applied)


def test_the_contexts_of_the_generator_have_names_of_their_own() -> None:
    found = sources()
    assert len({source.name for source in found}) == len(found)
    assert {"placement"} <= {source.kind for source in found}


def test_counts_are_one_line() -> None:
    assert line({"graphs": 12, "certified": 3, "other": 1}) == "12 graphs, 3 certified"


def test_rules_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, two = CATALOGUE["add_commutes"], CATALOGUE["mul_commutes"].converse("add_commutes")
    assert [rule.name for rule in generation._named([one, two]).values()] == [
        f"add_commutes_{one.hash[:8]}", f"add_commutes_{two.hash[:8]}",
    ]  # fmt: skip


def test_what_is_kept_of_a_context_is_read_as_it_was(tmp_path: Path) -> None:
    run(tmp_path / "rules.json", contexts(tmp_path))
    found = FinishedContext(
        [(rule, generation.RuleVerdict("refuted", None, "because", "n > 1", 0.5)) for rule in CATALOGUE.values()],
        {"graphs": 3},
    )
    kept = Unfinished(tmp_path)
    kept.save("kept", found)
    assert kept.load("kept") == found
    assert kept.load("another") is None
    assert json.loads((tmp_path / "kept.json").read_text())["counts"] == {"graphs": 3}
