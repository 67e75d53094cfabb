#!/usr/bin/env bash
# torch 2.14.1: a fused optimizer on CPUs pairs elements by their place in memory, not by their index.
#
# A parameter may be a view with gaps in memory, such as the columns 0 and 2 of a table. A gradient that a program sets
# itself may lie in another order than its parameter, such as a transpose.
# Guess, before it was run: the fused step equals the plain one, or is refused, as it is for sparse gradients.
# Seen: neither. The fused step takes as many elements as there are, one after the other from the first, of both. So it
# changes columns that are no part of the parameter and leaves some that are, and it steps elements by the gradients of
# others. Nothing is raised. A transposed parameter with such a gradient is right. 2.13.0 does the same.
#
# Expected output: `EXPECTED` below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy==2.4.6
cat > "$folder/steps.py" <<'PYTHON'
import torch
from torch import optim

print("torch", torch.__version__.partition("+")[0])
cases = {
    "parameter of columns 0 and 2": (lambda: torch.zeros(3, 4)[:, ::2], lambda: torch.arange(6.0).view(3, 2)),
    "gradient of columns 0 and 2": (lambda: torch.zeros(3, 2), lambda: torch.arange(12.0).view(3, 4)[:, ::2]),
    "gradient transposed": (lambda: torch.zeros(3, 4), lambda: torch.arange(12.0).view(4, 3).t()),
    "both transposed": (lambda: torch.zeros(4, 3).t(), lambda: torch.arange(12.0).view(4, 3).t()),
}
for name, (parameter, gradient) in cases.items():
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
        stepped = []
        for fused in (False, True):
            own = parameter().detach().requires_grad_()
            own.grad, optimizer = gradient(), kind([own], lr=1.0, fused=fused)
            optimizer.step()
            own.grad.sub_(3.0)  # the first step of Adam and Adagrad is a sign
            optimizer.step()
            stepped.append(own.detach().clone())
        print(f"{name}, {kind.__name__}: {'equal' if torch.allclose(*stepped) else 'other elements'}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/steps.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
torch 2.14.1
parameter of columns 0 and 2, SGD: other elements
parameter of columns 0 and 2, Adam: other elements
parameter of columns 0 and 2, AdamW: other elements
parameter of columns 0 and 2, Adagrad: other elements
gradient of columns 0 and 2, SGD: other elements
gradient of columns 0 and 2, Adam: other elements
gradient of columns 0 and 2, AdamW: other elements
gradient of columns 0 and 2, Adagrad: other elements
gradient transposed, SGD: other elements
gradient transposed, Adam: other elements
gradient transposed, AdamW: other elements
gradient transposed, Adagrad: other elements
both transposed, SGD: equal
both transposed, Adam: equal
both transposed, AdamW: equal
both transposed, Adagrad: equal
EXPECTED
