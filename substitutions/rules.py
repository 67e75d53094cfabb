"""All kinds of rules, and their one JSON form: `{"form": "row" | "steps" | "equation", …}`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.pcg.errors import RuleError
from shardwright.substitutions import fields
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.steps import StepRule

Rule = RowRule | StepRule | Equation

KINDS = ("row", "steps", "serial", "placement")


def kind_of(rule: Rule) -> str:
    """What people call the rule: its form, but for equations, which are serial or have mesh axes."""
    if isinstance(rule, Equation):
        return "placement" if rule.axes else "serial"
    return "row" if isinstance(rule, RowRule) else "steps"


_FORMS: Mapping[str, type[RowRule] | type[StepRule] | type[Equation]] = {
    "row": RowRule,
    "steps": StepRule,
    "equation": Equation,
}


def rule_from_json(data: object) -> Rule:
    """Read any rule; a `RuleError` names the rule and the field that is wrong."""
    with fields.located(f"rule {fields.name_of(data)!r}"):
        if not isinstance(data, dict):
            raise RuleError(f"expected an object with the field 'form', got {fields.shown(data)}")
        form = data.get("form")
        if not isinstance(form, str) or form not in _FORMS:
            raise RuleError(f"field 'form': expected one of {', '.join(map(repr, _FORMS))}, got {fields.shown(form)}")
    return _FORMS[form].from_json(data)
