#!/usr/bin/env bash
# torch 2.14.1: a machine that joins an elastic run later is never taken in, and the run ends for all.
#
# `torchrun --nnodes 1:2` may begin with one machine. When another comes, all ranks start anew with both.
# Guess, before it was run: after the second agent has started, both run a rank of a world of two.
# Seen: the first agent stops its rank and meets the second one. As it shares its store with its ranks, it keeps the
# address of that store, and writes it into no second round. The second agent waits for this address, the first one for
# the second, and after a minute both end with a DistStoreError. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps: each
# round has its own address then. 2.13.0 does the same.
#
# Expected output: `EXPECTED` below. It takes two minutes after the installation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy==2.4.6
cat > "$folder/rank.py" <<'PYTHON'
import os
import sys
import time
from pathlib import Path

seen, world = Path(sys.argv[1]), os.environ["WORLD_SIZE"]
Path(seen, f"world-{world}-rank-{os.environ['RANK']}").touch()
while world == "1":  # until the agent starts it anew
    time.sleep(0.1)
PYTHON

run() { # SEEN PORT: two agents, of which the second starts when the first one's rank runs
    mkdir "$folder/$1"
    local agent=("$folder/venv/bin/python" -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --rdzv-id run --rdzv-backend c10d
        --rdzv-endpoint "127.0.0.1:$2" --rdzv-conf last_call_timeout=1 "$folder/rank.py" "$folder/$1")
    timeout 200 "${agent[@]}" > "$folder/$1.first" 2>&1 &
    for _ in $(seq 600); do
        [ ! -e "$folder/$1/world-1-rank-0" ] || break
        sleep 0.1
    done
    timeout 200 "${agent[@]}" > "$folder/$1.second" 2>&1 && second=ends || second=fails
    wait $! && first=ends || first=fails
    echo "$1: $(ls "$folder/$1" | tr '\n' ' ')first $first, second $second, waits for an address: $(grep -c 'DistStoreError.*MASTER_ADDR' "$folder/$1.second" || true)"
}

free=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
{
    echo "torch $("$folder/venv/bin/python" -W ignore -c 'import torch; print(torch.__version__.partition("+")[0])')"
    run shared "$free"
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    run apart "$((free + 1))"
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
torch 2.14.1
shared: world-1-rank-0 first fails, second fails, waits for an address: 1
apart: world-1-rank-0 world-2-rank-0 world-2-rank-1 first ends, second ends, waits for an address: 0
EXPECTED
