#!/usr/bin/env bash
# torch 2.13.0: the gradient of `as_strided_scatter` to what is written into is that of the elements that are overwritten.
#
# Guess, before it was run: it passes the gradient of every element but those that `src` takes the place of, as the
# other scatters of views do (`diagonal_scatter`, `slice_scatter`, `select_scatter`).
# Seen: the complement. Elements 1 and 3 are overwritten, and they alone have a gradient. The gradient to `src` is
# right. `fill_diagonal_` becomes this operator when a graph is made functional, so a graph of it has the wrong gradient
# where eager training has the right one. 2.14.1 does the same.
#
# Expected output:
#     as_strided_scatter: x [0.0, 2.0, 0.0, 4.0, 0.0, 0.0], y [2.0, 4.0]
#     slice_scatter:      x [1.0, 0.0, 3.0, 0.0, 5.0, 6.0], y [2.0, 4.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/scatter.py" <<'PYTHON'
import torch

scatters = {
    "as_strided_scatter:": lambda x, y: torch.as_strided_scatter(x, y, (2,), (2,), 1),
    "slice_scatter:     ": lambda x, y: torch.slice_scatter(x, y, 0, 1, 4, 2),
}
for name, scatter in scatters.items():
    x, y = torch.zeros(6, requires_grad=True), torch.ones(2, requires_grad=True)
    (scatter(x, y) * torch.arange(1.0, 7.0)).sum().backward()
    print(f"{name} x {x.grad.tolist()}, y {y.grad.tolist()}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/scatter.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
as_strided_scatter: x [0.0, 2.0, 0.0, 4.0, 0.0, 0.0], y [2.0, 4.0]
slice_scatter:      x [1.0, 0.0, 3.0, 0.0, 5.0, 6.0], y [2.0, 4.0]
EXPECTED
