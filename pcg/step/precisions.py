"""The precision that a step computes in: one for the whole model, or precisions by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from shardwright.pcg import checks
from shardwright.pcg.dtypes import plain

Precision = Literal["fp32", "tf32", "amp_bf16", "bf16_params", "bf16", "amp_fp16", "fp16_params", "fp16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PrecisionByModule = tuple[tuple[str, Precision], ...]
"""Precisions by a module's name, or by a pattern that `fits` it (`pcg.step.recompute`), with everything inside it.

The first that fits decides. `*`, the last, is the base, for all other modules; without it they keep the model's own.
"""
PrecisionMode = Precision | PrecisionByModule | Mapping[str, Precision]
BASE = "*"


Casts = Literal["", "autocast", "parameters"]


class Dtypes(NamedTuple):
    """The dtypes that a precision gives every float.

    compute      for values used, activations and their gradients
    state        for master weights, accumulated gradients and optimizer states
    rates        kinds of work that run at the rate of another precision
    is_scaled    whether the loss is scaled, and the gradients scaled back and checked before the update
    casts        how `state` becomes `compute`: "autocast", operator by operator; "parameters", where parameters are
                 read, as FSDP2's `MixedPrecisionPolicy(param_dtype=…)` does; "": not at all
    """

    compute: str
    state: str
    rates: Mapping[str, str] = {}
    is_scaled: bool = False
    casts: Casts = ""


DTYPES: Mapping[Precision, Dtypes] = {
    "fp32": Dtypes("float32", "float32"),
    "tf32": Dtypes("float32", "float32", {"matmul": "tf32", "conv": "tf32"}),
    "amp_bf16": Dtypes("bfloat16", "float32", casts="autocast"),
    "bf16_params": Dtypes("bfloat16", "float32", casts="parameters"),
    "bf16": Dtypes("bfloat16", "bfloat16"),
    "amp_fp16": Dtypes("float16", "float32", is_scaled=True, casts="autocast"),
    "fp16_params": Dtypes("float16", "float32", is_scaled=True, casts="parameters"),
    "fp16": Dtypes("float16", "float16"),
    "fp8": Dtypes("bfloat16", "float32", {"matmul": "fp8"}, casts="autocast"),
}

_OF_MODULES: Mapping[Precision | None, tuple[Precision, ...]] = {
    None: ("fp32", "amp_bf16", "bf16_params"),
    "fp32": ("fp32", "amp_bf16", "bf16_params"),
    "amp_bf16": ("fp32", "amp_bf16"),
    "bf16_params": ("fp32", "bf16_params"),
    "amp_fp16": ("fp32", "amp_fp16"),
    "fp16_params": ("fp32", "fp16_params"),
}
"""The precisions of single modules by the base: fp32, or one 16-bit format, by autocast or by parameters."""


_ALIASES: Mapping[str, Precision] = {
    "float32": "fp32", "32_true": "fp32", "single": "fp32",
    "bfloat16": "bf16", "bf16_true": "bf16", "float16": "fp16", "half": "fp16", "16_true": "fp16",
    "bf16_mixed": "amp_bf16", "16_mixed": "amp_fp16", "fp16_mixed": "amp_fp16",
}  # fmt: skip
"""Other names of precisions: dtypes, which mean the whole model, and Lightning's names."""


def precision_named(name: object, owner: str, field: str) -> Precision:
    """Return the precision of a name or of a usual alias. Raise a `FieldError` if there is none."""
    precision = _ALIASES.get(plain(name), plain(name))
    return checks.choice(precision if precision in PRECISIONS else name, owner, field, PRECISIONS)  # type: ignore[return-value]


def canonical(precision: object, owner: str) -> Precision | PrecisionByModule | None:
    """Return a mapping as hashable pairs, or as its precision if it has `*` alone. Raise a `FieldError` for `owner`."""
    if precision is None:
        return None
    if isinstance(precision, str) or str(precision).startswith("torch."):
        return precision_named(precision, owner, "precision")
    given = tuple(precision.items()) if isinstance(precision, Mapping) else precision
    if not isinstance(given, tuple) or not given or not all(isinstance(p, tuple) and len(p) == 2 for p in given):
        wanted = f"one of {', '.join(map(repr, PRECISIONS))}, or a mapping from modules to these"
        raise checks.FieldError(owner, "precision", f"expected {wanted}, got {precision!r}")
    meaning = "a module's name, or a pattern of them"
    pairs: PrecisionByModule = tuple(
        (checks.text(name, owner, "precision", meaning), precision_named(precision, owner, f"precision[{name!r}]"))
        for name, precision in given
    )
    if not of_modules(pairs):
        return base_of(pairs)
    _check_together(pairs, owner)
    return pairs


def _check_together(pairs: PrecisionByModule, owner: str) -> None:
    base, names = base_of(pairs), [name for name, _ in pairs]
    if BASE in names[:-1]:
        problem = f"it fits every module, and the first that fits decides; put it behind {names[-1]!r}"
        raise checks.FieldError(owner, f"precision[{BASE!r}]", problem)
    allowed = _OF_MODULES.get(base, tuple(precision for precision in _OF_MODULES if precision))
    for name, kind in reversed(pairs):
        if kind not in allowed:
            whose = "" if name == BASE else f" in a model in {base or 'its own dtypes'}"
            problem = (
                f"expected {' or '.join(map(repr, allowed))}{whose}, got {kind!r}; modules may differ in running in "
                "float32 or in one 16-bit format, as torch.autocast or as FSDP2 has it; others are for whole models"
            )
            raise checks.FieldError(owner, f"precision[{name!r}]", problem)


def in_bf16(precision: Precision) -> str:
    """Return the precision that is to bfloat16 what this one is to float16."""
    return precision.replace("fp16", "bf16")


def base_of(precision: PrecisionMode | None) -> Precision | None:
    """Return the precision of modules that no pattern fits; None: the model's own."""
    return precision if precision is None or isinstance(precision, str) else dict(precision).get(BASE)


def of_modules(precision: PrecisionMode | None) -> PrecisionByModule:
    """Return the patterns of single modules."""
    pairs = () if precision is None or isinstance(precision, str) else dict(precision).items()
    return tuple((name, precision) for name, precision in pairs if name != BASE)


def every(precision: PrecisionMode | None) -> frozenset[Precision]:
    """Return all precisions that anything is computed in."""
    return frozenset(each for each in (base_of(precision), *dict(of_modules(precision)).values()) if each is not None)


def shown(precision: PrecisionMode | None) -> str:
    """Return the precision in words: `amp_bf16, with lm_head and model.norm in fp32`."""
    names: dict[Precision, list[str]] = {}
    for name, module_precision in of_modules(precision):
        names.setdefault(module_precision, []).append(name)
    parts = [f"with {' and '.join(mine)} in {precision}" for precision, mine in names.items()]
    return ", ".join([base_of(precision) or "the model's own", *parts])
