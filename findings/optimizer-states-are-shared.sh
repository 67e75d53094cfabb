#!/usr/bin/env bash
# torch 2.14.1: an optimizer that loads another's state_dict trains on the other's states from then on, not on copies.
#
# A run is to branch in memory: two copies of a model go on with two learning rates, from one optimizer's states.
# Guess, before it was run: `load_state_dict` copies, as a module's does, so each branch trains as from a file.
# Seen: where dtype and device are the same, nothing is copied. Both branches update one set of moments and count one
# number of steps, so each of them is wrong from its second step on. Nothing is said. From a file, or from a deep copy,
# the branches are right; so are they where the loading parameters have another dtype, as that makes copies of the
# moments, though the number of steps stays shared.
#
# Expected output: `EXPECTED` below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy==2.4.6
cat > "$folder/branches.py" <<'PYTHON'
import io
from copy import deepcopy

import torch
from torch import nn, optim


def from_file(states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)


def steps(model, optimizer, number):
    for step in range(number):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def branch(kind, load, both, dtype=torch.float32):
    """Train, branch, go on with the first branch if `both`, and return the weights of the second one."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    optimizer = kind(first.parameters())
    steps(first, optimizer, 3)
    second = deepcopy(first).to(dtype)
    other = kind(second.parameters())
    other.load_state_dict(load(optimizer.state_dict()))
    if both:
        steps(first, optimizer, 2)
    before = [other.state[p].get("step") for p in second.parameters()]
    shared = any(a is b for p, q in zip(first.parameters(), second.parameters())
                 for a in optimizer.state[p].values() if torch.is_tensor(a)
                 for b in other.state[q].values())
    if dtype == torch.float32:
        steps(second, other, 2)
    return second.weight.detach(), shared, before[0]


print("torch", torch.__version__.partition("+")[0])
kinds = {
    "SGD, momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "AdamW, fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
}
for name, kind in kinds.items():
    for way, load in {"as it is": lambda states: states, "deep copy": deepcopy, "file": from_file}.items():
        alone, both = branch(kind, load, both=False), branch(kind, load, both=True)
        same = "equal" if torch.equal(alone[0], both[0]) else "another branch changes it"
        print(f"{name}, {way}: {same}; {'shared' if both[1] else 'copies'}")
_, shared, number = branch(kinds["Adam"], lambda states: states, both=True, dtype=torch.float64)
print(f"Adam in float64: {'shared' if shared else 'copies'}; steps after two of the other branch: {number}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/branches.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
torch 2.14.1
SGD, momentum, as it is: another branch changes it; shared
SGD, momentum, deep copy: equal; copies
SGD, momentum, file: equal; copies
Adam, as it is: another branch changes it; shared
Adam, deep copy: equal; copies
Adam, file: equal; copies
AdamW, fused, as it is: another branch changes it; shared
AdamW, fused, deep copy: equal; copies
AdamW, fused, file: equal; copies
RMSprop, as it is: another branch changes it; shared
RMSprop, deep copy: equal; copies
RMSprop, file: equal; copies
NAdam, as it is: another branch changes it; shared
NAdam, deep copy: equal; copies
NAdam, file: equal; copies
Adam in float64: shared; steps after two of the other branch: 5.0
EXPECTED
