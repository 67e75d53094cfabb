"""The exit statuses of all commands."""

from __future__ import annotations

from shardwright.pcg.errors import DistributedError, InfeasibleError, MachineError

FINDING = 1
"""What was checked is not right: a wrong gradient, a refuted rule, a slower plan; or the user's own script failed."""
USAGE = 2
"""The arguments, or a file or model that they name, cannot be used; the message says why."""
INFEASIBLE = 3
"""No plan fits the memory, or the one that is shown does not."""
ENVIRONMENT = 4
"""This machine lacks what is asked of it: devices, a package, a folder that can be written, a rank that lives."""
INTERRUPTED = 130


def status_for(error: BaseException) -> int:
    """How a command ends that raised this."""
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    lacking = (MachineError, DistributedError, OSError, MemoryError, ImportError)
    return ENVIRONMENT if isinstance(error, lacking) else USAGE
