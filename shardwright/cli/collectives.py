"""`shardwright collectives`: networks, and schedules of collectives built, checked, shown and exported."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from shardwright.cli import terminal
from shardwright.cli.options import FILE_PATH, Number, examples, format_option, output_option, parse_cluster
from shardwright.cli.status import FINDING
from shardwright.pcg.errors import ScheduleError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.pcg.collectives.files import anyfile
    from shardwright.pcg.collectives.plan import Plan
    from shardwright.pcg.collectives.program import Program
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.pcg.collectives.topology import Topology
    from shardwright.search.collectives.frontier import Point
    from shardwright.search.collectives.sketch import Sketch
    from shardwright.search.collectives.synthesis import Synthesized
    from shardwright.verifier.collectives.verdict import ScheduleVerdict

_Proven = TypeVar("_Proven", "Point", "Synthesized")
MOST_LOCAL_RANKS = 64
TOPOLOGY_HELP = (
    "A name with numbers, such as dgx1, mi250:2 or torus:4x4; cluster:CLUSTER for the levels of a cluster, such as "
    "cluster:preset:dgx-h100:2; wired:FILE:GPU[:NODES] for what nvidia-smi topo -m printed, or NCCL's topology file; "
    "or a file of ours or SCCL's."
)


@click.group(
    epilog=examples(
        "collectives topologies dgx1",
        "collectives build ring all_reduce --ranks 8 -o ring.json",
        "collectives synthesize all_gather --topology dgx1 -o best.json",
        "collectives synthesize all_reduce --topology mesh:6x6 --bytes 1G",
        "collectives check best.json --topology dgx1",
        "collectives run ring.json",
        "collectives show best.json --topology dgx1 --steps 2",
        "collectives export ring.json -o ring.xml --in-place",
    )
)
def collectives() -> None:
    """Schedules of collectives: who sends which chunk to whom, and when.

    Files are read by their content: our JSON, MSCCL's XML, MSCCL++ plans, SCCL's JSON, ForestColl's trees.
    """


topology_option = click.option("--topology", metavar="TOPOLOGY", help=TOPOLOGY_HELP)


@collectives.command(epilog=examples("collectives topologies", "collectives topologies mi250:2 -o mi250.json"))
@click.argument("topology", required=False)
@output_option("Save the topology in this file, to be changed by hand.")
@format_option
def topologies(topology: str | None, output: Path | None, form: str) -> None:
    """List networks and builders that have a name, or show the links of TOPOLOGY."""
    from shardwright.cost.clusters.networks import PRESETS
    from shardwright.pcg.collectives.files.own import write_topology
    from shardwright.reports.collectives import PresetsReport, TopologyReport

    if topology is None:
        if output is not None:
            raise click.UsageError("--output saves a topology; name one.")
        terminal.show(PresetsReport(PRESETS), form)
        return
    parsed = parse_topology(topology)
    if output is not None:
        _save(output, write_topology(parsed))
    terminal.show(TopologyReport(parsed), form)


@collectives.command(
    epilog=examples(
        "collectives build ring all_reduce --ranks 8 -o ring.json",
        "collectives build torus all_gather --ranks 4x4 --pieces 2 --topology torus:4x4",
    )
)
@click.argument("builder")
@click.argument("collective")
@click.option("--ranks", required=True, metavar="N[xM…]", help="How many ranks, or the grid of them.")
@click.option("--pieces", type=click.IntRange(1, 1 << 16), default=1, show_default=True,
              help="Chunks of each unit of data, as the builder counts them.")  # fmt: skip
@topology_option
@output_option("Save the schedule in this file.")
@format_option
def build(
    builder: str, collective: str, ranks: str, pieces: int, topology: str | None, output: Path | None, form: str
) -> int:
    """Build the schedule of COLLECTIVE by BUILDER and prove it.

    `collectives topologies` lists the builders.
    """
    from shardwright.pcg.collectives.builders.table import build as built
    from shardwright.pcg.collectives.files.own import write_schedule
    from shardwright.verifier.collectives import verify_schedule

    schedule = built(builder, collective, _grid(ranks), pieces)
    verdict = verify_schedule(schedule, None if topology is None else parse_topology(topology))
    if output is not None and verdict.is_certified:
        _save(output, write_schedule(schedule))
    return _show_verdict(schedule.name, "schedule", verdict, form)


@collectives.command(epilog=examples("collectives check best.json --topology dgx1", "collectives check allreduce.xml"))
@click.argument("file", type=FILE_PATH)
@topology_option
@click.option(
    "--root", type=click.IntRange(0), default=0, help="Of a broadcast, reduce, gather or scatter in MSCCL's XML."
)
@format_option
def check(file: Path, topology: str | None, root: int, form: str) -> int:
    """Prove that FILE does what it claims, in every order of its events, or say where it does not.

    The status is 1 where it does not. Without --topology, the links of an SCCL file are its own.
    """
    item = _read(file, root)
    return _show_verdict(str(file), item.form, _verdict(item, topology), form)


@collectives.command(
    epilog=examples(
        "collectives synthesize all_gather --topology dgx1 -o best.json",
        "collectives synthesize all_reduce --topology mesh:6x6 --bytes 1G",
    )
)
@click.argument("collective")
@click.option("--topology", metavar="TOPOLOGY", required=True, help=TOPOLOGY_HELP)
@click.option("--root", type=click.IntRange(0), default=0, help="Of a broadcast, reduce, gather or scatter.")
@click.option("--most-pieces", type=click.IntRange(1, 64), default=8, show_default=True,
              help="The most chunks of each unit of data, where schedules are exact.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), metavar="N", help="No more steps than these, where they are exact.")
@click.option("--bytes", "size", metavar="N[K|M|G]", help="The size of the whole that a schedule is to be fast for, in "
              "powers of 1000; by default 64M, and for 8 ranks and fewer every size.")  # fmt: skip
@click.option("--sketch", type=FILE_PATH, help="A JSON file with what you know: links not to be used, ranks that talk "
              "to other machines, a symmetry, numbers of chunks.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", type=Number(0, min_open=True), default=60.0, show_default=True,
              help="Seconds; what was found until then is shown.")  # fmt: skip
@output_option("Save the last schedule, which moves most bytes per second, in this file.")
@format_option
def synthesize(
    collective: str,
    topology: str,
    root: int,
    most_pieces: int,
    steps: int | None,
    size: str | None,
    sketch: Path | None,
    time_limit_s: float,
    output: Path | None,
    form: str,
) -> int:
    """Find the best schedules of COLLECTIVE on a network.

    For 8 ranks and fewer, Z3 finds for each number of steps the fewest rounds, or proves that there are none. For more,
    or for one size, schedules get faster until one is near the bound: greedy ones, evened paths, packed trees. Bounds
    of cuts and flows say how much better one could be. What is saved is proven. The status is 1 where none was found.
    """
    from shardwright.pcg.collectives.files.own import write_schedule
    from shardwright.reports.collectives import FrontierReport, SynthesisReport
    from shardwright.search.collectives.frontier import Walk
    from shardwright.search.collectives.limited import within
    from shardwright.search.collectives.synthesis import SMALL_RANKS, synthesize

    links = parse_topology(topology)
    if steps is not None or (links.num_ranks <= SMALL_RANKS and size is None and sketch is None):
        walk = Walk(links, collective, root, None, most_pieces, steps, time_limit_s, time_limit_s)
        points = [_proven(point, links) for point in within(time_limit_s, walk.points)]
        report, schedules = FrontierReport(links, collective, points), [point.schedule for point in points]
    else:
        num_bytes, hints = _bytes(size or "64M"), None if sketch is None else _sketch(sketch)
        attempts = partial(synthesize, links, collective, num_bytes, root=root, budget_s=time_limit_s, sketch=hints)
        attempted = list(within(time_limit_s, attempts))
        schedules = [_proven(one, links).schedule for one in attempted[-1:]]
        report = SynthesisReport(links, collective, num_bytes, attempted)
    if output is not None and schedules:
        _save(output, write_schedule(schedules[-1]))
    terminal.show(report, form)
    return 0 if schedules else FINDING


@collectives.command(epilog=examples("collectives cost best.json --topology dgx1 --bytes 1M --bytes 1G"))
@click.argument("file", type=FILE_PATH)
@topology_option
@click.option("--bytes", "sizes", multiple=True, default=("1K", "32K", "1M", "32M", "1G"), show_default=True,
              metavar="N[K|M|G]", help="Of the whole: the full tensor of the group, in powers of 1000.")  # fmt: skip
@format_option
def cost(file: Path, topology: str | None, sizes: tuple[str, ...], form: str) -> None:
    """Price the schedule of FILE on a network, by simulating its links, beside what no schedule can beat."""
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.reports.collectives import CostReport

    item = _read(file)
    links = item.topology if topology is None else parse_topology(topology)
    if not isinstance(item.subject, Schedule) or links is None:
        raise click.UsageError("cost needs a schedule and its network; name it by --topology.")
    _check_ranks(item.subject, links)
    terminal.show(CostReport(item.subject, links, tuple(map(_bytes, sizes))), form)


@collectives.command(epilog=examples("collectives run ring.json --bytes 64K --bytes 4M"))
@click.argument("file", type=FILE_PATH)
@click.option("--bytes", "sizes", multiple=True, default=("1K", "64K", "4M"), show_default=True,
              metavar="N[K|M|G]", help="Of the whole: the full tensor of the group, in powers of 1000.")  # fmt: skip
@format_option
def run(file: Path, sizes: tuple[str, ...], form: str) -> int:
    """Run the schedule of FILE on ranks of this machine (gloo), compare its results, and time it.

    It is judged first: what is not right is not run. Ends with status 1 where a result is wrong.
    """
    from shardwright.lowering.trial.collectives import on_this_machine
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.reports.collectives import RunReport
    from shardwright.verifier.collectives import verify_schedule

    item = _read(file)
    if not isinstance(item.subject, Schedule):
        raise click.UsageError("run takes schedules; programs and plans are for their own runtimes.")
    if item.subject.num_ranks > MOST_LOCAL_RANKS:
        raise ScheduleError(
            f"{item.subject.name}: {item.subject.num_ranks} ranks on one machine; run at most {MOST_LOCAL_RANKS}"
        )
    verdict = verify_schedule(item.subject)
    if not verdict.is_certified:
        return _show_verdict(str(file), item.form, verdict, form)
    timings = on_this_machine(item.subject, [_bytes(size) for size in sizes])
    terminal.show(RunReport(item.subject, timings), form)
    return 0 if all(timing.is_right for timing in timings) else FINDING


@collectives.command(
    epilog=examples(
        "collectives show best.json --topology dgx1 --steps 2",
        "collectives show best.json --topology dgx1 --bytes 64M --page best.html",
    )
)
@click.argument("file", type=FILE_PATH)
@topology_option
@click.option(
    "--steps", type=click.IntRange(0), metavar="N", help="Show the first steps, or the first ranks of a program."
)
@click.option("--page", type=FILE_PATH, help="Write a page for the browser, which needs no network: each transfer over "
              "time, as links carry it, and how busy the links are.")  # fmt: skip
@click.option(
    "--bytes", "size", default="64M", show_default=True, metavar="N[K|M|G]", help="Of the whole, on the page."
)
@format_option
def show(file: Path, topology: str | None, steps: int | None, page: Path | None, size: str, form: str) -> None:
    """Show FILE: in each step who sends what to whom, and how busy the links are; of a program, the blocks."""
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.reports.collectives import ProgramReport, ScheduleReport

    item = _read(file)
    if isinstance(item.subject, Schedule):
        links = item.topology if topology is None else parse_topology(topology)
        _check_ranks(item.subject, links)
        if page is not None:
            _write_page(item.subject, links, _bytes(size), page)
            return
        total = item.subject.num_steps
        terminal.show(ScheduleReport(item.subject, links, range(total)[:steps]), form)
    elif page is not None:
        raise click.UsageError("--page draws schedules; a program or plan has no links of its own.")
    else:
        terminal.show(ProgramReport(item.subject, range(item.subject.num_ranks)[:steps]), form)


@collectives.command(
    epilog=examples(
        "collectives export ring.json -o ring.xml --in-place --channels 4",
        "collectives export direct.json --to mscclpp -o plan.json --in-place",
    )
)
@click.argument("file", type=FILE_PATH)
@output_option("Save it in this file.")
@click.option("--to", type=click.Choice(["msccl", "mscclpp"]), default="msccl", show_default=True, help="Its form.")
@click.option("--in-place", is_flag=True, help="For buffers in which the output is the input, or a part of it.")
@click.option(
    "--channels",
    type=click.IntRange(1, 32),
    default=1,
    show_default=True,
    help="Of XML, which chunks take in turn; of a plan, blocks, each with a part of every chunk.",
)
def export(file: Path, output: Path | None, to: str, in_place: bool, channels: int) -> None:
    """Write FILE as MSCCL's XML or an MSCCL++ plan, read it again and prove it."""
    from shardwright.pcg.collectives.files.msccl import read_msccl, write_msccl
    from shardwright.pcg.collectives.files.mscclpp import read_mscclpp, write_mscclpp
    from shardwright.verifier.collectives import verify_plan, verify_program

    subject, source = _read(file).subject, str(output or file)
    if to == "mscclpp":
        text = write_mscclpp(_plan(subject, in_place, channels))
        verdict = verify_plan(read_mscclpp(text, source))
    else:
        text = write_msccl(_program(subject, in_place, channels))
        verdict = verify_program(read_msccl(text, source))
    if not verdict.is_certified:
        raise ScheduleError(f"{file}: {verdict.refusals[0]}")
    if output is None:
        click.echo(text, nl=False)
    else:
        _save(output, text)


