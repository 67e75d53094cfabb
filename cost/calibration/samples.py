"""Samples to time: one small application of each operator of the op table, with operand shapes and attributes.

A row whose factor string says everything gets its sample from it; `_special` holds the others. Operators that are never
trained or never dispatched alone have no sample: they cost the device's `op_overhead_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from shardwright.cost.compute.work import Local, Passes, passes
from shardwright.pcg.attrs import Attr
from shardwright.pcg.factors import Shape
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType, is_float

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """An operator on operands of these shapes.

    Attributes:
        indices: operands that are int64: 0, 1, …, below the size of the first operand's dimension 0.
        masks: operands that are bools.
        copies: a view that has to copy, as its operand is stored transposed.
    """

    op: str
    shapes: tuple[Shape, ...]
    dtype: str = "float32"
    attrs: Mapping[str, Attr] = field(default_factory=dict, hash=False)
    indices: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    copies: bool = False

    @property
    def key(self) -> str:
        """The probe's name, different for all probes."""
        shapes = " ".join("×".join(map(str, shape)) or "scalar" for shape in self.shapes)
        causal = " causal" if self.attrs.get("causal") else ""
        return f"{self.op} {self.dtype} {shapes}{causal}"

    @property
    def gradients(self) -> dict[str, slice]:
        """The timed calls of a backward that has kernels of its own: by key, the operands that get a gradient.

        One call computes all gradients. Where each gradient has a kernel, one more call per operand computes it alone,
        which says how to divide the time of all. (A single call includes the dispatch too, so the smallest shares
        appear closer to each other than they are.)
        """
        works = self.passes().backward
        if not any(work.backward for work in works):
            return {}
        alone = {f"{self.key} gradient {operand}": slice(operand, operand + 1) for operand in range(len(works))}
        return {f"{self.key} backward": slice(None), **(alone if len(alone) > 1 else {})}

    def passes(self) -> Passes:
        """Return the kernels that the cost model sees, forward and backward."""
        row = ROWS[self.op]
        signature = row.signature(self.shapes, self.attrs)
        dtypes = [self._dtype(operand) for operand in range(len(self.shapes))]
        operands = tuple(
            TensorType(shape, dtype, (), dtype == self.dtype) for shape, dtype in zip(self.shapes, dtypes, strict=True)
        )
        dtype = row.result_dtype(dtypes, self.attrs)
        result = TensorType(signature.result_shape, dtype, (), is_float(dtype))
        drawn = result.num_elements if row.random else 0
        extents = tuple(factor.size for factor in signature.factors)
        return passes(
            Local(row, self.attrs, signature, extents, operands, result, drawn, "copy" if self.copies else "")
        )

    def operands(self, device: str) -> list[Tensor]:
        """Return new operands; floats require a gradient."""
        import torch

        tensors: list[Tensor] = []
        for operand, shape in enumerate(self.shapes):
            match self._dtype(operand):
                case "int64":
                    tensors.append(torch.arange(prod(shape), device=device).reshape(shape) % self.shapes[0][0])
                case "bool":
                    tensors.append(torch.ones(shape, dtype=torch.bool, device=device))
                case dtype:
                    value = (torch.rand(shape, device=device) + 0.5).to(getattr(torch, dtype))
                    tensors.append(value.requires_grad_())
        return [tensor.transpose(0, 1) for tensor in tensors] if self.copies else tensors

    def function(self, runtime: object) -> Callable[..., Tensor]:
        """Return the operator as a lowered program calls it; `runtime` is the module that programs call `rt`."""
        import torch
        from torch.nn import functional as F

        names = [f"x{operand}" for operand in range(len(self.shapes))]
        more = {"*": ", ".join(names), "*1": ", ".join(names[1:])}
        text = ROWS[self.op].torch.format(*names, **self.attrs, **more)
        scope: dict[str, Any] = {"torch": torch, "F": F, "rt": runtime}
        return eval(f"lambda {', '.join(names)}: {text}", scope)

    def _dtype(self, operand: int) -> str:
        return "int64" if operand in self.indices else "bool" if operand in self.masks else self.dtype


