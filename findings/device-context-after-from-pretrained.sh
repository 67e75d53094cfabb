#!/usr/bin/env bash
# torch 2.13.0 and transformers 5.23.0: once a process has called `from_pretrained`, `with torch.device("meta")` may no longer cover `torch.linspace`.
#
# Guess, before it was run: what a model's constructor makes under the context is on that device, whatever ran before.
# Seen: torch fixes the set of covered functions at the context's first use in the process. `from_pretrained` is such a
# use, and has another `torch.linspace` in place meanwhile, to keep some tables on the CPU. That one stays in the set,
# and the real one is left out of it from then on. Where a device was used as a context before, all is well.
#
# Expected output:
#     a context before the first from_pretrained: linspace on meta
#     a context after the first from_pretrained: linspace on cpu
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > "$folder/linspace.py" <<'PYTHON'
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def device() -> str:
    with torch.device("meta"):
        return torch.linspace(0, 1, 4).device.type


if sys.argv[1] == "before":
    device()  # as any use of a device as a context is
with tempfile.TemporaryDirectory() as folder:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)).save_pretrained(folder)
    GPT2LMHeadModel.from_pretrained(folder)
print(f"a context {sys.argv[1]} the first from_pretrained: linspace on {device()}")
PYTHON
export HF_HUB_OFFLINE=1
for when in before after; do
    "$folder/venv/bin/python" -W ignore "$folder/linspace.py" "$when" 2> /dev/null
done > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
a context before the first from_pretrained: linspace on meta
a context after the first from_pretrained: linspace on cpu
EXPECTED
