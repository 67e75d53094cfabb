#!/usr/bin/env bash
# torch 2.13.0 and 2.14.1: when a rank cannot write, `torch.distributed.checkpoint.save` raises what `except Exception` does not catch.
#
# Guess, before it was run: `CheckpointException` is an Exception, as its name says; or the writer's own OSError comes
# out where there is one process. Either way `except Exception` around `save` sees a full disk.
# Seen: `CheckpointException` derives from BaseException, like KeyboardInterrupt. `except Exception` lets it pass, and
# so do `concurrent.futures` callbacks and loops that are written to survive a failed save.
#
# Expected output:
#     caught by except Exception: False; CheckpointException, bases ('BaseException',), cause OSError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/save.py" <<'PYTHON'
import sys

import torch
from torch.distributed import checkpoint


class Full(checkpoint.FileSystemWriter):
    """A writer on a disk without room."""

    def write_data(self, plan, planner):
        raise OSError(28, "No space left on device")


seen = False
try:
    try:
        checkpoint.save({"x": torch.ones(2)}, storage_writer=Full(sys.argv[1]), no_dist=True)
    except Exception:
        seen = True
except BaseException as error:
    (cause, _), = error.failures.values()
    bases = tuple(base.__name__ for base in type(error).__bases__)
    print(f"caught by except Exception: {seen}; {type(error).__name__}, bases {bases}, cause {type(cause).__name__}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/here" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
caught by except Exception: False; CheckpointException, bases ('BaseException',), cause OSError
EXPECTED
