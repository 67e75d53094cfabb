#!/usr/bin/env bash
# torch 2.13.0: starting to iterate a `DataLoader` draws from torch's own generator, though nothing is random in it.
#
# Guess, before it was run: without shuffling, workers or random transforms no number is drawn, so that a run which is
# resumed in the middle of an epoch, and starts its loader once more, has the dropout masks of one that went on.
# Seen: every `iter(loader)` draws one number, a base seed for workers that there are not. All masks after it differ.
# With a generator of its own (`DataLoader(generator=...)`) the loader draws from that.
#
# Expected output:
#     state after iter(): False the same; with a generator of its own: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/loader.py" <<'PYTHON'
import torch
from torch.utils.data import DataLoader


def is_same(**options) -> bool:
    before = torch.get_rng_state()
    iter(DataLoader([1, 2, 3, 4], batch_size=2, shuffle=False, num_workers=0, **options))
    return torch.equal(before, torch.get_rng_state())


print(f"state after iter(): {is_same()} the same; with a generator of its own: {is_same(generator=torch.Generator())}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/loader.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
state after iter(): False the same; with a generator of its own: True
EXPECTED
