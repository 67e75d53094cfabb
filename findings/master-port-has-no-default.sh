#!/usr/bin/env bash
# torch 2.13.0: torchrun's `--master-port` has no default, though its help names one.
#
# Guess, before it was run: with a static rendezvous over two nodes and no `--master-port`, the end point is
# `10.0.0.1:29500`, as `torchrun --help` says ("Defaults to 29500").
# Seen: the end point is `10.0.0.1:None`. A run of one node does not show it, as it picks a free port.
#
# Expected output:
#     help:           Defaults to 29500.
#     no port:        static 10.0.0.1:None
#     --master-port:  static 10.0.0.1:29500
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/ports.py" <<'PYTHON'
from torch.distributed.run import config_from_args, get_args_parser

parser = get_args_parser()
(action,) = (action for action in parser._actions if action.dest == "master_port")
print(f"help:           {action.help[action.help.index('Defaults'):]}")
for name, given in {"no port:": [], "--master-port:": ["--master-port", "29500"]}.items():
    words = ["--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1", *given, "train.py"]
    config, _, _ = config_from_args(parser.parse_args(words))
    print(f"{name:15} {config.rdzv_backend} {config.rdzv_endpoint}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/ports.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
help:           Defaults to 29500.
no port:        static 10.0.0.1:None
--master-port:  static 10.0.0.1:29500
EXPECTED
