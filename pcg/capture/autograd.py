"""Capture of gradients: a program's are those that autograd gives the forward that `torch.export` traces.

Export records which operators run, but not how autograd treats them. So while a forward is traced, every operator is
seen here before it is recorded, and autograd's own state says what its operands are:

reads    an operand that autograd follows no further (`torch.no_grad()`, a frozen parameter, `detach`) is recorded
         detached. An operator that only gives a view does not read: `detach` is recorded as an alias, the same memory.
writes   memory that is written unseen by autograd (under `torch.no_grad()`, through `detach()` or `.data`) has the new
         value and the old gradient:  x' = detach(v) - (detach(x) - x).  The bracket is +0.0, so that x' is v bitwise.

A memory is known by its storage, and has one *owner*, the tensor whose views autograd follows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from shardwright.pcg.capture.backwards import Ungraded, grad_fn, refuse_foreign
from shardwright.pcg.capture.unseen import UnseenError

_aten = torch.ops.aten
_Dispatch = Callable[..., Any]


@contextmanager
def gradients_kept(model: nn.Module) -> Generator[Watch]:
    """Keep a forward's gradients while it is traced.

    Raise `UnseenError` if a write would give a memory two gradients.
    """
    enable = torch._C._set_grad_enabled

    def unrecorded(mode: bool) -> None:  # export would put the operators that follow into a graph of its own
        with torch._C.DisableTorchFunction():
            enable(mode)

    watch = Watch(ProxyTorchDispatchMode.__torch_dispatch__, model)
    with (
        mock.patch.object(torch._C, "_set_grad_enabled", unrecorded),
        mock.patch.multiple(torch.inference_mode, __enter__=_enter_inference, __exit__=_leave_inference),
        mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", watch.dispatch_as_method()),
    ):
        yield watch


def _enter_inference(region: Any) -> None:  # noqa: ANN401
    """Enter inference mode as `torch.no_grad()`: autograd records nothing of it."""
    region._inference_mode_context = torch.set_grad_enabled(not region.mode)


def _leave_inference(region: Any, *error: object) -> None:  # noqa: ANN401
    region._inference_mode_context.__exit__(*error)


class _Memories:
    """The memories that have gradients in the program, by storage, with their owners; nothing is kept alive."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._owners: dict[StorageWeakRef, TensorWeakRef] = {}
        self._with_gradient: dict[StorageWeakRef, Tensor] = {}
        self._parameters = {id(p): p for p in parameters if p.requires_grad}
        for parameter in self._parameters.values():
            self.give(parameter)

    def __contains__(self, x: object) -> bool:
        return _is_float(x) and _storage(x) in self._owners

    def owner(self, x: Tensor) -> Tensor:
        """Return the owner of the memory that x is in; if the owner is gone, the base of x."""
        owner = self._owners[_storage(x)]()
        return _base(x) if owner is None else owner

    def give(self, x: Tensor) -> None:
        """Make the base of x the owner of its memory."""
        self.seen_written(x)
        self._owners[_storage(x)] = TensorWeakRef(_base(x))

    def is_followed(self, x: Tensor) -> bool:
        """Return whether autograd goes on from x.

        It ends at leaves (views made without gradients, detached tensors).
        """
        x = _plain(x)
        return x.requires_grad and (grad_fn(x) is not None or id(x) in self._parameters)

    def with_gradient(self, x: Tensor, copy: Callable[[], Tensor]) -> Tensor:
        """Return the value of this memory as of the last write that autograd saw; at first, a copy."""
        storage = _storage(x)
        if storage not in self._with_gradient:
            self._with_gradient[storage] = copy()
        return self._with_gradient[storage]

    def seen_written(self, x: Tensor) -> None:
        self._with_gradient.pop(_storage(x), None)


class Watch:
    """The observations of a forward while it is traced.

    written   whether a memory that has gradients was written
    windows   results of `Tensor.unfold`, and views of them
    ungraded  the places where operators ran without gradients
    """

    def __init__(self, dispatch: _Dispatch, model: nn.Module) -> None:
        self.dispatch, self.written = dispatch, False
        self.windows: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self.memories, self.ungraded = _Memories(model.parameters()), Ungraded(model)

    def dispatch_as_method(self) -> _Dispatch:
        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
            if not mode.pre_dispatch:
                return self.dispatch(mode, func, types, args, kwargs)
            return _Call(self, mode, func, types).run(args, kwargs or {})

        return dispatch


