"""The modules of a lowered model: names for parameters and buffers, without code of their own.

The program contains everything that the model's modules did. So a later change of a module (hooks, attributes,
parameters, mode) would have no effect. It raises an error that says what to do instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.lowering import private
from shardwright.lowering.store.members import Members
from shardwright.pcg.capture.hooks import hooks_of_all
from shardwright.pcg.errors import ShardwrightError

_LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_DICTIONARIES = (nn.ModuleDict, nn.ParameterDict)
_HOOKS = ("forward_pre", "forward", "full_backward_pre", "full_backward", "backward")


class Fixed(nn.Module):
    """A module whose parameters, buffers and submodules are the program's, and stay the same objects."""

    _baked: frozenset[str] = frozenset()
    """The model's attributes, whose values are in the program."""

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        if name == "__class__":
            self._refuse_wrapper(f"what makes a {value.__name__} of it (replicate, fully_shard, parametrizations)")
        if name == "training" and value == self.training and self._is_baked(name):
            raise ShardwrightError(
                f"{self._where()}: torch.compile(...) would compile what calls the program and not the program; call "
                "parallel.compile(...)"
            )
        kept = (self.__dict__.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        held = isinstance(value, (nn.Parameter, nn.Module)) or any(name in names for names in kept)
        if held or self._is_baked(name):
            self._refuse(f"{name} = ...", "copy into it, under torch.no_grad()" if isinstance(value, Tensor) else "")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in {*self._parameters, *self._buffers, *self._modules}:
            self._refuse(f"del {name}")
        super().__delattr__(name)

    def _is_baked(self, name: str) -> bool:
        return name in self._baked

    def _refuse(self, what: str, instead: str = "") -> NoReturn:
        raise ShardwrightError(
            f"{self._where()}: {what} would do nothing, as the program was made from the model as it was; "
            + (f"{instead}, or " if instead else "")
            + "do it to the model before compiling it"
        )

    def _where(self) -> str:
        return "the compiled model"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._refuse(f"register_parameter({name!r})")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._refuse(f"register_buffer({name!r})")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse(f"add_module({name!r})")

    def register_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse(f"register_module({name!r})")

    def apply(self, fn: Callable[[nn.Module], None]) -> Fixed:
        """Raise: such functions look for `nn.Linear` and so on, and modules here have other types."""
        self._refuse("apply(...)", "go through named_parameters()")

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:  # noqa: ANN401
        self._refuse("register_load_state_dict_pre_hook(...)", "change the state before load_state_dict")

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:  # noqa: ANN401
        self._refuse("register_load_state_dict_post_hook(...)", "call it after load_state_dict")

    def train(self, mode: bool = True) -> Fixed:
        """Return the module if it has this mode; raise for the other mode, as the mode is part of the program."""
        if mode != self.training:
            have, want = ("train", "eval") if self.training else ("eval", "train")
            raise ShardwrightError(
                f"the model was captured in {have} mode, which is part of the program; "
                f"call model.{want}() and compile again for {want} mode"
            )
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Fixed:
        """Run `to(...)`, `cpu()`, `float()` and so on if they change nothing; else raise."""
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            own = private.unwrap(value) if isinstance(value, DTensor) else value
            probe = own.new_empty(0)
            there = fn(probe)
            if there is not probe or fn(own) is not own:
                raise ShardwrightError(
                    f"a lowered module cannot be moved or cast (its program holds its parameters' storage), and this "
                    f"would make {name}, {_kind_of(own)}, {_kind_of(there)}; move or cast the model before compiling it"
                )
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Raise for `DistributedDataParallel`, in which `accelerate.prepare` and Trainers wrap models."""
        if sys._getframe(1).f_globals.get("__name__") != DistributedDataParallel.__module__:
            raise AttributeError(f"{type(self).__name__} has no attribute '_ddp_params_and_buffers_to_ignore'")
        self._refuse_wrapper(
            "DistributedDataParallel",
            "leave it out where a library wraps models (accelerate: prepare the data loader and the scheduler, not the "
            "model)",
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        """Raise, as `DataParallel` would copy the module."""
        self._refuse_wrapper("DataParallel")

    def _refuse_wrapper(self, what: str, instead: str = "use it as it is") -> NoReturn:
        raise ShardwrightError(
            f"{self._where()} already runs on all ranks by its plan, and sums its gradients over them; {what} would do "
            f"that a second time, or undo it: {instead}"
        )


def _kind_of(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} on {value.device}"


class Part(Fixed):
    """A module of the model, by its path. It is never called, so its hooks would not be called either."""

    def __init__(self, path: str, *, training: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(path=path, training=training)

    def _where(self) -> str:
        return str(self.__dict__["path"])

    def _is_baked(self, name: str) -> bool:
        return not name.startswith("_")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: only the whole compiled model can be called."""
        raise ShardwrightError(
            f"{self._where()}: only the whole compiled model can be called; call the module of the model itself"
        )


class Parts(Part):
    """A dictionary of parts or parameters."""

    def __len__(self) -> int:
        return len(self._entries())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries())

    def __getitem__(self, at: Any) -> Any:  # noqa: ANN401
        return self._entries()[at]

    def __setitem__(self, at: Any, value: object) -> None:  # noqa: ANN401
        self._refuse(f"[{at!r}] = ...")

    def __contains__(self, name: object) -> bool:
        return name in self._entries()

    def keys(self) -> KeysView[str]:
        return self._entries().keys()

    def values(self) -> ValuesView[Any]:
        return self._entries().values()

    def items(self) -> ItemsView[str, Any]:
        return self._entries().items()

    def _entries(self) -> dict[str, Any]:
        return {**self._modules, **self._parameters}


