"""`shardwright calibrate`: measure this machine."""

from __future__ import annotations

from pathlib import Path

import click

from shardwright.cli import terminal
from shardwright.cli.options import Number, examples, format_option, output_option


@click.command(epilog=examples("calibrate 2", "plan examples/zoo.py:gpt2 --cluster local:2"))
@click.argument("num_ranks", type=click.IntRange(1), default=2)
@output_option("Save the cluster in this file too.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What to measure.")
@click.option("--thorough", is_flag=True, help="Five times as many passes, and bfloat16 too.")
@click.option("--timeout", type=Number(0, min_open=True),
              help="Seconds until the ranks are ended; 240 by default, 1200 if --thorough.")  # fmt: skip
@format_option
def calibrate(
    num_ranks: int, output: Path | None, device: str, thorough: bool, timeout: float | None, form: str
) -> None:
    """Measure NUM_RANKS ranks on this machine. About a minute, five with --thorough, if nothing else runs.

    Dispatch of every operator, kernels by shape, memory and collectives, all ranks at once, in several passes. The
    result is kept: --cluster local:NUM_RANKS, or detect where it is of GPUs, use it from then on.
    What is interrupted goes on when the same command is given again on the same day.
    """
    from shardwright.cost.calibration.calibrate import calibrate as measure

    warnings: list[str] = []
    with terminal.progress("calibrate") as progress:
        cluster = measure(
            num_ranks, device=device, thorough=thorough, timeout_s=timeout, progress=progress, warn=warnings.append
        )
    if output is not None:
        cluster.save(output)
    from shardwright.reports.calibration import CalibrationReport

    terminal.show(CalibrationReport(cluster), form)
    for warning in warnings:
        terminal.note(f"warning: {warning}")
