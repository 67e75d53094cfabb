#!/usr/bin/env bash
# torch 2.13.0: under FakeTensorMode, `nn.Transformer` cannot be built: copies of its layers are in a mode of their own.
#
# Guess, before it was run: a module that is built inside the mode has fake parameters, as `nn.Linear` does; that its
# stacks are copies of one layer does not matter.
# Seen: `copy.deepcopy` of a fake parameter copies its FakeTensorMode too. The copied layers belong to other modes, and
# the first operator that meets two of them, an initializer of the constructor itself, raises an error about mixed modes.
# A layer alone can be built.
#
# Expected output:
#     layer: built
#     stack: AssertionError, mixing fake modes: True
#     modes of a layer and its copy are one: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/modes.py" <<'PYTHON'
import copy

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

for name, build in {
    "layer": lambda: nn.TransformerEncoderLayer(16, 2, 32),
    "stack": lambda: nn.Transformer(16, 2, 1, 1, 32),
}.items():
    try:
        with FakeTensorMode():
            build()
        print(f"{name}: built")
    except Exception as error:
        print(f"{name}: {type(error).__name__}, mixing fake modes: {'mixing fake modes' in str(error).lower()}")
with FakeTensorMode():
    layer = nn.Linear(2, 2)
    print("modes of a layer and its copy are one:", copy.deepcopy(layer).weight.fake_mode is layer.weight.fake_mode)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/modes.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
layer: built
stack: AssertionError, mixing fake modes: True
modes of a layer and its copy are one: False
EXPECTED
