"""The exit statuses of all commands, but for `stopping.AGAIN`."""

from __future__ import annotations

from shardwright.pcg.errors import DistributedError, InfeasibleError, MachineError

FINDING = 1
"""A check found an error: a wrong gradient, a refuted rule, a slower plan; or the user's own script failed."""
USAGE = 2
"""The arguments, or a file or model that they name, cannot be used; the message says why."""
INFEASIBLE = 3
"""No plan fits the memory, or the shown plan does not."""
ENVIRONMENT = 4
"""This machine lacks something: devices, a package, a folder that can be written, a rank that lives."""
INTERRUPTED = 130


def status_for(error: BaseException) -> int:
    """Return the exit status for an error that a command raised."""
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    lacking = (MachineError, DistributedError, OSError, MemoryError, ImportError)
    return ENVIRONMENT if isinstance(error, lacking) else USAGE