def _write_page(schedule: Schedule, links: Topology | None, num_bytes: int, page: Path) -> None:
    from shardwright.view.schedule import write_schedule_page

    if links is None:
        raise click.UsageError("--page needs the network whose links are drawn; name it by --topology.")
    write_schedule_page(schedule, links, num_bytes, page)
    click.echo(page)


def _proven(proven: _Proven, links: Topology) -> _Proven:
    """Return what a search has found, once it is proven."""
    from shardwright.verifier.collectives import verify_schedule

    verdict = verify_schedule(proven.schedule, links)
    if not verdict.is_certified:
        raise ScheduleError(f"{proven.schedule.name}: {verdict.refusals[0]}")
    return proven


def _sketch(path: Path) -> Sketch:
    from shardwright.pcg.collectives.files.documents import read_text
    from shardwright.search.collectives.sketch import read_sketch

    return read_sketch(read_text(path))


def parse_topology(text: str) -> Topology:
    """Return the topology that an option names.

    Raises:
        ShardwrightError: it names none, or a file that holds none.
    """
    from shardwright.cost.clusters.networks import preset_topology
    from shardwright.cost.clusters.shapes import of_cluster
    from shardwright.pcg.collectives.files.anyfile import read_links

    kind, _, rest = text.partition(":")
    if kind == "cluster":
        return of_cluster(parse_cluster(rest))
    if kind == "wired":
        return _wired(text, rest)
    return read_links(text) if text.endswith(".json") or Path(text).is_file() else preset_topology(text)


