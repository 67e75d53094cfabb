"""torchrun without its own traceback: the last words are those of the rank that failed."""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shardwright.cli.status import ENVIRONMENT, FINDING, INTERRUPTED


def main() -> None:
    """Run torchrun with this process's arguments; a failed rank gives a status, and a killed one a line too."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)  # noqa: T201
            sys.exit(ENVIRONMENT)
        sys.exit(FINDING)
    except (KeyboardInterrupt, SignalException):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
