"""`shardwright calibrate`: measure this machine."""

from __future__ import annotations

from pathlib import Path

import click

from shardwright.cli import terminal
from shardwright.cli.options import format_option, output_option


@click.command(
    epilog="\b\nExample:\n  shardwright calibrate 2\n  shardwright plan examples/zoo.py:gpt2 --cluster local:2\n"
)
@click.argument("num_ranks", type=click.IntRange(1), default=2)
@output_option("Save the cluster in this file too.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds until the ranks are ended.")
@format_option
def calibrate(num_ranks: int, output: Path | None, timeout: float, form: str) -> None:
    """Measure NUM_RANKS ranks on this machine.

    Matrix products, memory and collectives, all ranks at once, in about ten seconds. The result is kept, and
    --cluster local:NUM_RANKS uses it from then on.
    """
    from shardwright.cost.calibrate import calibrate as measure

    with terminal.progress("calibrate") as progress:
        cluster = measure(num_ranks, timeout_s=timeout, progress=progress)
    if output is not None:
        cluster.save(output)
    if form == "json":
        terminal.show_json(cluster.to_json())
        return
    click.echo(cluster.summary())
    for line in cluster.collectives:
        speed = f"{1e-9 / line.s_per_byte:.2f} GB/s + {line.latency_s * 1e6:.0f} µs"
        error = "" if line.fit_error is None else f", fitted to {line.fit_error:.0%}"
        click.echo(f"  {line.collective} over {line.group_size} ranks: {speed}{error}")
