"""`shardwright run` under torchrun's elastic agent: options, restarts, signals, plans for several sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser

from shardwright.api import compile
from shardwright.cli import run as run_command
from shardwright.cli.status import ENVIRONMENT
from shardwright.cli.torchrun import start_of
from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.plans import plan_file
from shardwright.stopping import AGAIN, StopSignals
from tests.each import each, in_whole_grids
from tests.forked import Forked
from tests.shardwright.command import Run

OTHERWISE = {"--no-python", "--no_python", "--run-path", "--run_path", "-h", "--help"}
"""Options of torchrun for programs that are no training script or module of Python, and its help."""


def test_every_spelling_of_torchruns_options_is_taken() -> None:
    theirs = {text for action in get_args_parser()._actions for text in action.option_strings}
    ours = {text for parameter in run_command.run.params for text in parameter.opts}
    assert theirs - ours == OTHERWISE


def test_what_options_ask_for() -> None:
    here = start_of({}, default_cluster(3))
    assert (here.worlds, here.is_sized, "--standalone" in here.words) == ([3], False, True)
    assert start_of({"nproc-per-node": "4"}, default_cluster(2)).worlds == [4]
    met = {"rdzv-backend": "c10d", "rdzv-endpoint": "node1:29400"}
    many = start_of({"nnodes": "2:4", "nproc-per-node": "8", **met}, None)
    assert (many.worlds, many.is_sized) == ([16, 24, 32], True)
    assert {"--nnodes=2:4", "--rdzv-endpoint=node1:29400"} <= {*many.words}
    assert "--standalone" not in many.words
    static = start_of({"nnodes": "2", "node-rank": "1", "master-addr": "node1"}, default_cluster(4))
    assert (static.worlds, "--master-port=29500" in static.words) == ([4], True)
    assert get_args_parser().parse_args([*static.words, "train.py"]).nproc_per_node == "2"


@each(
    ("options", "problem"),
    [
        ({"nnodes": "0"}, "--nnodes '0': expected a number of machines, or the fewest and the most as 1:4"),
        ({"nnodes": "3:2"}, "--nnodes '3:2': expected"),
        ({"nnodes": "1:2"}, "--nnodes 1:2: machines whose number changes meet by --rdzv-backend c10d"),
        ({"nnodes": "2"}, "--nnodes 2: say where the machines meet"),
        ({"nproc-per-node": "many"}, "--nproc-per-node 'many': expected a number of ranks"),
        ({"nproc-per-node": "0"}, "--nproc-per-node '0': expected a number of ranks"),
        ({"max-restarts": "-1"}, "--max-restarts '-1': expected a whole number"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ShardwrightError) as error:
        start_of(options, default_cluster(2))
    assert str(error.value).startswith(problem)


# ---- the agent ----


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun is forked, as it takes seconds to load; it starts its ranks as for users."""
    monkeypatch.setattr(run_command, "subprocess", SimpleNamespace(Popen=Forked))


ATTEMPT = """
import os, signal, sys, time
from contextlib import ExitStack
from pathlib import Path
attempt, rank, world = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
Path(f"{attempt}-{rank}-{world}").touch()
"""


def attempts() -> list[str]:
    return sorted(file.name for file in Path().glob("?-?-?"))


@pytest.mark.usefixtures("agents")
def test_a_rank_that_fails_is_told_and_all_start_again(run: Run) -> None:
    fails = "if attempt == '0' and rank == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    Path("train.py").write_text(f"{ATTEMPT}{fails}if attempt == '0': time.sleep(60)\n")
    status, _, err = run("run", "train.py", "--nproc_per_node", "2", "--max_restarts", "2")
    assert (status, err) == (0, "rank 1 was ended by SIGKILL; all ranks start again, at most 1 time more\n")
    assert attempts() == ["0-0-2", "0-1-2", "1-0-2", "1-1-2"]


@pytest.mark.usefixtures("agents")
def test_who_wants_to_be_started_again_is_not_restarted_here(run: Run) -> None:
    Path("train.py").write_text(f"{ATTEMPT}sys.exit(75)\n")
    assert run("run", "train.py", "--cluster", "local:1", "--max-restarts", "2") == (AGAIN, "", "")
    assert attempts() == ["0-0-1"]


