"""A model's parameters and buffers on one rank, apart from the programs that read and write them.

    source ──values──▶ store ◀──reads, gradients── entries

The store owns the names (tied ones too), layouts and memory of parameters and buffers, and knows which of them other
pipeline stages have. The first entry's graph fixes the layouts; the store refuses an entry whose graph wants another
layout, by the parameter's name. Before the first entry, the store has stand-ins: replicated parameters on the memory of
the source. They remain the same objects afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.lowering.private import IncompatibleKeys
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.clipping import clip_gradients
from shardwright.lowering.store.foreign import ForeignParts
from shardwright.lowering.store.loading import load
from shardwright.lowering.store.original import Original
from shardwright.lowering.store.places import Place
from shardwright.lowering.store.sources import Source, own_part
from shardwright.lowering.store.storage import (
    Held,
    Hold,
    as_real,
    hold_buffer,
    hold_parameter,
    real_shape,
    refuse_replaced,
    refuse_thawed,
    slices,
)
from shardwright.pcg.capture.importing import names_by_first
from shardwright.pcg.errors import PlanError
from shardwright.pcg.layout import Layouts, R, format_layouts
from shardwright.pcg.mesh import TIME, Mesh


class ParameterStore:
    """A model's parameters and buffers on this rank.

    `held` maps all names of this rank's stage to them; `elsewhere` are the names that other stages have. `carried`
    names the tensors that forward changes although they are not buffers of the model. `ranks` is None until the first
    entry fixes the layouts.
    """

    def __init__(self, source: Source, model: nn.Module) -> None:
        """Start from a source. `model`: the user's model, whose calls are checked once this store is trained."""
        self.held: dict[str, Held] = {}
        self.elsewhere = set[str]()
        self.carried: tuple[str, ...] = ()
        self.ranks: Ranks | None = None
        self._source: Source | None = source
        self._original = Original(model)
        self.foreign = ForeignParts()
        self._stages = dict[str, tuple[int, ...]]()
        self._unique: Sequence[Held] = ()
        self._frozen: Sequence[Held] = ()
        self._parameters: Sequence[Held] = ()

    @property
    def outside(self) -> dict[str, Tensor]:
        """The tensors that users see, by name."""
        return {name: held.outside for name, held in self.held.items()}

    @property
    def unique(self) -> Sequence[Held]:
        """The parameters and buffers, each once."""
        return self._unique

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer updates."""
        return [held.outside for held in self._unique if isinstance(held.outside, nn.Parameter)]

    # ---- before the first entry ----

    def stand_in(self) -> None:
        """Give users parameters on the memory of the source, replicated on all ranks."""
        source = self._given()
        for names in names_by_first(source.buffers).values():
            value = source.buffers[names[0]]
            self.held.update(dict.fromkeys(names, Held(names, (), value, as_real(value))))
        for names in names_by_first(source.parameters).values():
            value = source.parameters[names[0]]
            mesh = init_device_mesh(value.device.type, (dist.get_world_size(),))
            whole = DTensor.from_local(value.detach(), mesh, [Replicate()], run_check=False)
            outside = nn.Parameter(whole, requires_grad=value.requires_grad)
            self.held.update(dict.fromkeys(names, Held(names, (), outside, as_real(value.detach()))))
        self._settle()

    def tell_source(self) -> None:
        """Copy the stand-ins' `requires_grad` to the source, before the source's model is captured."""
        refuse_replaced(self._parameters)
        for name, value in self._given().parameters.items():
            value.requires_grad_(self.held[name].outside.requires_grad)

    def _given(self) -> Source:
        assert self._source is not None, "the store has its values, and has let go of their source"
        return self._source

    # ---- layouts ----

    def join(
        self, wanted: Mapping[str, Place], ranks: Ranks, carried: Mapping[str, Tensor], *, trains: bool = True
    ) -> None:
        """Accept an entry's graph: the first fixes all layouts, later ones must agree. All ranks must call this.

        `carried`: the tensors that forward changes although they are not buffers of the model, with their first values.
        `trains`: whether the entry computes gradients. Raises `PlanError` if the graph is of another model, or wants
        another layout.
        """
        if self.ranks is None:
            self._lay_out(wanted, ranks, carried)
        else:
            self._check_state(wanted, carried)
            self._check(wanted, ranks, self.ranks, trains=trains)

    def _lay_out(self, wanted: Mapping[str, Place], ranks: Ranks, carried: Mapping[str, Tensor]) -> None:
        source, standins = self._given(), self.held
        buffers = {**carried, **source.buffers}
        values = {**source.parameters, **buffers}
        for name, place in wanted.items():
            place.check(name, values.get(name))
        source.agree(ranks, carried)
        kinds, layouts, elsewhere = dict[tuple[str, ...], Hold](), dict[str, Layouts](), set[str]()
        shapes = {name: place.padded for name, place in wanted.items()}
        for kind, tensors in ((hold_parameter, source.parameters), (hold_buffer, buffers)):
            for names in names_by_first(tensors).values():
                read = [wanted[name] for name in names if name in wanted]
                stages = tuple(sorted({stage for place in read for stage in place.stages})) or (0,)
                self._stages.update(dict.fromkeys(names, stages))
                if ranks.stages.rank in stages:
                    kinds[names], layouts[names[0]] = kind, _layouts(read, ranks.mesh)
                else:
                    elsewhere.update(names)
        padded = {names[0]: _padded(names, shapes, values[names[0]]) for names in kinds}
        cuts = {name: slices(padded[name], own, ranks) for name, own in layouts.items()}
        given = {name: cut for name, cut in cuts.items() if name in source.parameters or name in source.buffers}
        parts = {name: own_part(carried[name], cuts[name], ranks.device) for name in cuts.keys() - given.keys()}
        parts.update(source.parts(given, ranks.device))
        held = dict[str, Held]()
        for names, kind in kinds.items():
            one = kind(parts[names[0]], values[names[0]], padded[names[0]], names, layouts[names[0]], ranks)
            one.counts = ranks.stages.rank == self._stages[names[0]][0]
            held.update(dict.fromkeys(names, one))
        _adopt(held, standins)
        self.held, self.elsewhere, self.ranks, self._source = held, elsewhere, ranks, None
        self.carried = tuple(name for name in carried if name in held)
        self._settle()

    def _settle(self) -> None:
        self._unique = list({id(held): held for held in self.held.values()}.values())
        self._frozen = [held for held in self._unique if not held.inside.requires_grad]
        self._parameters = [held for held in self._unique if isinstance(held.outside, nn.Parameter)]

    def _check_state(self, wanted: Mapping[str, Place], carried: Mapping[str, Tensor]) -> None:
        """Raise `PlanError` unless an entry carries the state that steps have changed, and no other."""
        odd = [name for name in self.carried if name not in wanted] or [n for n in carried if n not in self.held]
        if odd:
            raise PlanError(
                f"{odd[0]}: forward changes it in one mode or shape alone, and is no buffer of the model, so that a "
                "program for the other would not see its value; make it a buffer (register_buffer) before compiling"
            )

    def _check(self, wanted: Mapping[str, Place], ranks: Ranks, own: Ranks, *, trains: bool) -> None:
        meshes, stored = ([str(mesh.devices) for mesh in some.meshes] for some in (ranks, own))
        if meshes != stored:
            raise PlanError(
                f"the plan is for {' and '.join(meshes)}, and the parameters lie on {' and '.join(stored)}; plan for "
                "that mesh"
            )
        for name, place in wanted.items():
            held = self.held.get(name)
            place.check(name, None if held is None else held.outside, elsewhere=name in self.elsewhere)
            if place.stages != self._stages[name]:
                raise PlanError(
                    f"{name}: the plan reads it in pipeline stages {list(place.stages)}, and it is stored in "
                    f"{list(self._stages[name])}; plan with the stages that it is stored in"
                )
            if held is None:
                continue
            mesh = own.mesh.devices
            lies = tuple(x for axis, x in zip(own.mesh.names, held.layouts, strict=True) if axis != TIME)
            if held.padded != place.padded:
                raise PlanError(
                    f"{name}: the plan wants it padded to {list(place.padded)}, and it is stored as "
                    f"{list(held.padded)}, for every shape of batch and mode; plan with the same padding"
                )
            if lies != place.layouts:
                raise PlanError(
                    f"{name}: the plan wants it as {format_layouts(place.layouts, mesh)}, and it is stored as "
                    f"{format_layouts(lies, mesh)}, for every shape of batch and mode; plan with that layout pinned"
                )
            if held.inside.requires_grad and not place.trained and trains:
                raise PlanError(
                    f"{name}: the plan was captured with requires_grad=False and computes no gradient of it, and it is "
                    "trained; capture the model as it is trained"
                )

    # ---- for entries ----

    def leaves(self) -> dict[str, Held]:
        """Return everything held, by name, as new leaves for autograd, which collect one program's gradients only."""
        own = {id(held): held.own_leaf() for held in self.unique}
        return {name: own[id(held)] for name, held in self.held.items()}

    def check(self) -> None:
        """Raise, before a step, if users have changed parameters in a way that the program cannot see."""
        refuse_thawed(self._frozen)
        if torch.is_grad_enabled():
            self._original.guard(self.unique, self.elsewhere)
        refuse_replaced(self._parameters)

    # ---- for users ----

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
        assert self.ranks is not None
        return clip_gradients(self.unique, self.ranks, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def load(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor], *, strict: bool) -> IncompatibleKeys:
        """Copy a state's tensors into the store's, by `loading.load`."""
        stage = 0 if self.ranks is None else self.ranks.stages.rank
        with waiting("load_state_dict", None if self.ranks is None else self.ranks.timeout_s):
            return load(given, own, self._load, elsewhere=self.elsewhere, strict=strict, stage=stage)

    def _load(self, name: str, value: Tensor) -> None:
        self.held[name].load(value)


def _adopt(made: Mapping[str, Held], standins: Mapping[str, Held]) -> None:
    """Keep the parameter objects that users have already, and give them the new contents."""
    for held in {id(h): h for h in made.values()}.values():
        if held.name in standins and isinstance(held.outside, nn.Parameter):
            known = standins[held.name].outside
            known.grad = None
            torch.utils.swap_tensors(known, held.outside)
            held.outside = known


def _layouts(read: Iterable[Place], mesh: Mesh) -> Layouts:
    """Return a layout on all axes, including time's; a tensor that nothing reads is replicated."""
    on_devices = next((place.layouts for place in read), (R,) * len(mesh.devices))
    return (R,) * (len(mesh) - len(on_devices)) + on_devices


def _padded(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], value: Tensor) -> tuple[int, ...]:
    """Return the shape in which a tensor of these names is stored; one that nothing reads has no padding."""
    return next((shapes[name] for name in names if name in shapes), real_shape(value))
