"""What `torch.export` finds out anew for each of the many small models that tests capture: half of the time it takes.

It depends on which operators are registered, and on how, and only changes with that. Ranks and commands that run in
processes of their own have torch as it is.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program


def look_up_once() -> None:
    """Let this process, and its forks, do so again only after something else was registered."""
    exported_program._collect_all_valid_cia_ops = _collecting(exported_program._collect_all_valid_cia_ops)
    exported_program._override_composite_implicit_decomp = _overriding(
        exported_program._override_composite_implicit_decomp
    )


def _collecting(collect: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    """The operators that can be kept whole."""
    known = dict[Any, set[Any]]()

    def kept() -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        key = (*torch.ops._dir, *registered)
        if key not in known:
            known[key] = collect()
        return known[key]

    return kept


class _Kernels(NamedTuple):
    """Of operators: those they have, and those they have while a graph is decomposed; and how fake tensors run them."""

    usual: dict[Any, dict[Any, Any]]
    meanwhile: dict[Any, dict[Any, Any]]
    fake: dict[Any, Any]


def _overriding(override: Callable[[Mapping[Any, Any]], Any]) -> Callable[[Mapping[Any, Any]], Any]:
    """Other kernels, while a graph is decomposed, for hundreds of operators with ten backends each."""
    known = list[tuple[Mapping[Any, Any], _Kernels]]()

    @contextmanager
    def overridden(wanted: Mapping[Any, Any]) -> Generator[None]:
        usual = {op: dict(op.py_kernels) for op in wanted}
        if op_implementations_dict.keys() & wanted.keys():
            with override(wanted):
                yield
            return
        if not known or known[0][0] != wanted or known[0][1].usual != usual:
            with override(wanted):
                meanwhile = {op: dict(op.py_kernels) for op in wanted}
                fake = {op: op_implementations_dict[op] for op in wanted}
                known[:] = [(dict(wanted), _Kernels(usual, meanwhile, fake))]
                yield
            return
        kernels = known[0][1]
        _install(kernels.meanwhile)
        op_implementations_dict.update(kernels.fake)
        try:
            yield
        finally:
            _install(kernels.usual)
            for op in wanted:
                op_implementations_dict.pop(op, None)

    return overridden


def _install(kernels: Mapping[Any, Mapping[Any, Any]]) -> None:
    for op, found in kernels.items():
        op.py_kernels.clear()
        op.py_kernels.update(found)
        op._dispatch_cache.clear()