@pytest.mark.usefixtures("agents")
@each("name", ["TERM", "USR1"])
def test_signals_go_to_the_ranks_whose_status_counts(run: Run, name: str) -> None:
    asks = f"if rank == '0': os.kill(int(sys.argv[1]), signal.SIG{name})\ntime.sleep(60)\n"
    saves = f"signal.signal(signal.SIG{name}, lambda *_: sys.exit(75))\n"
    Path("train.py").write_text(ATTEMPT + saves + asks)
    asked = run("run", "train.py", "--cluster", "local:1", "--max-restarts", "2", "--", str(os.getpid()))
    assert asked == (AGAIN, "", "")
    assert attempts() == ["0-0-1"]
    Path("train.py").write_text(ATTEMPT + asks)  # it saves nothing
    ended = run("run", "train.py", "--cluster", "local:1", "--max-restarts", "2", "--", str(os.getpid()))
    assert ended == (130, "", "")


@pytest.mark.usefixtures("agents")
@each(
    "words",
    [
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=0,read_timeout=1", "--rdzv-endpoint"),
        (
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--rdzv-conf",
            "timeout=1",
            "--rdzv-backend",
            "static",
            "--rdzv-endpoint",
        ),
    ],
)
def test_machines_that_do_not_meet_are_told_in_a_line(run: Run, words: tuple[str, ...]) -> None:
    Path("train.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    status, _, err = run("run", "train.py", "--nproc-per-node", "1", *words, place)
    assert status == ENVIRONMENT
    *_, told = err.splitlines()  # behind what torch's C++ logs
    assert told.startswith(f"the machines of this run do not meet at {place}: The c"), err
    assert "; start each of them with the same --rdzv-endpoint" in told


PATIENCE = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
"""Seconds until a machine that does not answer counts as gone."""


def test_machines_come_and_those_that_were_not_asked_to_leave_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents. The second joins later and is asked to make room; the first counts no restart for either."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    handles = "if world == '2': signal.signal(signal.SIGTERM, lambda *_: Path('asked').touch())\n"
    agreed = "while not Path('asked').exists(): time.sleep(0.05)\n"
    ends = "sys.exit(75 if world == '2' else 0)\n"
    Path("train.py").write_text(ATTEMPT + handles + "Path(f'ready-{world}-{rank}').touch()\n" + agreed + ends)
    where = {"rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{port}", "rdzv-conf": PATIENCE}
    words = start_of({"nnodes": "1:2", "nproc-per-node": "1", **where, "rdzv-id": "run"}, None).words
    command = [sys.executable, "-m", "shardwright.cli.elastic", *words, "train.py"]
    with ExitStack() as running:

        def joins(*names: str) -> Forked:
            agent = running.enter_context(Forked(command, env=os.environ, stdout=None))
            while not all(map(os.path.exists, names)):
                assert agent.poll() is None
                time.sleep(0.05)
            return agent

        stays = joins("ready-1-0")
        leaves = joins("ready-2-0", "ready-2-1")
        leaves.send_signal(signal.SIGTERM)
        assert (leaves.wait(), stays.wait()) == (AGAIN, 0)
    assert attempts() == ["0-0-1", "0-0-2", "0-1-2"]


def test_all_ranks_stop_after_the_same_step() -> None:
    def rank() -> list[bool]:
        signals = StopSignals()
        parallel = SimpleNamespace(ranks=SimpleNamespace(device="cpu", timeout_s=20.0))
        found = [signals.asked(parallel)]  # pyright: ignore[reportArgumentType]
        if dist.get_rank():
            os.kill(os.getpid(), signal.SIGUSR1)
        return [*found, signals.asked(parallel)]  # pyright: ignore[reportArgumentType]

    assert run_ranks(rank, 2) == [[False, True]] * 2


# ---- plans for several numbers of ranks, and checkpoints ----


def losses(out: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss (\S+)", out)}


@pytest.mark.usefixtures("forked")
def test_a_run_goes_on_with_fewer_ranks_by_the_plan_for_them(run: Run) -> None:
    status, out, err = run("plan", "models.py:net", "--cluster", "local:2", "--for", "2,1", "-o", "plans")
    assert (status, "plans/2.json, plans/1.json" in err, "plans/1.json" in out) == (0, True, True)
    common = ("run", "models.py:net", "--plan", "plans", "--check-capture", "never")
    whole = losses(run(*common, "--nproc-per-node", "2", "--steps", "6")[1])
    first = ("--checkpoints", "saved", "--save-every", "2")
    assert losses(run(*common, *first, "--nproc-per-node", "2", "--steps", "4")[1]) == {
        s: whole[s] for s in range(1, 5)
    }
    shutil.copytree("saved", "again")
    same = run(*common, "--checkpoints", "again", "--nproc-per-node", "2", "--steps", "6")[1]
    assert losses(same) == {step: whole[step] for step in (5, 6)}
    fewer = losses(run(*common, *first, "--nproc-per-node", "1", "--steps", "6")[1])
    assert {step: float(loss) for step, loss in fewer.items()} == pytest.approx(
        {step: float(whole[step]) for step in (5, 6)}, rel=1e-5
    )
    anew = run("run", "models.py:net", *first, "--nproc-per-node", "1", "--steps", "7", "--check-capture", "never")
    assert list(losses(anew[1])) == [7], anew
    assert run(*common, *first, "--nproc-per-node", "1", "--steps", "6")[:2] == (0, "")  # all is done

    status, _, err = run(*common, "--nproc-per-node", "3")
    assert (status, err.split(";")[0]) == (2, "error: plans: there is no plan for 3 ranks, only for 1, 2")
    status, _, err = run("run", "models.py:net", "--plan", "plans/2.json", "--nproc-per-node", "4")
    assert (status, "has 2 devices, and torchrun's options ask for 4 ranks" in err) == (2, True)
    assert plan_file(Path("plans/2.json"), 7) == Path("plans/2.json")
    with pytest.raises(PlanError, match="no plan for 4 ranks"):
        plan_file(Path("plans"), 4)
    Path("plans/2.json").unlink()
    with pytest.raises(PlanError, match="no plan for 1 ranks, only for none"):
        compile(nn.Linear(1, 1), plan=Path())


@each(
    ("arguments", "problem"),
    [
        (["--for", "2"], "--for writes a plan for each number of ranks: say in which folder"),
        (["--for", "2,x", "-o", "p"], "--for '2,x': expected different numbers of ranks, such as 64,56,48"),
        (["--for", "2,2", "-o", "p"], "--for '2,2': expected different"),
        (["--for", "8", "-o", "p"], "--for 8: local-4 has 4 devices"),
    ],
)
def test_sizes_that_cannot_be_planned_for(run: Run, arguments: list[str], problem: str) -> None:
    status, _, err = run("plan", "models.py:net", "--cluster", "local:4", *arguments)
    assert (status, err.startswith(f"error: {problem}")) == (2, True), err


@pytest.mark.usefixtures("forked")
def test_run_a_transformers_config(run: Run) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "num_hidden_layers": 1}
    config |= sizes
    Path("config.json").write_text(json.dumps(config))
    words = ("--hf-config", "config.json", "--batch-size", "2", "--seq-len", "8", "--cluster", "local:1")
    status, out, err = run("run", *words, "--steps", "2", "--check-capture", "never")
    assert (status, list(losses(out))) == (0, [1, 2]), err
    assert float(losses(out)[1]) == pytest.approx(4.16, abs=0.2)  # ln 64


KILLED = """
import os, signal, torch
taken = torch.optim.AdamW.step
steps = []
def step(self, **words):
    steps.append(0)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and len(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return taken(self, **words)
torch.optim.AdamW.step = step
from models import *
"""


@in_whole_grids
@pytest.mark.slow
@pytest.mark.usefixtures("agents")
def test_a_restart_goes_on_from_the_last_checkpoint(run: Run, forked_launch: Callable[..., int]) -> None:
    Path("killed.py").write_text(KILLED)
    words = ("--nproc-per-node", "1", "--steps", "6", "--check-capture", "never", "--save-every", "2")
    status, out, err = run("run", "killed.py:net", *words, "--max-restarts", "1", "--checkpoints", "saved")
    assert (status, err) == (0, "rank 0 was ended by SIGKILL; all ranks start again, at most 0 times more\n"), err
    told = [int(step) for step in re.findall(r"step +(\d+)  loss", out)]
    assert told == [1, 2, 3, 3, 4, 5, 6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_command, "launch", forked_launch)
        assert losses(run("run", "models.py:net", *words)[1]) == losses(out)
