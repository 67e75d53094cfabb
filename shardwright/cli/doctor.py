"""`shardwright doctor`: a check of this machine, with remedies."""

from __future__ import annotations

import click

from shardwright.cli import terminal
from shardwright.cli.options import Number, examples, format_option
from shardwright.cli.status import ENVIRONMENT, FINDING


@click.command(epilog=examples("doctor", "doctor --format json"))
@click.option("--timeout", type=Number(1), default=30.0, show_default=True,
              help="Seconds that two ranks have to add up a number.")  # fmt: skip
@format_option
def doctor(timeout: float, form: str) -> int:
    """Say what this machine can do: versions, devices, calibrations, the cache folder, two ranks that talk.

    Ends with status 1 where something should be mended, and with 4 where no program would run here.
    """
    from shardwright.cli.examining import DoctorReport, examined

    with terminal.progress("doctor") as progress:
        progress("loading torch, and starting two ranks")
        report = DoctorReport(examined(timeout))
    terminal.show(report, form)
    if report.has("failure"):
        return ENVIRONMENT
    return FINDING if report.has("finding") else 0
