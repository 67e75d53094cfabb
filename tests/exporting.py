"""What `torch.export` looks up anew for each of the many small models that tests capture: a fifth of the time it takes.

Which operators can be kept whole only changes when one is registered. Ranks and commands that run in processes of their
own have torch as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import exported_program


def look_up_once() -> None:
    """Let this process, and its forks, look it up again only after another operator was registered."""
    collect = exported_program._collect_all_valid_cia_ops  # pyright: ignore[reportPrivateImportUsage]
    known = dict[Any, set[Any]]()

    def kept() -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        key = (*torch.ops._dir, *registered)
        if key not in known:
            known[key] = collect()
        return known[key]

    exported_program._collect_all_valid_cia_ops = kept  # pyright: ignore[reportPrivateImportUsage]
