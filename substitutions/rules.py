"""All kinds of rules, and their one JSON form: `{"form": "row" | "steps" | "equation", …}`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.steps import StepRule

Rule = RowRule | StepRule | Equation

_FORMS: Mapping[str, type[RowRule] | type[StepRule] | type[Equation]] = {
    "row": RowRule,
    "steps": StepRule,
    "equation": Equation,
}


def rule_from_json(data: object) -> Rule:
    """Read any rule; a `RuleError` names the rule and the field that is wrong."""
    if not isinstance(data, dict) or data.get("form") not in _FORMS:
        form = data.get("form") if isinstance(data, dict) else type(data).__name__
        raise RuleError(f"rule of form {form!r}; expected an object whose 'form' is one of {sorted(_FORMS)}")
    return _FORMS[data["form"]].from_json(data)
