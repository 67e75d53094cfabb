"""Find the files that a path means, and their format."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.lowering.store.files import Mapped, TensorFiles, told
from shardwright.pcg.errors import PlanError


def open_files(path: Path) -> TensorFiles:
    """Return the tensors of a file or folder. Raises `PlanError` where it has none that can be read in parts."""
    with told(f"{path} cannot be read"):
        if not path.exists():
            raise PlanError(f"{path}: there is no such file or folder")
        if not path.is_dir():
            return Mapped({"": path})
        if (path / ".metadata").is_file():
            from shardwright.lowering.store.shards import Checkpoint  # imports torch's checkpoints: 0.1 s

            return Checkpoint(path)
        return Mapped(_files_in(path))


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by the names of their tensors, as its index has them, or its only file."""
    for kind in ("safetensors", "bin"):
        indices, alone = (sorted(folder.glob(f"*.{kind}{end}")) for end in (".index.json", ""))
        if len(indices) > 1 or (not indices and len(alone) > 1):
            names = ", ".join(path.name for path in indices or alone)
            raise PlanError(f"{folder} has {names}, and it is not clear which are meant; give one of them")
        if indices:
            return _indexed(indices[0])
        if alone:
            return {"": alone[0]}
    raise PlanError(f"{folder} has no *.safetensors, *.bin or .metadata (of torch.distributed.checkpoint)")


def _indexed(index: Path) -> dict[str, Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    if missing := sorted({name for name in names.values() if not (index.parent / name).is_file()}):
        raise PlanError(f"{index} names files that are not there: {', '.join(missing[:10])}")
    return {name: index.parent / file for name, file in names.items()}
