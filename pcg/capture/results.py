"""The results of operators on tensors without data: known once for all operands of the same types.

A model of many layers asks for the same results again and again. torch knows them too, and takes several times as long
to look one up and to make it anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_UNKNOWN_BEFORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""The tags of operators whose results do not follow from the types of their operands, or that change these."""
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The kinds of arguments, beside tensors and lists, that are compared by value."""


class _Type(NamedTuple):
    """The type of a tensor without data, and where it lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: FakeTensor) -> _Type:
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device)


class _Result(NamedTuple):
    """A result: its type, and the number of the operand of which it is a view; None: it has memory of its own."""

    type: _Type
    view_of: int | None


class _UnlikeError(Exception):
    """Another kind of argument or result, of which nothing is known here."""


class KnownResults:
    """The results of operators under a mode of tensors without data, by operator and arguments."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known = dict[Hashable, tuple[list[_Result], type | None] | None]()

    def of(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return what the operator returns, from its arguments' types where it has been called with such ones."""
        operands = list[FakeTensor]()
        try:
            key = func, torch.get_default_dtype(), *self._said((args, kwargs), operands)
        except _UnlikeError:
            return func(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            return func(*args, **kwargs) if known is None else self._made(*known, operands)
        result = func(*args, **kwargs)
        self._known[key] = self._seen(func, result, operands)
        return result

    def _said(self, value: object, operands: list[FakeTensor]) -> Iterator[Hashable]:
        """Yield all that results may follow from in a value; raise `_UnlikeError` for what is not known here.

        `operands`: receives its tensors.
        """
        if isinstance(value, Tensor):
            if type(value) is not FakeTensor or not self._is_plain(value):
                raise _UnlikeError
            operands.append(value)
            yield _Type.of(value)
            yield value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            yield len(value)
            for item in value:
                yield from self._said(item, operands)
        elif isinstance(value, Mapping):
            yield tuple(value)
            yield from self._said(tuple(value.values()), operands)
        elif isinstance(value, _PLAIN):
            yield type(value)  # 1 is True, and equal to 1.0
            yield value
        else:
            raise _UnlikeError

    def _is_plain(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor is of this mode, and nothing but its type says what operators make of it."""
        is_viewed = tensor.is_conj() or tensor.is_neg()
        return tensor.fake_mode is self._mode and tensor.constant is None and not is_viewed and not tensor.is_sparse

    def _seen(
        self, func: OpOverload, result: object, operands: list[FakeTensor]
    ) -> tuple[list[_Result], type | None] | None:
        """Return what there is to know of a result, and the kind of list it is; None where it may not be made anew."""
        if func.namespace != "aten" or func._schema.is_mutable or not _UNKNOWN_BEFORE.isdisjoint(func.tags):
            return None
        tensors = [result] if isinstance(result, Tensor) else result
        if not isinstance(tensors, (list, tuple)) or not tensors:
            return None
        storages, found = [x.untyped_storage()._cdata for x in operands], list[_Result]()
        for tensor in tensors:
            if type(tensor) is not FakeTensor or not self._is_plain(tensor) or any(tensor is x for x in operands):
                return None
            storage = tensor.untyped_storage()._cdata
            view_of = storages.index(storage) if storage in storages else None
            if view_of is None:
                storages.append(storage)  # a second result in new memory is no view of an operand
            elif view_of >= len(operands):
                return None
            found.append(_Result(_Type.of(tensor), view_of))
        return found, None if isinstance(result, Tensor) else type(result)

    def _made(self, results: list[_Result], kind: type | None, operands: list[FakeTensor]) -> object:
        """Return new tensors like these results."""
        guard = torch._C._DisableTorchDispatch()  # what is made here is seen by no mode
        try:
            made = [self._new(result, operands) for result in results]
        finally:
            del guard
        return made[0] if kind is None else kind(made)

    def _new(self, result: _Result, operands: list[FakeTensor]) -> FakeTensor:
        (shape, stride, offset, dtype, device), view_of = result
        if view_of is None:
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            plain = torch.empty(0, dtype=dtype, device="meta")
            plain.set_(operands[view_of].untyped_storage(), offset, shape, stride)
        return FakeTensor(self._mode, plain, device)
