#!/usr/bin/env bash
# torch 2.13.0: a weight under FSDP2 and tensor parallelism, transposed and flattened, has its elements in another order.
#
# Guess, before it was run: all four views give what they give of the whole tensor, or raise an error.
# Seen: the weight, its flattening and its transpose are right. The flattened transpose is not, and nothing is raised.
# The rows of such a weight lie as (_StridedShard(0, split_factor=2), Shard(0)). Its transpose is sharded in the last
# dimension. Flattening that gives placements again, which are not those of the elements that each rank has.
#
# Expected output:
#     w True, flat True, transposed True, flat transposed False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/flatten.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
layer = nn.Linear(16, 48, bias=False)
whole = layer.weight.detach().clone()
parallelize_module(layer, mesh["tp"], ColwiseParallel())
fully_shard(layer, mesh=mesh["dp"])
w = layer.weight.detach()
views = {
    "w": (w, whole),
    "flat": (w.reshape(-1), whole.reshape(-1)),
    "transposed": (w.t(), whole.t()),
    "flat transposed": (w.t().reshape(-1), whole.t().reshape(-1)),
}
seen = {name: torch.equal(own.full_tensor(), expected) for name, (own, expected) in views.items()}
if dist.get_rank() == 0:
    print(", ".join(f"{name} {equal}" for name, equal in seen.items()))
dist.destroy_process_group()
PYTHON
timeout 120 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 4 "$folder/flatten.py" > "$folder/seen" 2> /dev/null
cat "$folder/seen"
diff "$folder/seen" - <<< "w True, flat True, transposed True, flat transposed False"
