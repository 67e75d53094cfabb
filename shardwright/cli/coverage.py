"""`shardwright rules coverage`: the rules of a catalogue that the search used on some models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import terminal
from shardwright.cli.options import CLUSTER_HELP, examples, format_option, parse_cluster, rules_argument

if TYPE_CHECKING:
    from shardwright.pcg.graph import Graph
    from shardwright.search.tree.planner import Progress


@click.command(
    epilog=examples(
        "rules coverage --models examples/zoo.py --cluster local:4",
        "rules coverage rules.json --models examples/zoo.py:gpt2 --models train.py:make --cluster preset:dgx-h100",
    )
)
@rules_argument
@click.option(
    "--models", "specs", multiple=True, required=True, metavar="FILE.py[:FUNCTION]",
    help="A function that returns (model, batch), or a file with such functions only. May be repeated.",
)  # fmt: skip
@click.option("--cluster", "clusters", multiple=True, metavar="CLUSTER", default=["local:2"], show_default=True,
              help=CLUSTER_HELP + " May be repeated.")  # fmt: skip
@click.option("--most", type=click.IntRange(1), default=12, show_default=True, help="Rules to show of each form.")
@format_option
def coverage(file: Path | None, specs: tuple[str, ...], clusters: tuple[str, ...], most: int, form: str) -> None:
    """Say which rules of a file the search used: loaded, matched somewhere, fired in a plan.

    Every model is planned for every cluster, with the rules of the file; nothing is run.
    """
    places = list(map(parse_cluster, clusters))
    from shardwright.judging import jury
    from shardwright.reports.coverage import Coverage, CoverageReport
    from shardwright.verifier.choices import Certified

    with terminal.progress("coverage") as progress:
        certified = Certified.of_file(file, progress, jury(progress)) if file else Certified()
        rules = certified.by_name()
        coverage_so_far = Coverage.of(certified)
        for name, graph in _graphs(specs, progress):
            for cluster in places:
                progress(f"planning {name} for {cluster.name}")
                coverage_so_far.plan(name, graph, cluster, certified, rules)
    terminal.show(CoverageReport(coverage_so_far, most), form)


def _graphs(specs: tuple[str, ...], progress: Progress) -> Iterator[tuple[str, Graph]]:
    """Yield the captured graph of every requested model."""
    from shardwright.cli.models import functions, load_model
    from shardwright.pcg.capture.capture import capture

    for spec in specs:
        names = [spec] if ":" in spec else [f"{spec}:{name}" for name in functions(spec)]
        for name in names:
            progress(f"capturing {name}")
            loaded = load_model(name)
            yield name.rpartition(":")[2], capture(loaded.model, loaded.kwargs, loaded.args).graph
