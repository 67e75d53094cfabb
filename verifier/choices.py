"""The split choices that the search may use: the op table's choices with a certificate.

certified = Certified()
certified(node, [graph.types[i] for i in node.inputs])      frozenset({"R", "C", "P0", "b", "o", …})
certified.reason(node, operands, "i")                       why a choice is missing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.pcg.choice import WHOLE, Choice, Split, needs_consecutive
from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.optable import ROWS
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.pattern import Pattern, pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, choices, derive, sending_choices
from shardwright.substitutions.rules.rules import Rule
from shardwright.substitutions.rules.steps import STEP_RULES, StepRule
from shardwright.verifier.catalogue import Catalogue
from shardwright.verifier.certificates import Certificate, certify
from shardwright.verifier.store import Verdicts

if TYPE_CHECKING:
    from shardwright.verifier.judge import Jury

_DECLARED = frozenset([WHOLE, Split("b")])
"""The choices of a foreign call that is row by row, as its user says and no proof does; plans name it."""
Key = tuple[str, tuple[object, ...], tuple[tuple[tuple[int, ...], str], ...]]
_RuleKey = tuple[str, Pattern, Choice]


@dataclass
class Certified:
    """The certified choices of nodes. Rules that the store lacks are proven when they are first asked for.

    only    forms of rules ("row", "steps", "equation") for which only the store's rules are allowed
    used    certificates that were given out, by rule hash, to which a plan's proof refers
    """

    store: Catalogue = field(default_factory=Catalogue.load)
    only: frozenset[str] = frozenset()
    used: dict[str, Certificate] = field(default_factory=dict)
    _nodes: dict[Key, dict[Choice, str]] = field(default_factory=dict)
    _rules: dict[_RuleKey, Certificate | str] = field(default_factory=dict)

    def __call__(self, node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = ()) -> frozenset[Choice]:
        """Return the certified choices of one operator; raise `GraphError` if shapes do not fit.

        `blocked` lists splits in blocks to judge, too; there are too many to judge all of them.
        """
        if node.op == OPAQUE:
            return frozenset([WHOLE])
        if node.op == ROW_BY_ROW:
            return _DECLARED
        plain = (choice for choice, reason in self._outcomes(node, operands).items() if not reason)
        return frozenset([*plain, *(choice for choice in blocked if not self.reason(node, operands, choice))])

    def of(self, graph: Graph, node: Node) -> frozenset[Choice]:
        """Return the certified choices of a node of a graph; leaves and parallel operators have none."""
        if node.is_leaf or node.is_parallel:
            return frozenset()
        return self(node, [graph.types[name] for name in node.inputs])

    def reason(self, node: Node, operands: Sequence[TensorType], choice: Choice) -> str | None:
        """Return the reason why a choice is not certified, or None if it is."""
        if node.op == OPAQUE:
            return None if choice == WHOLE else f"{node.op}: an operator without a row runs on whole tensors only"
        if node.op == ROW_BY_ROW:
            return None if choice in _DECLARED else f"{node.op} runs whole, or along the batch"
        outcomes = self._outcomes(node, operands)
        if choice.blocks > 1:
            return self._judge_blocked(node, operands, choice) or None
        if choice not in outcomes:
            return f"{node.op} does not offer the choice {choice!r}; it has {sorted(outcomes)}"
        return outcomes[choice] or None

    def certificate(self, node: Node, operands: Sequence[TensorType], choice: Choice) -> Certificate | None:
        """Return the certificate of one choice, or None."""
        if node.op in (OPAQUE, ROW_BY_ROW) or self.reason(node, operands, choice) is not None:
            return None
        site = _Site.of(node, operands, choice)
        result = self._certify(node.op, site.pattern, site.letter(choice))
        return result if isinstance(result, Certificate) else None

    def equations(self, names: Iterable[str] | None = None) -> tuple[Equation, ...]:
        """Return the proven algebraic rules: those of the file if `only` has equations, else the rules in `names`.

        None: those that a search profits from.
        """
        if "equation" in self.only:
            return self.store.searched()
        from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED  # whoever starts a plan needs none

        wanted = [CATALOGUE[name] for name in (SEARCHED if names is None else names)]
        return tuple(rule for rule in wanted if isinstance(self._prove(rule), Certificate))

    def by_name(self) -> Mapping[str, Equation]:
        """Return the proven algebraic rules by name; only these rewrite a graph."""
        return {rule.name: rule for rule in self.equations()}

    def steps(self) -> tuple[StepRule, ...]:
        """Return the proven rules of the parallel operators."""
        return tuple(rule for rule in STEP_RULES.values() if isinstance(self._prove(rule), Certificate))

    @classmethod
    def of_file(
        cls, path: Path, note: Callable[[str], None] = lambda text: None, judged: Jury | None = None
    ) -> Certified:
        """Return the choices that a rule file allows. It is the only source of the forms of rules that it contains.

        The file only proposes rules: those that this machine has not judged yet are `judged` now, by default one by
        one, and their verdicts are kept. `note` is called with a text on each rule that is left out.
        Raises `RuleError` if the file cannot be read, or if none of its rules can be used.
        """
        from shardwright.verifier.judge import one_by_one  # the shipped catalogue needs no jury
        from shardwright.verifier.rulefile import read_rules

        verdicts = Verdicts.here()
        file = read_rules(path, verdicts)
        new = [e.rule for e in file.entries if not e.problem and e.key not in verdicts]
        if new:
            note(f"{path}: judging {len(new)} rules that this machine has not judged yet")
            verdicts.keep((judged or one_by_one)([rule for rule in new if rule is not None]))
        store = Catalogue(generator=file.generator)
        for entry in file.entries:
            certificate = None if entry.problem else verdicts.certificate(entry.key, entry.data)
            if certificate is not None:
                store.take(entry.key, entry.data, certificate, entry.note)
            else:
                why = entry.problem or verdicts.failure(entry.key).partition("\n")[0]
                note(f"{path}: left out: {entry.where}: {why}")
        if not len(store):
            raise RuleError(f"{path}: no rule of it can be used; `shardwright rules verify {path}` says why")
        only = store.forms()
        store.merge(Catalogue.load(), {"row", "steps", "equation"} - only)
        return cls(store, only)

    def _prove(self, rule: Rule) -> Certificate | str:
        stored = self.store.certificates.get(rule.hash)
        if stored is not None:
            return stored
        form = rule.to_json()["form"] if self.only else ""
        if form in self.only and not (isinstance(rule, RowRule) and rule.choice == WHOLE):
            return f"the rule file has no rule {rule.name!r}"
        proven = certify(rule)
        if isinstance(proven, Certificate):
            self.store.add(rule, proven)
        return proven

    def _outcomes(self, node: Node, operands: Sequence[TensorType]) -> dict[Choice, str]:
        """Return every choice that the row offers, with the reason why it is not certified, or ""."""
        key = (node.op, node.attrs, tuple((t.shape, t.dtype) for t in operands))
        if key not in self._nodes:
            self._nodes[key] = self._judge(node, operands)
        return self._nodes[key]

    def _judge(self, node: Node, operands: Sequence[TensorType]) -> dict[Choice, str]:
        site = _Site.of(node, operands)
        names = {letter: name for name, letter in site.letters.items()}
        offered = (*choices(ROWS[node.op], site.pattern), *sending_choices(ROWS[node.op], site.pattern))
        return {choice.renamed(names): self._reason(node, site, choice) for choice in offered}

    def _judge_blocked(self, node: Node, operands: Sequence[TensorType], choice: Choice) -> str:
        """Return the reason why a split within blocks is not certified, or ""; its rule has a refined factor string."""
        if any(needs_consecutive(ROWS[node.op], factor) for factor in choice.factors):
            return f"{node.op} needs consecutive parts; it is not split in blocks"
        try:
            site = _Site.of(node, operands, choice)
        except GraphError as error:
            return str(error)
        return self._reason(node, site, site.letter(choice))

    def _reason(self, node: Node, site: _Site, choice: Choice) -> str:
        result = self._certify(node.op, site.pattern, choice)
        return result if isinstance(result, str) else site.violated(result.guard)

    def _certify(self, row: str, pattern: Pattern, choice: Choice) -> Certificate | str:
        """Return a certificate, from the store or by a proof now, or the reason why there is none."""
        key = (row, pattern, choice)
        if key not in self._rules:
            self._rules[key] = self._look_up(row, pattern, choice)
        result = self._rules[key]
        if isinstance(result, Certificate):
            self.used[result.rule] = result
        return result

    def _look_up(self, row: str, pattern: Pattern, choice: Choice) -> Certificate | str:
        try:
            rule = derive(row, pattern, choice)
        except (GraphError, RuleError) as error:
            return str(error)
        return self._prove(rule)


@dataclass(frozen=True, slots=True)
class _Site:
    """An operator as rules see it: its pattern, the pattern's letter for each factor, and the terms of guards."""

    pattern: Pattern
    letters: Mapping[str, str]
    sizes: Mapping[str, int]
    dtype: str
    partial_sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, node: Node, operands: Sequence[TensorType], choice: Choice = WHOLE) -> _Site:
        """Return the site of a node; a choice in blocks refines its factors."""
        row, attrs = ROWS[node.op], dict(node.attrs)
        signature = row.signature([t.shape for t in operands], attrs)
        for factor in choice.factors if choice.blocks > 1 else ():
            if (number := signature.index(factor)) is not None:
                signature = signature.refined(number, choice.blocks)
        pattern, names = pattern_of(signature)
        letters = {f.name: letter for f, letter in zip(signature.factors, names, strict=True)}
        sizes = {letter: f.size for f, letter in zip(signature.factors, names, strict=True)}
        dtypes = [t.dtype for t in operands]
        return cls(pattern, letters, sizes, row.result_dtype(dtypes, attrs), row.partial_sets(dtypes, attrs))

    def letter(self, choice: Choice) -> Choice:
        """Return the choice in the pattern's letters."""
        refined = self.letters.keys() >= set(choice.factors)
        return (choice.unblocked if refined else choice).renamed(self.letters)

    def violated(self, guard: Sequence[str]) -> str:
        """Return in words the first guard that this operator cannot satisfy at any degree; "" if there is none."""
        for condition in guard:
            if condition.startswith("k | ") and min(self.sizes.values()) < 1:
                return f"guard {condition!r}: a factor has size 0"
            if condition == "numeric" and self.dtype == "bool":
                return "guard 'numeric': the result is of bools, which are not summed"
            if condition.startswith("additive "):
                partial = tuple(int(i) for i in condition[9:].split(","))
                if partial not in self.partial_sets:
                    return f"guard {condition!r}: bools or rounding among the dtypes"
        return ""


def rule_of(node: Node, operands: Sequence[TensorType], choice: Choice) -> RowRule:
    """Return the rule of a node's choice."""
    site = _Site.of(node, operands, choice)
    return derive(node.op, site.pattern, site.letter(choice))
