"""Names of dtypes as people write them: `bf16`, `half`, `torch.float32`, or a dtype of torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.pcg import checks

_ALIASES: Mapping[str, str] = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "single": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip


def plain(name: object) -> str:
    """Return a name without usual decorations: `torch.BF16` is `bf16`, `bf16-mixed` is `bf16_mixed`."""
    return str(name).strip().lower().removeprefix("torch.").replace("-", "_")


def dtype_named(name: object, owner: str, field: str, allowed: Collection[str]) -> str:
    """Return the dtype, one of `allowed`, by the graph's name for it; raise a `FieldError` for another one."""
    dtype = _ALIASES.get(plain(name), plain(name))
    return checks.choice(dtype if dtype in allowed else name, owner, field, allowed)
