#!/usr/bin/env bash
# torch 2.13.0: under FakeTensorMode, `module.to(dtype)` fails for the first module of a shape, and works for the second.
#
# Guess, before it was run: both layers are converted, or neither is; they are built by the same line.
# Seen: the first raises `_apply(): Couldn't swap Linear.weight`, as "Cannot swap t1 because it has weakref associated
# with it". The second is converted. The first parameter of each shape and dtype is made on a path that notes it in the
# mode's memo (a weak reference); later ones come from the mode's dispatch cache, which leaves no note. Modules whose
# parameters are fake are always converted by swapping, and that refuses tensors with weak references. So whether a
# large model can be converted under a fake mode depends on which shapes came before. 2.14.1 does the same.
#
# Expected output:
#     first: RuntimeError _apply(): Couldn't swap Linear.weight / Cannot swap t1 because it has weakref associated with it
#     second: torch.bfloat16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/convert.py" <<'PYTHON'
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for name, layer in zip(("first", "second"), layers):
        try:
            print(f"{name}: {layer.to(torch.bfloat16).weight.dtype}")
        except RuntimeError as error:
            print(f"{name}: RuntimeError {error} / {error.__cause__}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/convert.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
first: RuntimeError _apply(): Couldn't swap Linear.weight / Cannot swap t1 because it has weakref associated with it
second: torch.bfloat16
EXPECTED
