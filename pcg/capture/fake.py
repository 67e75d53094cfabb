"""Models without memory: `with fake():` builds one of any size from tensors that have a shape and no values."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode


class _Mode(FakeTensorMode):
    """A fake mode under which modules can be converted.

    torch converts a fake parameter (`module.to(torch.bfloat16)`) by swapping it with the converted one, and refuses
    that for a tensor with weak references. A mode itself has one to each tensor that it makes. So its notes
    are dropped as they are made, except while a graph is traced, which may need them.
    """

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] = {}
    ) -> object:
        made = super().dispatch(func, types, args, kwargs)
        if get_proxy_mode() is None:
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return made


@contextmanager
def fake() -> Generator[None]:
    """Tensors that are made inside have shapes and dtypes, and no memory: `shardwright.plan` needs no more.

    Models are built in it as usual, converted (`model.to(torch.bfloat16)`) and wrapped (peft), also after it. Tensors
    from elsewhere may be used in it. Parameters are on the CPU, unless the model says otherwise.

        with sw.fake():
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        plan = sw.plan(model, cluster, kwargs=batch)
    """
    with _Mode(allow_non_fake_inputs=True):
        yield
