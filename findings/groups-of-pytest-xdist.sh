#!/usr/bin/env bash
# pytest-xdist 3.8.0 with pytest 9.2.0: `--dist loadgroup` no longer keeps the tests of an `xdist_group` together.
#
# Guess, before it was run: all tests of a group run in one worker, as the documentation of `--dist loadgroup` says.
# Seen: with pytest 9.1.0 they do. With 9.2.0 the eight tests of one group run in both workers, and nothing is said. The
# plugin adds `@group` to an item's private `_nodeid` where a worker collects; 9.2.0 does not read it from there. What
# groups are for (one fixture for many tests, files that tests share) then happens twice, or at once.
#
# Expected output:
#     pytest 9.1.0: a group of 8 tests in 1 worker
#     pytest 9.2.0: a group of 8 tests in 2 workers
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/test_group.py" <<'PYTHON'
import os
import time

import pytest


@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_where(number):
    time.sleep(0.05)
    with open(os.environ["SEEN"], "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\n")
PYTHON
for version in 9.1.0 9.2.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "pytest==$version" pytest-xdist==3.8.0
    SEEN="$folder/workers-$version" "$folder/$version/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
        --dist loadgroup "$folder/test_group.py" > "$folder/log-$version"
    many=$(sort -u "$folder/workers-$version" | wc -l)
    echo "pytest $version: a group of $(wc -l < "$folder/workers-$version") tests in $many $([ "$many" = 1 ] && echo worker || echo workers)"
done | tee "$folder/seen"
diff "$folder/seen" - <<'EXPECTED'
pytest 9.1.0: a group of 8 tests in 1 worker
pytest 9.2.0: a group of 8 tests in 2 workers
EXPECTED
