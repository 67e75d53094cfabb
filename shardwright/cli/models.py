"""The sources of the command line's models: a function in a file, or a transformers config."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwright.pcg.errors import ShardwrightError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Request:
    """The user's request for a model; see `options.model_options`."""

    model: str | None
    hf_config: Path | str | None = None
    batch_size: int = 8
    seq_len: int = 128
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class Loaded:
    """A model and the arguments of one call with a global batch."""

    model: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load(request: Request, *, fake: bool = False) -> Loaded:
    """Load the requested model, seeded. With `fake`, a model from a config is built without memory for its weights."""
    if (request.model is None) == (request.hf_config is None):
        raise ShardwrightError("give either a model as FILE.py:FUNCTION or --hf-config FILE")
    import torch  # a config whose capture is kept needs none

    torch.manual_seed(request.seed)
    if request.model is not None:
        return load_model(request.model)
    from shardwright.cli.huggingface import load_config

    assert request.hf_config is not None
    model, batch = load_config(Path(request.hf_config), request.batch_size, request.seq_len, request.dtype, fake=fake)
    return Loaded(model, (), batch)


def load_model(spec: str) -> Loaded:
    """Return the model and batch of `file.py:function`, which returns `(model, batch)`.

    A third value may be the `loss_fn` of a model that returns no loss. The batch is a mapping of keyword arguments, a
    sequence of positional ones, or a tensor.

    Raises `ShardwrightError` naming the file, and the line where the user's code failed.
    """
    path, _, name = spec.rpartition(":")
    if not path or not name.isidentifier():
        raise ShardwrightError(f"model {spec!r}: give it as FILE.py:FUNCTION, such as examples/zoo.py:gpt2")
    module = _import_file(Path(path), spec)
    function = getattr(module, name, None)
    if not callable(function):
        listed = ", ".join(_offered(module, callable))
        raise ShardwrightError(f"model {spec!r}: {path} has no function {name!r}; it has {listed or 'none'}")
    try:
        returned = function()
    except Exception as error:
        raise ShardwrightError(f"model {spec!r}: {_where(error, path)}") from error
    return _unpack(returned, spec)


def functions(path: str) -> list[str]:
    """Return the public functions that a file defines; raise `ShardwrightError` where there are none."""
    names = _offered(_import_file(Path(path), path), inspect.isfunction)
    if not names:
        raise ShardwrightError(f"model {path!r}: the file has no function that could return (model, batch)")
    return names


def _offered(module: ModuleType, kind: Callable[[object], bool]) -> list[str]:
    names = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and kind(v))
    return [n for n in names if not n.startswith("_")]


def _import_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ShardwrightError(f"model {spec!r}: there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: files beside it can be imported
    module_spec = importlib.util.spec_from_file_location(f"_shardwright_model_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ShardwrightError(f"model {spec!r}: {path} is no Python file; its name should end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look it up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ShardwrightError(f"model {spec!r}: {_where(error, str(path))}") from error
    return module


def _where(error: Exception, path: str) -> str:
    """Return the error of the user's code, and the last line of it in the user's file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(path).name]
    line = f"{path}:{frames[-1].lineno}: " if frames else f"{path}: "
    return f"{line}{type(error).__name__}: {error}"


def _unpack(returned: object, spec: str) -> Loaded:
    import torch
    from torch import nn

    from shardwright.pcg.capture.with_loss import with_loss

    match returned:
        case nn.Module():
            problem = "returns a model without a batch"
        case (nn.Module() as model, Mapping() as batch):
            return Loaded(model, (), {str(k): v for k, v in batch.items()})
        case (nn.Module() as model, torch.Tensor() as batch):
            return Loaded(model, (batch,))
        case (nn.Module() as model, (tuple() | list()) as batch):
            return Loaded(model, tuple(batch))
        case (nn.Module() as model, Mapping() | torch.Tensor() | tuple() | list() as batch, loss_fn) if callable(
            loss_fn
        ):
            return _unpack((with_loss(model, loss_fn), batch), spec)
        case _:
            problem = f"returns {type(returned).__name__}"
    raise ShardwrightError(
        f"model {spec!r}: the function {problem}; return (model, batch), the batch being the keyword arguments of one "
        "call, such as dict(input_ids=..., labels=...); or (model, batch, loss_fn)"
    )