_WINDOW = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
SMALL = 4
"""The side of a matrix for which a kernel takes next to nothing."""
LOOPS = ("expert_linear", "experts", "grouped_mm")
"""Operators that loop over groups on the host in fp32, the dtype that dispatch is timed in; in 16 bits, one kernel."""
IDLE = ("contiguous",)
"""Operators that do nothing on samples, which are contiguous."""
_UNTRAINED = ("floor_divide", "bitwise_and", "bitwise_or", "binary_cross_entropy")  # not on these trained floats


def _special(n: int) -> tuple[Probe, ...]:
    """Return samples with side `n` of the operators whose factor string does not say everything."""
    x, heads = (n, n), (2, 2, n, n)
    image = (2, 8, max(4, n // 8), max(4, n // 8))
    return (
        Probe("gelu", (x,), attrs={"approximate": "none"}),
        Probe("cast", (x,), attrs={"dtype": "float64"}),
        Probe("where", (x, x, x), masks=(0,)),
        Probe("reshape", (x,), attrs={"shape": (n * n,)}),
        Probe("permute", (x,), attrs={"dims": (1, 0)}),
        Probe("expand", (x,), attrs={"shape": (3, n, n)}),
        Probe("slice", (x,), attrs={"dim": 1, "start": 0, "stop": n // 2, "step": 1}),
        Probe("concat", (x, x), attrs={"dim": 0}),
        Probe("sum", (x,), attrs={"dims": (1,), "keepdim": False}),
        Probe("amax", (x,), attrs={"dims": (1,), "keepdim": False}),
        Probe("softmax", (x,), attrs={"dim": 1}),
        Probe("log_softmax", (x,), attrs={"dim": 1}),
        Probe("cumsum", (x,), attrs={"dim": 1, "dtype": "float32"}),
        Probe("sort_values", (x,), attrs={"dim": 1, "descending": True}),
        Probe("topk_values", (x,), attrs={"dim": 1, "k": 2}),
        Probe("linear", ((2, n, n), x)),
        Probe("matmul", (heads, heads)),
        Probe("conv2d", ((1, 1, 1, 1),) * 2,
              attrs={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}),
        Probe("grouped_mm", (x, (4, n, n), (4,)), indices=(2,)),
        Probe("expert_linear", (x, (4, n, n), (n,)), attrs={"offset": None}, indices=(2,)),
        Probe("experts", (x, (n, 2), (n, 2), (4, n, 2 * n), (4, n, n)),
              attrs={"activation": "silu", "offset": None}, indices=(1,)),
        Probe("layer_norm", (x, (n,), (n,)), attrs={"normalized_dims": 1, "eps": 1e-5}),
        Probe("rms_norm", (x, (n,)), attrs={"normalized_dims": 1, "eps": 1e-5}),
        Probe("sdpa", (heads, heads, heads), attrs={"causal": True, "scale": None, "offset": None}),
        Probe("max_pool2d", (image,), attrs=_WINDOW),
        Probe("avg_pool2d", (image,), attrs=_WINDOW),
        Probe("adaptive_avg_pool2d", (image,), attrs={"size": (1, 1)}),
        Probe("dropout", (x,), attrs={"p": 0.1, "draw": "rt.Draw()", "shard": None}),
        Probe("cross_entropy_sum", (x, (n,)), attrs={"ignore_index": -100, "label_smoothing": 0.0}, indices=(1,)),
        Probe("embedding", (x, (n,)), attrs={"padding_idx": None, "offset": None}, indices=(1,)),
        Probe("pick", (x, (n,)), attrs={"offset": None}, indices=(1,)),
        Probe("index", (x, (n,)), attrs={"dim": 0}, indices=(1,)),
        Probe("gather", (x, x), attrs={"dim": 1}, indices=(1,)),
        Probe("embedding_bag", (x, (n,), (n // 2,)), attrs={"mode": "sum"}, indices=(1, 2)),
    )  # fmt: skip


def samples(side: int = SMALL) -> dict[str, Probe]:
    """Return the sample of every operator that has one, by operator."""
    by_operator = {probe.op: probe for probe in _special(side)}
    for name, row in ROWS.items():
        if row.factors in ("... -> ...", "..., ... -> ...") and not row.view and name not in _UNTRAINED:
            by_operator.setdefault(name, Probe(name, ((side, side),) * (str(row.factors).count(",") + 1)))
    return {name: by_operator[name] for name in ROWS if name in by_operator}
