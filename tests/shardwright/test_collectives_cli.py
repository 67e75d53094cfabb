"""`shardwright collectives`: networks listed, schedules built, checked, shown, exported; a status for each finding."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.each import each, in_whole_grids
from tests.shardwright.command import Run

COMMANDS = ["", "topologies", "build", "synthesize", "check", "cost", "run", "show", "export"]
pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.fixture(name="in_tmp")
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def built(run: Run, *more: str, name: str = "ring.json") -> str:
    status, _, error = run("collectives", "build", "ring", "all_reduce", "--ranks", "4", "-o", name, *more)
    assert (status, error) == (0, "")
    return name


@each("command", COMMANDS)
def test_every_command_has_help_with_examples(run: Run, command: str) -> None:
    status, out, _ = run("collectives", *filter(None, [command]), "--help")
    assert status == 0
    assert f"  shardwright collectives {command or 'build'}" in out


def test_the_examples_of_help_work_in_their_order(run: Run) -> None:
    lines = [
        line
        for command in ("", "cost")
        for line in run("collectives", *filter(None, [command]), "--help")[1].splitlines()
    ]
    examples = [line.split()[1:] for line in lines if line.startswith("    shardwright ")]
    assert len(examples) > 7
    for example in examples:
        if "mesh:6x6" not in example and example[1] != "run":  # slow, and tested for themselves
            assert (example, run(*example)[0]) == (example, 0)


def test_topologies(run: Run) -> None:
    status, out, _ = run("collectives", "topologies")
    assert status == 0
    assert "dgx1" in out
    assert "halving-doubling  2, 4, 8, … ranks" in out
    assert "family proven for all sizes" in out
    status, out, _ = run("collectives", "topologies", "ndv2", "-o", "ndv2.json")
    assert "9.524 GB/s" in out
    assert "NIC of rank 8 in" in out
    assert run("collectives", "topologies", "ndv2.json")[1] == out
    assert "2 ranks" in run("collectives", "topologies", "cluster:local:2")[1]
    data = json.loads(run("collectives", "topologies", "ring:3", "--format", "json")[1])
    assert len(data["links"]) == 6
    assert {"topologies", "builders"} == json.loads(run("collectives", "topologies", "--format", "json")[1]).keys()


def test_build_check_show_export(run: Run) -> None:
    ring = built(run, "--topology", "ring:4")
    status, out, _ = run("collectives", "check", ring, "--topology", "ring:4")
    assert status == 0
    assert out.startswith("ring.json: schedule, certified\n  ring all_reduce 4: all_reduce of 4 ranks in 6 steps\n")
    status, out, _ = run("collectives", "show", ring, "--topology", "ring:4", "--steps", "1")
    assert status == 0
    assert "  0 → 1  +3" in out
    assert "links are used 50% of the step on average; 4 of 8 are idle" in out
    assert "step 1" not in out
    assert "████" in run("collectives", "show", ring)[1]
    for more in ([], ["--in-place", "--channels", "2"]):
        assert run("collectives", "export", ring, "-o", "ring.xml", *more)[0] == 0
        status, out, _ = run("collectives", "check", "ring.xml")
        assert (status, "ring.xml: MSCCL program, certified" in out) == (0, True)
    assert "block" in run("collectives", "show", "ring.xml", "--steps", "1")[1]
    assert run("collectives", "export", "ring.xml")[1] == Path("ring.xml").read_text()


def test_links_as_the_driver_shows_them(run: Run) -> None:
    Path("topo.txt").write_text("GPU0 X NV2 SYS\nGPU1 NV2 X SYS\nGPU2 SYS SYS X\n")
    status, out, _ = run("collectives", "topologies", "wired:topo.txt:V100-32:2")
    assert (status, "2 × 3 V100-32: 6 ranks" in out, "PCIe root of GPU 0 0" in out) == (0, True, True)
    for wrong in (
        "wired:topo.txt",
        "wired:topo.txt:V100-32:\u0662",
        f"wired:topo.txt:V100-32:{5000 * chr(57)}",
        "wired::V100-32",
    ):
        assert "expected wired:FILE:GPU[:NODES]" in run("collectives", "topologies", wrong)[2]


@each("command", ["check", "show"])
def test_data_for_programs(run: Run, command: str) -> None:
    ring = built(run)
    data = json.loads(run("collectives", command, ring, "--format", "json")[1])
    assert data["certified"] if command == "check" else len(data["steps"]) == 6
    run("collectives", "export", ring, "-o", "ring.xml")
    data = json.loads(run("collectives", command, "ring.xml", "--format", "json")[1])
    assert data["certified"] if command == "check" else len(data["ranks"]) == 4
    assert run("collectives", command, ring, "--format", "markdown")[0] == 0


def test_what_is_wrong_is_a_finding(run: Run) -> None:
    data = json.loads(Path(built(run)).read_text())
    Path("less.json").write_text(json.dumps(data | {"transfers": data["transfers"][:-1]}))
    status, out, _ = run("collectives", "check", "less.json")
    assert status == 1
    assert out.startswith("less.json: schedule, refused\n  incomplete: rank 0, step 5, chunk 1: expected")
    status, out, _ = run("collectives", "check", "ring.json", "--topology", "mesh:4")
    assert (status, "rate: rank 3, step 0, chunk" in out) == (1, True)
    status, out, _ = run(
        "collectives", "build", "ring", "all_gather", "--ranks", "4", "--topology", "mesh:4", "-o", "no.json"
    )
    assert (status, Path("no.json").exists()) == (1, False)


@each(
    ("arguments", "problem"),
    [
        (["topologies", "-o", "x.json"], "--output saves a topology; name one"),
        (["topologies", "dgx9"], "unknown name 'dgx9'"),
        (["topologies", "none.json"], "cannot read it"),
        (["build", "ring", "all_gather", "--ranks", "four"], "--ranks wants numbers below 100000 such as 8 or 4x4"),
        (["build", "rings", "all_gather", "--ranks", "4"], "expected one of direct"),
        (["check", "none.json"], "none.json: cannot read it"),
        (["check", "other.json"], "other.json: expected a schedule of ours, MSCCL's XML"),
        (["topologies", "other.json"], "other.json: expected a topology of ours or SCCL's"),
        (["check", "ring.xml", "--topology", "ring:4"], "--topology is for schedules"),
        (["show", "ring.json", "--topology", "ring:3"], "expected a topology of 4 ranks, got 3"),
        (["cost", "ring.json"], "cost needs a schedule and its network"),
        (["cost", "ring.xml", "--topology", "ring:4"], "cost needs a schedule and its network"),
        (
            ["cost", "ring.json", "--topology", "ring:4", "--bytes", "many"],
            "--bytes wants sizes such as 4096, 64K or 1G",
        ),
        (["synthesize", "all_sum", "--topology", "ring:4"], "expected one of all_gather"),
        (["export", "all.json", "--in-place"], "expected an all_to_all out of place"),
    ],
)
def test_what_cannot_be_used(run: Run, arguments: list[str], problem: str) -> None:
    built(run)
    run("collectives", "build", "direct", "all_to_all", "--ranks", "4", "-o", "all.json")
    run("collectives", "export", "ring.json", "-o", "ring.xml")
    Path("other.json").write_text("{}")
    status, _, error = run("collectives", *arguments)
    assert (status, problem in error) == (2, True), error


def test_synthesis_of_a_dgx1(run: Run) -> None:
    """SCCL's frontier, and the proof that no schedule moves more."""
    status, out, _ = run("collectives", "synthesize", "all_gather", "--topology", "dgx1", "-o", "best.json")
    assert status == 0
    rows = [line.split()[:3] for line in out.splitlines()[3:]]
    assert rows == [["2", "2", "3"], ["6", "3", "7"]]
    assert "no schedule moves more than 171.4 GB/s of the whole: 7/8 of the bytes enter rank 0 at 150 GB/s" in out
    assert "meets the bound" in out
    assert run("collectives", "check", "best.json", "--topology", "dgx1")[0] == 0
    data = json.loads(
        run("collectives", "cost", "best.json", "--topology", "dgx1", "--bytes", "1G", "--format", "json")[1]
    )
    assert 0.99 < data["sizes"][0]["bound_s"] / data["sizes"][0]["seconds"] <= 1
    assert "GB/s" in run("collectives", "cost", "best.json", "--topology", "dgx1")[1]
    assert run("collectives", "export", "best.json", "-o", "best.xml")[0] == 0
    assert run("collectives", "check", "best.xml")[0] == 0


