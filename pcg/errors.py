"""The one error hierarchy of Shardwright.

Every message says what went wrong, where (module path and source line where there is one), what was
expected against what was found, and what to do about it.
"""

from __future__ import annotations


def printable(text: str, allowed: str = "\n") -> str:
    """Escape what does not print in a text for people: control characters, marks that turn text around."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed else ascii(c)[1:-1] for c in text)


class ShardwrightError(Exception):
    """Base of every error that Shardwright raises on purpose. What files say stands in messages as text that prints."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CaptureError(ShardwrightError):
    """A model could not be captured or lifted into a graph.

    `where`: the path of the module in which it failed; None if that is not known, or concerns the whole model. `why`:
    the line and the reason. `function`: the `autograd.Function` that is the reason, by its full name, or "".
    """

    where: str | None = None
    why = function = ""

    def inside(self, where: str, why: str, function: str = "") -> CaptureError:
        """Return the error with the module in which it failed, and why."""
        self.where, self.why, self.function = where, why, function
        return self


class UnsupportedOperatorError(CaptureError):
    """`strict=True` was asked for and an operator has no row in the op table."""


class GraphError(ShardwrightError):
    """A graph is malformed: an unknown operator, a dangling name, a cycle, a wrong attribute."""


class LayoutError(GraphError):
    """A graph is ill-typed: an operand's shape or layout does not fit its operator."""


class RuleError(ShardwrightError):
    """A substitution is malformed, or is used without a certificate."""


class ClusterError(ShardwrightError):
    """A cluster description has missing or impossible values."""


class ScheduleError(ShardwrightError):
    """A schedule of a collective, or a file of one, is malformed: a rank, chunk or step that does not exist."""


class PlanError(ShardwrightError):
    """A plan cannot be read, does not belong to this model, or does not fit this cluster."""


class InfeasibleError(PlanError):
    """No plan fits the devices' memory. `plan`: the smallest that was found, in case the prediction is wrong."""

    def __init__(self, message: str, plan: object) -> None:
        super().__init__(message)
        self.plan = plan


class BatchError(ShardwrightError):
    """A batch does not have the shapes, dtypes or names that were captured."""


class ForeignError(ShardwrightError):
    """A part of a model that runs as it is does other things than it did in capture."""


class CheckpointError(ShardwrightError):
    """A checkpoint cannot be saved or loaded: its folder, its files, or what it was saved from."""


class NumericError(ShardwrightError):
    """Values of a step are NaN or infinite."""


class MachineError(ShardwrightError):
    """This machine lacks what is asked of it: devices, a package, a folder that can be written."""


class DistributedError(ShardwrightError):
    """The process group is not what the plan expects, or a rank failed during a run."""