def _wired(text: str, wiring: str) -> Topology:
    from shardwright.cost.clusters.wired import wired_topology
    from shardwright.pcg.collectives.files.documents import read_text

    if not (matched := re.fullmatch("([^:]+):([^:]+)(?::([0-9]{1,6}))?", wiring)):
        raise ShardwrightError(f"topology {text!r}: expected wired:FILE:GPU[:NODES], such as wired:topo.txt:V100-32:2")
    file, gpu, nodes = matched.groups("1")
    return wired_topology(read_text(file), file, gpu, int(nodes))


def _read(file: Path, root: int = 0) -> anyfile.Contents:
    from dataclasses import replace

    from shardwright.pcg.collectives.files.anyfile import read_collective
    from shardwright.pcg.collectives.program import Program

    item = read_collective(file)
    return item._replace(subject=replace(item.subject, root=root)) if isinstance(item.subject, Program) else item


def _verdict(item: anyfile.Contents, topology: str | None) -> ScheduleVerdict:
    from shardwright.pcg.collectives.program import Program
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.verifier.collectives import verify_plan, verify_program, verify_schedule

    if isinstance(item.subject, Schedule):
        return verify_schedule(item.subject, item.topology if topology is None else parse_topology(topology))
    if topology is not None:
        raise click.UsageError("--topology is for schedules; a program's messages have no links of their own.")
    return verify_program(item.subject) if isinstance(item.subject, Program) else verify_plan(item.subject)