class _Call:
    """A call of an operator in the forward."""

    def __init__(self, watch: Watch, mode: ProxyTorchDispatchMode, func: Any, types: Any) -> None:  # noqa: ANN401
        self.watch, self.mode, self.func, self.types = watch, mode, func, types
        self.memories = watch.memories

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        result = self._run(args, kwargs)
        windows = self.watch.windows
        if self.func is _aten.unfold.default or (windows and self._is_view() and args[0] in windows):
            windows.update((x, None) for x in tree_iter(result) if isinstance(x, Tensor))
        return result

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        if self.func is _aten.detach_.default:
            return self.func(*args)  # its readers are detached
        if self.func is _aten.detach.default:
            return self._alias(args, kwargs)
        written, operands = self._written(args, kwargs), list(filter(_is_float, tree_iter((args, kwargs))))
        if any(x in self.watch.windows for x in written):
            raise UnseenError(
                f"{self._name()} writes into windows of a tensor (Tensor.unfold)",
                "Capture would clear what no window has: write with slices, or into a copy (x.unfold(…).clone())",
            )
        if torch.is_grad_enabled():
            for x in operands:
                refuse_foreign(grad_fn(x), self.watch.ungraded)
        else:
            self.watch.ungraded.note()
        if not (written or any(x in self.memories for x in operands)):
            return self._call(args, kwargs)
        if self.func in _REPLACED:
            with self.mode:
                return _REPLACED[self.func](*args, **kwargs)
        if not self._is_view():
            args, kwargs = tree_map_only(Tensor, lambda x: x if _is_in(x, written) else self._read(x), (args, kwargs))
        result = self._write(written, args, kwargs) if written else self._call(args, kwargs)
        if any(x in self.memories for x in tree_iter((args, kwargs))):
            for tensor in filter(_is_float, (*written, *tree_iter(result))):
                if tensor not in self.memories:
                    self.memories.give(tensor)
        return result

    def _alias(self, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        result: Any = self._call(args, kwargs)
        get_proxy_slot(result, self.mode.tracer).proxy.node.target = _aten.alias.default
        return result

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        return self.watch.dispatch(self.mode, self.func, self.types, tuple(args), kwargs)

    def _record(self, func: Any, *args: Any) -> Any:  # noqa: ANN401
        """Record an operator beside the user's own; autograd does not see it."""
        with torch.no_grad():
            return self.watch.dispatch(self.mode, func, (), args, {})

    def _written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        written: list[Tensor] = []
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written += (x for x in tree_iter(value) if isinstance(x, Tensor))
        return written

    def _name(self) -> str:
        return self.func._schema.name.removeprefix("aten::")

    def _is_view(self) -> bool:
        infos = [returned.alias_info for returned in self.func._schema.returns]
        return any(info is not None and not info.is_write for info in infos)

    def _read(self, x: Tensor) -> Tensor:
        if x not in self.memories or (torch.is_grad_enabled() and self.memories.is_followed(x)):
            return x
        return self._record(_aten.detach.default, x)

    def _write(self, written: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        before: dict[StorageWeakRef, tuple[Tensor, Tensor]] = {}
        for tensor in (x for x in written if x in self.memories):
            self.watch.written = True
            owner, storage = self.memories.owner(tensor), _storage(tensor)
            if torch.is_grad_enabled() and _base(tensor) is owner:
                self.memories.seen_written(tensor)
            if not torch.is_grad_enabled() or (owner.requires_grad and _base(tensor) is not owner):
                before[storage] = owner, self._before(tensor, owner)
            elif not tensor.requires_grad:
                still = self._record(_aten.clone.default, self._record(_aten.detach.default, owner))
                self._record(_aten.copy_.default, owner, still)
                self.memories.give(tensor)
        result = self._call(args, kwargs)
        for tensor in written:
            if owned := before.pop(_storage(tensor), None):
                self._restore(tensor, *owned)
        return result

    def _before(self, tensor: Tensor, owner: Tensor) -> Tensor:
        if _plain(tensor) is not tensor:
            raise UnseenError(
                f"{self._name()} writes in place, without a gradient, inside torch.vmap",
                "Capture would lose the gradient: write out of place, or outside of torch.vmap",
            )
        return self.memories.with_gradient(owner, lambda: self._record(_aten.clone.default, owner))

    def _restore(self, tensor: Tensor, owner: Tensor, before: Tensor) -> None:
        """Give the owner its present value, with the gradient that it had `before`."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UnseenError(
                f"{self._name()} writes what has a gradient through detach() or .data, "
                "whose memory then has two gradients",
                "Capture keeps one: write into a copy (x.detach().clone())",
            )
        value = self._record(_aten.detach.default, self._record(_aten.clone.default, owner))
        nothing = self._record(_aten.sub.Tensor, self._record(_aten.detach.default, before), before)
        finite = self._record(_aten.eq.Scalar, nothing, 0)  # infinity less itself is not a number
        nothing = self._record(_aten.where.ScalarOther, finite, nothing, 0.0)
        self._record(_aten.copy_.default, owner, self._record(_aten.sub.Tensor, value, nothing))


def _fill_diagonal(x: Tensor, value: complex, wrap: bool = False) -> Tensor:
    """Fill a diagonal through views that have rows, in place of torch's view by strides."""
    rows, columns = x.shape[0], x.shape[-1]
    blocks = range(0, rows, columns + 1) if wrap and x.dim() == 2 else (0,)
    for start in blocks:
        diagonal = x[start : start + columns] if x.dim() == 2 else x
        while diagonal.dim() > 1:
            diagonal = diagonal.diagonal(0, 0, -1)
        diagonal.fill_(value)
    return x


def _renormalise(*args: object) -> Tensor:
    raise UnseenError(
        "forward renormalises the table of an embedding (max_norm)",
        "Parameters change in the optimizer's step alone: scale the rows that forward reads, or renormalise the table "
        "after each step",
    )


def _scatter_by_strides(*args: object) -> Tensor:
    raise UnseenError(
        "forward calls as_strided_scatter, whose gradient torch computes wrongly (that of what is written over, 2.14)",
        "Use slice_scatter, select_scatter or diagonal_scatter, or write: y = x.clone(); y.as_strided(…).copy_(z)",
    )


_REPLACED: dict[Any, Callable[..., object]] = {
    _aten.fill_diagonal_.default: _fill_diagonal,
    _aten.as_strided_scatter.default: _scatter_by_strides,
    _aten.embedding_renorm_.default: _renormalise,
}


def _is_in(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(x is tensor for tensor in tensors)


def _is_float(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout is torch.strided and (x.is_floating_point() or x.is_complex())


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_plain(x).untyped_storage())


def _base(x: Tensor) -> Tensor:
    x = _plain(x)
    return x if x._base is None else x._base


def _plain(x: Tensor) -> Tensor:
    """Return the tensor that `torch.vmap` sees a batch of."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x