def test_no_schedule_of_so_few_steps(run: Run) -> None:
    status, out, _ = run("collectives", "synthesize", "all_gather", "--topology", "ring:6", "--steps", "2")
    assert (status, "no schedule found" in out) == (1, True)


def test_plans(run: Run) -> None:
    run("collectives", "build", "direct", "all_reduce", "--ranks", "4", "-o", "direct.json")
    more = ["--to", "mscclpp", "--in-place", "--channels", "2"]
    assert run("collectives", "export", "direct.json", "-o", "plan.json", *more)[0] == 0
    status, out, _ = run("collectives", "check", "plan.json")
    assert (status, "plan.json: MSCCL++ plan, certified" in out) == (0, True)
    assert "rlxsignal" in run("collectives", "show", "plan.json", "--steps", "1")[1]
    assert len(json.loads(run("collectives", "show", "plan.json", "--format", "json")[1])["ranks"]) == 4
    assert run("collectives", "export", "plan.json", "--to", "mscclpp")[1] == Path("plan.json").read_text()
    for arguments, problem in (
        (["export", "plan.json"], "expected a schedule or a program, got a plan"),
        (["export", "ring.xml", "--to", "mscclpp"], "expected a schedule or a plan, got a program"),
    ):
        run("collectives", "export", "direct.json", "-o", "ring.xml")
        status, _, error = run("collectives", *arguments)
        assert (status, problem in error) == (2, True)


