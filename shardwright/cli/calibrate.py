"""`shardwright calibrate`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import terminal
from shardwright.cli.options import format_option, output_option

if TYPE_CHECKING:
    from shardwright.cost.clusters.cluster import Cluster


@click.command(
    epilog="\b\nExample:\n  shardwright calibrate 2\n  shardwright plan examples/zoo.py:gpt2 --cluster local:2\n"
)
@click.argument("num_ranks", type=click.IntRange(1), default=2)
@output_option("Save the cluster in this file too.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What to measure.")
@click.option("--thorough", is_flag=True, help="Five times as many passes, and bfloat16 too.")
@click.option("--timeout", type=float, help="Seconds until the ranks are ended; 240 by default, 1200 if --thorough.")
@format_option
def calibrate(
    num_ranks: int, output: Path | None, device: str, thorough: bool, timeout: float | None, form: str
) -> None:
    """Measure NUM_RANKS ranks on this machine.

    Dispatch of every operator, kernels by shape, memory and collectives, all ranks at once, in several passes: about a
    minute. The result is kept: --cluster local:NUM_RANKS, or detect where it is of GPUs, use it from then on.
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
    if form == "json":
        terminal.show_json(cluster.to_json())
    else:
        for line in _lines(cluster):
            click.echo(line)
    for warning in warnings:
        terminal.note(f"warning: {warning}")


def _lines(cluster: Cluster) -> list[str]:
    from shardwright.cost.calibration.calibrated import fit_errors

    device = cluster.device
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {precision}" for precision, rate in device.flops_per_s.items())
    dispatch = (
        f"{device.op_overhead_s * 1e6:.1f} µs for an operator, {device.update_overhead_s * 1e6:.1f} µs for the update "
        f"of a parameter, {device.step_overhead_s * 1e6:.0f} µs for a step"
    )
    lines = [cluster.summary(), f"  device: {rates}, memory {device.memory_bytes_per_s / 1e9:.1f} GB/s"]
    lines.append(f"  dispatch: {dispatch}")
    for kind, error in fit_errors(device).items():
        num_kernels = sum(kernel.kind == kind for kernel in device.kernels)
        lines.append(f"  {kind}: {num_kernels} kernels, each {error:.0%} from what the others say")
    for line in cluster.collectives:
        speed = f"{1e-9 / line.s_per_byte:.2f} GB/s + {line.latency_s * 1e6:.0f} µs"
        error = "" if line.fit_error is None else f", fitted to {line.fit_error:.0%}"
        lines.append(f"  {line.collective} over {line.group_size} ranks: {speed}{error}")
    return lines