def _program(subject: Schedule | Program | Plan, in_place: bool, channels: int) -> Program:
    from shardwright.pcg.collectives.plan import Plan
    from shardwright.pcg.collectives.schedule import Schedule
    from shardwright.pcg.collectives.threads import program_of

    if isinstance(subject, Plan):
        raise ScheduleError(
            f"{subject.name}: expected a schedule or a program, got a plan; it has no messages to write"
        )
    return program_of(subject, in_place=in_place, channels=channels) if isinstance(subject, Schedule) else subject


def _plan(subject: Schedule | Program | Plan, in_place: bool, blocks: int) -> Plan:
    from shardwright.pcg.collectives.onesided import plan_of
    from shardwright.pcg.collectives.program import Program
    from shardwright.pcg.collectives.schedule import Schedule

    if isinstance(subject, Program):
        raise ScheduleError(f"{subject.name}: expected a schedule or a plan, got a program; export its schedule")
    return plan_of(subject, in_place=in_place, blocks=blocks) if isinstance(subject, Schedule) else subject


def _show_verdict(source: str, form: str, verdict: ScheduleVerdict, output_form: str) -> int:
    from shardwright.reports.collectives import VerdictReport

    terminal.show(VerdictReport(source, form, verdict), output_form)
    return 0 if verdict.is_certified else FINDING


def _check_ranks(schedule: Schedule, topology: Topology | None) -> None:
    if topology is not None and topology.num_ranks != schedule.num_ranks:
        problem = f"expected a topology of {schedule.num_ranks} ranks, got {topology.num_ranks}"
        raise ShardwrightError(f"{schedule.name}: {problem}; take another topology")


def _grid(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise click.UsageError(f"--ranks wants numbers below 100000 such as 8 or 4x4, got {text[:40]!r}.")
    return tuple(map(int, parts))


def _bytes(text: str) -> int:
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, unit = (text, "") if text[-1:].isdigit() else (text[:-1], text[-1:].upper())
    if not (number.isascii() and number.isdigit() and len(number) < 16 and unit in units and int(number)):
        raise click.UsageError(f"--bytes wants sizes such as 4096, 64K or 1G, got {text!r}.")
    return int(number) * units[unit]


def _save(path: Path, text: str) -> None:
    from shardwright.pcg.files import write_whole

    write_whole(path, text, "the file", ShardwrightError)
