"""The kinds of rules, and their one JSON form: `{"form": "row" | "steps" | "equation", …}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions import fields
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.steps import StepRule
from shardwright.substitutions.rules.wellformed import equation_from_json

Rule = RowRule | StepRule | Equation

KINDS = ("row", "steps", "serial", "placement")


def kind_of(rule: Rule) -> str:
    """Return the kind of a rule: its form, except that an equation is serial or, with mesh axes, a placement rule."""
    if isinstance(rule, Equation):
        return "placement" if rule.axes else "serial"
    return "row" if isinstance(rule, RowRule) else "steps"


def json_kind(data: Mapping[str, Any]) -> str:
    """Return the kind of a rule, as `kind_of` does, from its JSON form."""
    form = str(data["form"])
    return form if form != "equation" else "placement" if data.get("axes") else "serial"


def json_name(data: Mapping[str, Any]) -> str:
    """Return the name of a rule from its JSON form; row rules have no such field."""
    return str(data.get("name") or f"{data['row']} [{data['pattern']}] by {data['choice']}")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Rule]] = {
    "row": RowRule.from_json,
    "steps": StepRule.from_json,
    "equation": equation_from_json,
}


def rule_from_json(data: object) -> Rule:
    """Read any rule. Raises a `RuleError` that names the rule and the field that is wrong."""
    with fields.located(f"rule {fields.name_of(data)!r}"):
        if not isinstance(data, dict):
            raise RuleError(f"expected an object with the field 'form', got {fields.shown(data)}")
        form = data.get("form")
        if not isinstance(form, str) or form not in _READERS:
            raise RuleError(f"field 'form': expected one of {', '.join(map(repr, _READERS))}, got {fields.shown(form)}")
    return _READERS[form](data)
