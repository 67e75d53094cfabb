"""The command group, and the handling of errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from shardwright import __version__
from shardwright.cli.calibrate import calibrate
from shardwright.cli.cluster import cluster
from shardwright.cli.collectives import collectives
from shardwright.cli.doctor import doctor
from shardwright.cli.inspect import compare, explain, view
from shardwright.cli.launch import launch
from shardwright.cli.plan import plan
from shardwright.cli.profile import profile
from shardwright.cli.rules import rules
from shardwright.cli.run import run
from shardwright.cli.status import INTERRUPTED, status_for
from shardwright.cli.timeline import timeline
from shardwright.cli.verify import verify
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.versions import newer_than_tested

DEBUG = "SHARDWRIGHT_DEBUG"
_EPILOG = """\
\b
Start here:
  shardwright plan examples/zoo.py:gpt2 --cluster local:2 --output plan.json
  shardwright view plan.json --output plan.html
  shardwright verify examples/zoo.py:gpt2 --cluster local:2
  shardwright run examples/zoo.py:gpt2 --cluster local:2 --steps 20

\b
A large model on a cluster that you do not have, from a transformers config:
  shardwright plan --hf-config config.json --batch-size 64 --seq-len 4096 --cluster preset:dgx-h100:8
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="shardwright")
def cli() -> None:
    """Compile a PyTorch model into the best parallel training program that can be proven right.

    Results go to stdout, progress to stderr. Ends with status 0; 1 for a finding, as a wrong gradient; 2 where what was
    given cannot be used; 3 where no plan fits the memory; 4 where this machine lacks something: devices, a package, a
    writable folder. SHARDWRIGHT_DEBUG=1 shows where errors came from.
    """


for _command in (
    plan,
    explain,
    timeline,
    compare,
    view,
    verify,
    run,
    launch,
    profile,
    calibrate,
    cluster,
    collectives,
    doctor,
    rules,
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with 0 or a status of `cli.status`."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = cli.main(arguments, prog_name="shardwright", standalone_mode=False)
    except click.ClickException as error:
        return _failed(error, error.format_message(), _usage_hint(error))
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except ShardwrightError as error:
        return _failed(error, str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 0
    except SystemExit:  # click's own answer to a reader that is gone, such as `head`, is status 1
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            return 0
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one line, or the traceback on request
        what = f"unexpected {type(error).__name__}: {error} ({_place(error)})"
        return _failed(error, what, "\n".join(filter(None, (newer_than_tested(), f"{DEBUG}=1 shows more"))))
    return status if isinstance(status, int) else 0


def _failed(error: BaseException, message: str, hint: str = "") -> int:
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exception(error)
    click.echo(f"error: {message}" + (f"\n{hint}" if hint else ""), err=True)
    return status_for(error)


def _usage_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"try: {context.command_path} --help" if context else ""


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nowhere"
