"""Steps of this build beside those of an older commit: CPU time of forward and backward, runs taken in turn.

`python -m bench.older COMMIT` checks the commit out into a temporary folder, and removes it at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
_RUN = """
import json, statistics, sys
from bench.gpt import Size
from bench.plans import forced
from bench.rounds import CPU
from bench.speed import OURS, _race, serial_graph, slowest_rank
from shardwright.lowering.ranks.launch import run_ranks
size = Size()
graph = serial_graph(size)
graphs = {OURS[case.name]: case.plan(graph, "GPT").graph for case in forced(2)}
samples = slowest_rank(run_ranks(_race, 2, 600.0, args=(size, graphs, (), int(sys.argv[1]))))
print(json.dumps({name: statistics.median(own[1:, CPU].tolist()) for name, own in samples.items()}))
"""


def run(folder: Path, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of forward and backward by layout, in a process with the code of a folder."""
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", _RUN, str(rounds)]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.older", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each build (default: 5)")
    parser.add_argument("--rounds", type=int, default=10, help="steps of a run; the first is not counted (default: 10)")
    given = parser.parse_args()
    git = ["git", "-C", str(HERE), "worktree"]
    with tempfile.TemporaryDirectory() as place:
        old = Path(place) / "old"
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), given.commit], check=True)
        try:
            pairs = [(run(old, given.rounds), run(HERE, given.rounds)) for _ in range(given.pairs)]
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    for name in pairs[0][0]:
        ratios = sorted(new[name] / before[name] for before, new in pairs)
        print(f"{name}: {statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