def test_a_schedule_runs_on_this_machine(run: Run) -> None:
    ring = built(run)
    status, out, _ = run("collectives", "run", ring, "--bytes", "1K", "--bytes", "64K")
    assert status == 0
    assert out.startswith("ring all_reduce 4 on 4 ranks of this machine\n")
    assert out.count("  right  ") == 2
    data = json.loads(run("collectives", "run", ring, "--bytes", "1000", "--format", "json")[1])
    (timing,) = data["runs"]
    assert (timing["num_bytes"], timing["is_right"]) == (1008, True)
    assert timing["seconds"] > 0 < timing["torch_s"]


def test_what_is_not_right_is_not_run(run: Run) -> None:
    ring = json.loads(Path(built(run)).read_text())
    ring["transfers"] = ring["transfers"][:-1]
    Path("short.json").write_text(json.dumps(ring))
    status, out, _ = run("collectives", "run", "short.json")
    assert status == 1
    assert "certified" not in out.splitlines()[0]
    run("collectives", "export", built(run, name="other.json"), "-o", "ring.xml")
    assert "run takes schedules" in run("collectives", "run", "ring.xml")[2]
    run("collectives", "build", "ring", "all_reduce", "--ranks", "65", "-o", "large.json")
    assert "65 ranks on one machine; run at most 64" in run("collectives", "run", "large.json")[2]


def test_a_cluster_takes_schedules_by_an_option(run: Run) -> None:
    status, out, _ = run("plan", "--help")
    assert (status, "--collectives synthesized|FOLDER" in out) == (0, True)
    Path("empty").mkdir()
    status, _, error = run("plan", "net.py:make", "--cluster", "local:4", "--collectives", "empty")
    assert (status, "schedules: empty: expected .json or .xml files of schedules" in error) == (2, True)


@in_whole_grids
def test_synthesis_of_a_large_network(run: Run) -> None:
    """One size, many ranks: greedy, routed and packed schedules, each faster than the one before."""
    arguments = ["collectives", "synthesize", "all_reduce", "--topology", "mesh:3x4", "--bytes", "1G"]
    Path("sketch.json").write_text('{"pieces": [1]}')
    status, out, error = run(*arguments, "--sketch", "sketch.json", "-o", "best.json", "--time-limit", "1")
    assert (status, error) == (0, "")
    assert "no schedule takes less than" in out
    data = json.loads(run(*arguments, "--sketch", "sketch.json", "--time-limit", "1", "--format", "json")[1])
    times = [one["seconds"] for one in data["found"]]
    assert times == sorted(times, reverse=True)
    assert 0 < data["found"][-1]["gap"] < 0.25
    assert run("collectives", "check", "best.json", "--topology", "mesh:3x4")[0] == 0
    small = ["collectives", "synthesize", "all_gather", "--topology", "ring:4", "--bytes", "1M"]
    assert "all_gather of 1.00 MB on ring 4" in run(*small)[1]


def test_a_time_limit_is_kept(run: Run) -> None:
    """Whatever the search is doing: a network of 512 ranks takes a minute for its first schedule."""
    start = time.monotonic()
    status, out, _ = run(
        "collectives", "synthesize", "all_gather", "--topology", "torus:8x8x8", "--bytes", "1G", "--time-limit", "1"
    )
    assert (status, "no schedule found" in out) == (1, True)
    assert time.monotonic() - start < 4


def test_a_schedule_has_a_page(run: Run) -> None:
    """One file without scripts: a box for each transfer, a row for each link; names are text, whatever they hold."""
    ring = json.loads(Path(built(run)).read_text())
    Path("ring.json").write_text(json.dumps({**ring, "name": "<script>ring"}))
    arguments = ["collectives", "show", "ring.json", "--topology", "ring:4", "--bytes", "1M"]
    assert run(*arguments, "--page", "ring.html") == (0, "ring.html\n", "")
    page = Path("ring.html").read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<rect") == 24  # 3 steps and back, 4 ranks
    assert page.count("<tr><td>rank") == 8
    assert "chunk 0, rank 0 to rank 1, step 3, copied" in page
    assert re.search(r"all_reduce of 1.00 MB on 4 ranks: \d.*s in 6 steps, \d\d.\d% of the bound", page)
    shares = [int(share) for share in re.findall(r'right">(\d+)%<', page)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3] > 80
    assert shares[4:] == [0] * 4  # one way round
    status, _, error = run("collectives", "show", "ring.json", "--page", "ring.html")
    assert (status, "name it by --topology" in error) == (2, True)
