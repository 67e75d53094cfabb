#!/usr/bin/env bash
# torch 2.13.0, transformers 5.24.0: no Adafactor takes a step of a matrix that FSDP2 shards.
#
# Guess, before it was run: torch's own steps, as its update is made of operators that DTensor knows; transformers'
# fails, as it makes its statistics by `torch.zeros`, which gives no DTensor.
# Seen: both fail, on a mesh of one rank already: torch's where it squares norms over the sharded dimension in place,
# transformers' where it adds a DTensor to plain statistics. Vectors, whose statistics are not factored, are stepped.
#
# Expected output: `EXPECTED` below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > "$folder/steps.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Adafactor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
fixed = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
for name, make in {
    "torch": lambda parameters: optim.Adafactor(parameters, lr=0.01),
    "transformers": lambda parameters: Adafactor(parameters, lr=0.01, **fixed),
}.items():
    for kind, model in {"matrix": nn.Linear(6, 4, bias=False), "vector": nn.LayerNorm(6)}.items():
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters())
        model(torch.randn(8, 6)).square().sum().backward()
        try:
            optimizer.step()
            told = "stepped"
        except RuntimeError as error:
            told = " ".join(str(error).split()[:6])
        print(f"{name}, {kind}: {told}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/steps.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
torch, matrix: aten.pow_.Scalar: in-place operations that require placement
torch, vector: stepped
transformers, matrix: aten.add_.Tensor got mixed torch.Tensor and DTensor,
transformers, vector: stepped
EXPECTED
