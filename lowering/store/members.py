"""The dictionary of a module's parameters or buffers in a lowered model, which cannot be changed.

`functional_call` and other tools that swap parameters for a while bypass `setattr` and write to this dictionary.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwright.pcg.errors import ShardwrightError


class Members(dict[str, Any]):
    """Parameters or buffers of the module at a path."""

    def __init__(self, path: str, members: dict[str, Any]) -> None:
        super().__init__(members)
        self.path = path

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = ".".join(filter(None, (self.path, str(args[0]) if args else "")))
        raise ShardwrightError(
            f"{name}: another tensor in its place (functional_call, or what else swaps parameters) would do nothing, "
            "as the program reads its own; copy values into it, under torch.no_grad() or by load_state_dict, or call "
            "functional_call on the model itself"
        )

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]
