"""Models without memory: `with fake():` builds one of any size from tensors that have a shape and no values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import init

from shardwright.pcg.capture.record import Record
from shardwright.pcg.capture.replay import replay
from shardwright.pcg.errors import PlanError

_TRUNCATED = "_no_grad_trunc_normal_"


class _Mode(FakeTensorMode):
    """A fake mode under which modules can be converted.

    torch converts a fake parameter (`module.to(torch.bfloat16)`) by swapping it with the converted one, and refuses
    that for a tensor with weak references. A mode itself has one to each tensor that it makes. So its notes
    are dropped as they are made, except while a graph is traced, which may need them.

    `record`: how its tensors were made, by operators that no other one called; capture makes and writes none.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.record, self._is_noting = Record(), True

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] = {}
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and (number := self._number(args[0])) is not None:
            return number
        with self.unnoted() as notes:
            made = super().dispatch(func, types, args, kwargs)
        if notes:
            self.record.note(func, args, kwargs, made)
        if get_proxy_mode() is None:
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return made

    def _number(self, tensor: object) -> object:
        """Return the only element of a tensor that was made here without draws; None for others."""
        window = self.record.window(tensor) if self._is_noting and isinstance(tensor, FakeTensor) else None
        if window is None or any(self.record.steps[i].draws for i in self.record.needed([window.version])):
            return None
        with unset_fake_temporarily():
            return next(value.item() for _, value in replay(self.record, {"": window}))

    def __deepcopy__(self, memo: object) -> _Mode:
        """Return the mode itself: a copy of one of its tensors is another of its tensors."""
        return self

    @contextmanager
    def unnoted(self) -> Generator[bool]:
        """Note nothing for a while; yield whether operators were noted before."""
        before, self._is_noting = self._is_noting, False
        try:
            yield before
        finally:
            self._is_noting = before


@contextmanager
def fake() -> Generator[None]:
    """Tensors that are made inside have shapes and dtypes, and no memory: `shardwright.plan` needs no more.

    Models are built in it as usual, converted (`model.to(torch.bfloat16)`) and wrapped (peft), also after it. Tensors
    from elsewhere may be used in it. Parameters are on the CPU, unless the model says otherwise.

        with sw.fake():
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        plan = sw.plan(model, cluster, kwargs=batch)
    """
    mode = _Mode()
    try:
        with mode, mock.patch.object(init, _TRUNCATED, _noted(getattr(init, _TRUNCATED))):
            yield
    finally:
        mode.record.close()


def record_of(tensor: Tensor) -> Record | None:
    """Return the record of how a fake tensor was made, if it was made inside of `fake`, on the CPU."""
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" else None
    return mode.record if isinstance(mode, _Mode) else None


def unnoted(mode: FakeTensorMode | None) -> AbstractContextManager[object]:
    """Let a mode of `fake` note nothing for a while."""
    return mode.unnoted() if isinstance(mode, _Mode) else nullcontext()


def off_meta(model: nn.Module) -> None:
    """Put fake tensors on the CPU, which can be captured, in the place of parameters and buffers on device meta.

    Raises `PlanError` for other tensors of modules on device meta.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                raise PlanError(
                    f"{path + '.' if path else ''}{name} is on device meta, and neither a parameter nor a buffer that "
                    "could be read from files; build the model inside `with shardwright.fake()`, which notes its values"
                )
    made = dict[int, Tensor]()
    with _Mode():
        for module in model.modules():
            kinds: tuple[Any, ...] = (module._parameters, module._buffers)
            for held in kinds:
                for name, value in held.items():
                    if value is not None and value.device.type == "meta":
                        held[name] = made.setdefault(id(value), _like(value))


def _like(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    made = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
    vars(made).update(vars(value))
    return made


def _noted(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that fills tensors; of fake ones it is noted as one step, as it looks at what it has drawn."""

    def noted(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not isinstance(tensor, FakeTensor) or not isinstance(tensor.fake_mode, _Mode):
            return fill(tensor, *args, **kwargs)
        tensor.fake_mode.record.note_filling(fill, tensor, args, kwargs)
        return tensor

    return noted