class PartList(Part):
    """A list of parts or parameters."""

    def __len__(self) -> int:
        return len(self._entries())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries())

    def __getitem__(self, at: int | slice) -> Any:  # noqa: ANN401
        if not isinstance(at, slice):
            return self._entries()[at]
        part = PartList(f"{self._where()}[{at.start or 0}:{at.stop}]", training=self.training)
        for number, value in enumerate(self._entries()[at]):
            kept: dict[str, Any] = part._modules if isinstance(value, nn.Module) else part._parameters
            kept[str(number)] = value
        return part

    def __setitem__(self, at: Any, value: object) -> None:  # noqa: ANN401
        self._refuse(f"[{at!r}] = ...")

    def _entries(self) -> list[Any]:
        return [*self._modules.values(), *self._parameters.values()]


def _part_of(module: nn.Module) -> type[Part]:
    return PartList if isinstance(module, _LISTS) else Parts if isinstance(module, _DICTIONARIES) else Part


def _no_hooks(kind: str) -> Callable[..., NoReturn]:
    def register(self: Part, *args: Any, **kwargs: Any) -> NoReturn:
        what = f"a {kind.replace('_', ' ')} hook"
        raise ShardwrightError(
            f"{self._where()}: {what} would never be called, as the program does not run module by module; hooks on "
            "parameters are called, and those on the compiled model by `parallel(**batch)`; return from the model's "
            "forward what is to be seen, or put what the hook computes there"
        )

    return register


for _kind in _HOOKS:
    setattr(Part, f"register_{_kind}_hook", _no_hooks(_kind))


def names_of(model: nn.Module) -> list[str]:
    """Return the names of modules, then parameters, then buffers, each in the order in which PyTorch lists them."""
    named = (model.named_modules, model.named_parameters, model.named_buffers)
    return [name for each in named for name, _ in each(remove_duplicate=False)]


def mirror(target: Fixed, model: nn.Module, values: Mapping[str, Tensor], order: Sequence[str]) -> None:
    """Give `target` the model's tree of names, with parts that hold these tensors, or None for a name without one.

    `order`: `names_of` the model on rank 0. Code that gathers each parameter in turn must do so in the same order on
    all ranks.
    """
    place = {name: number for number, name in enumerate(order)}
    for path, module in sorted(model.named_modules(remove_duplicate=False), key=lambda item: place[item[0]]):
        here: nn.Module = target
        names = path.split(".") if path else []
        for depth, part in enumerate(names):
            if here._modules.get(part) is None:
                here._modules[part] = _part_of(module)(".".join(names[: depth + 1]), training=module.training)
            here = here.get_submodule(part)
        if None in module._modules.values():  # so that others keep their numbers
            here._modules.update(dict.fromkeys(module._modules))
        prefix = f"{path}." if path else ""
        for kind, own in (("_parameters", module._parameters), ("_buffers", module._buffers)):
            ordered = sorted(own, key=lambda name, at=prefix: place.get(at + name, -1))
            here.__dict__[kind] = Members(path, {name: values.get(prefix + name) for name in ordered})
        here._non_persistent_buffers_set |= module._non_persistent_buffers_set


def show_carried(target: Fixed, values: Mapping[str, Tensor]) -> None:
    """Register carried tensors by their paths, as non-persistent buffers.

    Forward changes them although they are not buffers of the model.
    """
    for path, value in values.items():
        names = path.split("[")[0].split(".")
        here: nn.Module = target
        while len(names) > 1 and isinstance(inner := here._modules.get(names[0]), nn.Module):
            here, path = inner, path.removeprefix(f"{names.pop(0)}.")
        if path not in here._buffers:
            here._non_persistent_buffers_set.add(path)
            dict.__setitem__(here._buffers, path, value)


def bake(target: Fixed, model: nn.Module) -> None:
    """Make `target` refuse changes of its mode and of the model's attributes that `target` does not have."""
    given = (name for name in vars(model) if not name.startswith("_") and name not in vars(target))
    target.__dict__["_baked"] = frozenset({*given, "training"})


def refuse_own_hooks(module: nn.Module) -> None:
    """Raise if the compiled model, or all modules, have hooks, which only a call of the model runs."""
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    if any(own) or any(hooks_of_all().values()):
        raise ShardwrightError(
            "forward_backward does not call the hooks of the compiled model; run `loss = parallel(**batch)` and "
            "`loss.backward()` in its place, or remove them"
        )
