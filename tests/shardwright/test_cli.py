"""The command line: results on stdout, progress on stderr, errors in one line with status 2."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli import calibrate as calibrate_command
from shardwright.cli import configured
from shardwright.cli import run as run_command
from shardwright.cli.main import cli
from shardwright.cli.numeric import _worst
from shardwright.cli.options import parse_cluster
from shardwright.cli.run import DEFAULTS, environment
from shardwright.cli.torchrun import Start
from shardwright.cli.train import train
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.options import PlanOptions
from shardwright.pcg import versions
from shardwright.pcg.capture.capture import Captured
from shardwright.pcg.errors import DistributedError, ShardwrightError
from shardwright.pcg.files import cache_folder
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.reports.shown import Shown
from shardwright.reports.units import seconds, size
from shardwright.search.plan import Plan
from tests.each import each, in_whole_grids, some
from tests.shardwright.command import MODELS, Run

ROOT = Path(__file__).resolve().parent.parent.parent
OTHERS = """
import shardwright as sw
from torch._subclasses.fake_tensor import FakeTensorMode

def scaled():
    return Net(), {"x": torch.randn(4, 8), "scale": 2.0}

def positional():
    return Net(), (torch.randn(4, 8),)

def bare():
    return Net(), torch.randn(4, 8)

def lonely():
    return Net()

def number():
    return 7

class Idle(nn.Module):
    def forward(self, x):
        return x.mean()

def idle():
    return Idle(), {"x": torch.randn(4, 8)}

def unreal():
    with FakeTensorMode():
        return Net(), {"x": torch.randn(4, 8)}

def hollow():
    with sw.fake():
        model = Net()
    return model, {"x": torch.ones(4, 8)}

def whole():
    return Net(), {"x": torch.ones(4, 8)}

def broken():
    raise ValueError("no such data set")
"""
BROKEN = (MODELS + OTHERS).count("\n")  # the last line


@pytest.fixture(autouse=True)
def _models(run: Run) -> None:
    """More functions in `models.py`."""
    Path("models.py").write_text(MODELS + OTHERS)


# ---- help ----


def test_help_answers_at_once() -> None:
    start = time.perf_counter()
    code = (
        "import sys; from shardwright.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'z3', 'rich'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert time.perf_counter() - start < 2  # 0.15 s on a machine that does nothing else
    assert done.stdout.endswith("[]\n")
    for command in (
        "plan",
        "explain",
        "timeline",
        "compare",
        "view",
        "verify",
        "run",
        "profile",
        "calibrate",
        "collectives",
        "doctor",
        "rules",
    ):
        assert f"\n  {command} " in done.stdout


@each(
    "command",
    ["plan", "explain", "timeline", "compare", "view", "verify", "run", "launch", "profile", "calibrate", "doctor"],
)
def test_every_command_has_help_with_examples(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"  shardwright {command} " in out


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "0.1.0" in done.stdout


# ---- plan, explain, compare, view ----


def test_plan_explain_compare_view(run: Run) -> None:
    status, out, err = run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "zero", "-o", "plan.json")
    assert status == 0, err
    assert out.startswith("Net on local-2: 2 devices")
    assert "ZeRO-3" in out
    assert "plan: capturing Net\n" in err
    assert "saved plan.json; look at it with: shardwright view plan.json --output plan.html" in err
    assert run("explain", "plan.json") == (0, out, "")
    assert run("explain", "plan.json", "--depth", "1")[0] == 0
    described = json.loads(run("explain", "plan.json", "--format", "json")[1])
    assert described["axes"][0]["name"] == "dp"
    told = run("timeline", "plan.json", "--trace", "trace.json", "--microbatches", "2")[1]
    assert "bubble          0" in told
    assert "at the peak     backward of microbatch" in told
    assert {e["ph"] for e in json.loads(Path("trace.json").read_text())["traceEvents"]} == {"X", "M", "C"}
    simulated = json.loads(run("timeline", "plan.json", "--format", "json")[1])
    assert simulated["step_s"] == described["prediction"]["step_s"]
    missing = run("timeline", "plan.json", "--trace", "no/such/folder.json")
    assert missing[0] == 4
    assert (
        "no/such/folder.json: cannot write the result: No such file or directory; choose a writable path" in missing[2]
    )
    assert run("compare", "plan.json")[1].startswith("Compared with\n")
    assert run("compare", "plan.json", "./plan.json")[1].startswith("Compared with\n")
    Path("other.json").write_text(Path("plan.json").read_text())
    assert run("compare", "plan.json", "other.json")[1].startswith("Plans\n")
    assert list(json.loads(run("compare", "plan.json", "--format", "json")[1])) == ["plan.json"]
    assert run("view", "plan.json")[:2] == (0, "plan.html\n")
    assert "<!doctype html>" in Path("plan.html").read_text()


def test_a_narrow_terminal_has_everything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 columns nothing is cut off: every word of the wide report is there, and no line is longer."""
    assert run("plan", "models.py:net", "-o", "plan.json")[0] == 0
    for command in (["explain"], ["explain", "--find", "up.weight"], ["compare"], ["timeline"]):
        monkeypatch.delenv("COLUMNS", raising=False)
        wide = run(*command, "plan.json")[1]
        monkeypatch.setenv("COLUMNS", "40")
        narrow = run(*command, "plan.json")[1]
        assert max(map(len, narrow.splitlines())) <= 40
        together = "".join(narrow.split())
        assert [word for word in wide.split() if word.strip("█") not in together] == []
    monkeypatch.setenv("COLUMNS", "10000")
    assert run("timeline", "plan.json")[1] == wide


def test_explain_finds_a_parameter(run: Run) -> None:
    assert run("plan", "models.py:net", "-o", "plan.json")[0] == 0
    status, out, _ = run("explain", "plan.json", "--find", "down.weight")
    assert status == 0
    assert out.startswith("down.weight: weight, float32\n")
    assert (
        run("explain", "plan.json", "--param", "down.weight")[1]
        == out
        == run("explain", "plan.json", "--op", "down.weight")[1]
    )
    status, _, err = run("explain", "plan.json", "--find", "down.wait")
    assert status == 2
    assert "no parameter, operator or module of this name; there is down.weight" in err


def test_explain_says_the_memory_alone(run: Run) -> None:
    whole = run("plan", "models.py:net", "-o", "plan.json")[1]
    out = run("explain", "plan.json", "--memory")[1]
    first, second = out.strip().split("\n\n")
    assert first.startswith("Memory (")
    assert second.startswith("Largest in memory at the peak (")
    assert first in whole
    assert second in whole
    told = json.loads(run("explain", "plan.json", "--memory", "--format", "json")[1])
    assert told["prediction"]["memory"] == json.loads(Path("plan.json").read_text())["prediction"]["memory"]
    assert "compute_s" not in told["prediction"]
    assert run("explain", "plan.json", "--memory", "--depth", "1")[0] == 2


@each(
    "field, by, is_told",
    [("time", 1.04, False), ("time", 1.06, True), ("time", 0.9, True), ("memory", 1.04, False), ("memory", 1.06, True)],
)
def test_a_prediction_that_is_not_made_now_is_told(run: Run, field: str, by: float, is_told: bool) -> None:
    if not Path("plan.json").exists():
        run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text())
    prediction, memory = data["prediction"], data["prediction"]["memory"]
    step, used = seconds(prediction["step_s"]), size(sum(memory.values()))
    if field == "time":
        prediction.update({name: value * by for name, value in prediction.items() if name.endswith("_s")})
        data["report"]["bound_s"] *= by
    else:
        memory["activations_bytes"] += round((by - 1) * sum(memory.values()))
    Path("edited.json").write_text(json.dumps(data))
    says = f"a step of {seconds(prediction['step_s'])} and {size(sum(memory.values()))} on each device"
    told = f"warning: edited.json: it says {says}, the prediction now made of its plan is {step} and {used}; the file "
    for command in ("explain edited.json", "compare plan.json edited.json", "view edited.json"):
        status, _, err = run(*command.split())
        assert status == 0
        assert (err.startswith(told) and err.count("\n") == 1 and "plan again" in err) if is_told else err == ""


def test_plan_as_json_is_the_plan_file(run: Run) -> None:
    _, out, _ = run("plan", "models.py:net", "-o", "plan.json", "--format", "json")
    assert json.loads(out) == json.loads(Path("plan.json").read_text())
    assert Plan.from_json(json.loads(out)).model == "Net"


@pytest.mark.parametrize("function", ["positional", "bare"])
def test_batches_may_be_positional(run: Run, function: str) -> None:
    assert run("plan", f"models.py:{function}")[0] == 0


@each(
    "config",
    [
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_head": 2,
         "vocab_size": 32, "n_positions": 16},
        {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], "hidden_sizes": [8, 8],
         "depths": [1, 1], "num_stages": 2, "image_size": 16},  # its constructor reads the numbers of a tensor
    ],
)  # fmt: skip
def test_plan_from_a_transformers_config(run: Run, config: Mapping[str, Any]) -> None:
    Path("config.json").write_text(json.dumps(config))
    status, out, err = run("plan", "--hf-config", "config.json", "--batch-size", "4", "--seq-len", "8")
    assert status == 0, err
    assert config["architectures"][0] in out


def test_a_second_plan_of_a_config_builds_no_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another cluster or question; whatever the capture follows from, or a damaged file, has it made anew."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_head": 2,
              "vocab_size": 32, "n_positions": 16}  # fmt: skip
    begin, captured = configured.captured_for, list[PrecisionMode | None]()

    def counted(*args: Any) -> Captured:
        captured.append(args[5])
        return begin(*args)

    monkeypatch.setattr(configured, "captured_for", counted)

    def plan(*options: str, **changed: object) -> tuple[dict[str, Any], int]:
        """The plan, and the number of captures."""
        Path("config.json").write_text(json.dumps({**config, **changed}))
        captured.clear()
        shape = "--hf-config", "config.json", "--batch-size", "4", "--seq-len", "8"
        status, out, err = run("plan", *shape, "--mesh", "x=2", "--roles", "data", "--format", "json", *options)
        assert status == 0, err
        return {**json.loads(out), "report": None}, len(captured)

    first, number = plan()
    assert number == 1
    assert plan() == (first, 0)
    assert [plan(*own)[1] for own in (["--roles", "zero"], ["--cluster", "local:4", "--mesh", "x=4"])] == [0, 0]
    others = ((("--dtype", "bfloat16"), {}), (("--batch-size", "8"), {}), ((), {"n_inner": 16}))
    assert {plan(*own, **changed)[1] for own, changed in some(others, 1)} == {1}
    assert plan("--precision", "fp32")[1] == 1
    assert plan("--precision", "fp32", "--precision", "amp_bf16")[1] == 1  # one of the two is there
    with monkeypatch.context() as patched:
        patched.setattr(configured, "version", lambda name: "another one")
        assert plan()[1] == 1
    for path in (cache_folder() / "programs").glob("*.json"):
        path.write_text(path.read_text()[:-9])
    assert plan() == (first, 1)
    assert plan() == (first, 0)
    shape = ["--hf-config", "config.json", "--batch-size", "4", "--seq-len", "8"]
    code = f"import sys; sys.modules['torch'] = None; from shardwright.__main__ import main; main(['plan', *{shape}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "GPT2LMHeadModel" in done.stdout) == (0, True), done.stderr


@each(
    ("config", "message"),
    [
        (None, "cannot read the config: No such file"),
        ("{", "not a complete JSON file"),
        ({"hidden": 3}, "it has no field 'model_type'"),
        ({"model_type": "nope"}, "model_type 'nope' with these values is not understood"),
        ({"model_type": "gpt2", "architectures": ["GPT9"]}, r"'architectures' is \['GPT9'\], of which .* knows none"),
        ({"model_type": "gpt2", "n_positions": 4, "n_layer": 1}, "--seq-len 128 is more than max_position_embed.* 4"),
        ({"model_type": "gpt2", "n_layer": 1, "architectures": ["GPT2ForTokenClassification"]},
         "what a batch of GPT2ForTokenClassification looks like is not known"),
        ({"model_type": "gpt2", "n_layer": 1, "n_head": 7}, "GPT2LMHeadModel cannot be built"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_used(run: Run, config: object, message: str) -> None:
    if config is not None:
        Path("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert_error(run("plan", "--hf-config", "config.json"), message)


def test_an_unknown_dtype(run: Run) -> None:
    Path("config.json").write_text("{}")
    found = run("plan", "--hf-config", "config.json", "--dtype", "int3")
    assert_error(found, "--dtype: expected one of 'float32', .*, got 'int3'")


# ---- errors ----


def assert_error(result: tuple[int, str, str], message: str, status: int = 2) -> None:
    found, out, err = result
    assert (found, out) == (status, "")
    assert re.search(f"error: .*{message}", err), err
    assert "Traceback" not in err


@each(
    ("arguments", "message"),
    [
        (["plan"], "give either a model as FILE.py:FUNCTION or --hf-config FILE"),
        (["plan", "models.py"], "'models.py': give it as FILE.py:FUNCTION"),
        (["plan", "nope.py:net"], "there is no file nope.py"),
        (["plan", "models.py:nope"], "models.py has no function 'nope'; it has Net, net, scaled, positional"),
        (["plan", "models.py:broken"], f"models.py:{BROKEN}: ValueError: no such data set"),
        (["plan", "models.py:lonely"], r"returns a model without a batch; return \(model, batch\)"),
        (["plan", "models.py:number"], "the function returns int"),
        (["plan", "models.py:net", "--cluster", "moon"], "--cluster 'moon' is no cluster: give local:N, preset"),
        (["plan", "models.py:net", "--cluster", "local:x"], "local:N wants a number of ranks"),
        (["plan", "models.py:net", "--cluster", "preset:dgx-h100:0"], "wants a number of machines"),
        (["plan", "models.py:net", "--cluster", "preset:dgx-h100:4+dgx-a100:x"], "wants a number of machines"),
        (["plan", "models.py:net", "--cluster", "preset:dgx-h100:4+z100"], "Cluster.mixed: unknown machine 'z100'"),
        (["plan", "models.py:net", "--cluster", "preset:dgx-h100:2+"], "each part beside a . want the name of a m"),
        (["plan", "models.py:net", "--cluster", "preset:"], "want the name of a machine, such as preset:dgx-h100:4"),
        (["plan", "models.py:net", "--cluster", "preset:abacus"], "unknown machine 'abacus'; choose one of"),
        (["plan", "models.py:net", "--cluster", "nope.json"], "nope.json"),
        (["plan", "models.py:net", "--mesh", "2x2"], "--mesh '2x2' is no mesh: give axes and sizes such as dp=2,tp=4"),
        (["plan", "models.py:net", "--mesh", "x=2", "--roles", "fast"], "unknown axis role 'fast'"),
        (["plan", "models.py:net", "--roles", "data"], "without a mesh"),
        (["plan", "models.py:net", "--mesh", "x=3"], "has 3 devices"),
        (["plan", "models.py:net", "--precision", "fp4"], "--precision: expected one of 'fp32', .*, got 'fp4'"),
        (["plan", "models.py:net", "--precision", "up="], "--precision 'up=': give a precision, or pairs such as"),
        (["plan", "models.py:net", "--precision", "up=fp32,up=fp32"], "'lm_head=fp32', each name once"),
        (["plan", "models.py:net", "--precision", "upp=fp32"], "'upp' names no module of Net; .* such as 'up'"),
        (["plan", "models.py:net", "--precision", "up=fp8,*=fp32"], r"\['up'\]: expected 'fp32' or .*, got 'fp8'"),
        (["plan", "models.py:net", "--recompute", "up=full,up=none"], "--recompute 'up=full,up=none': give a mode, or"),
        (["explain", "nope.json"], "nope.json: cannot read the plan: No such file"),
        (["explain", "models.py"], "models.py: not a complete JSON file"),
        (["explain", "empty.json"], "this is not a plan"),
        (["compare"], "Missing argument"),
        (["view", "nope.json"], "cannot read the plan"),
        (["expalin"], "No such command"),
        (["run", "nope.py"], "there is no file nope.py"),
        (["verify", "models.py:net", "--plan", "nope.json"], "cannot read the plan"),
        (["verify", "models.py:net", "--plan", "nope.json", "--mesh", "x=2"], "--plan was given together with --mesh"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_status_2(run: Run, arguments: list[str], message: str) -> None:
    Path("empty.json").write_text("{}")
    assert_error(run(*arguments), message)


def test_a_file_that_cannot_be_imported(run: Run) -> None:
    Path("bad.py").write_text("import nonexistent_module\n")
    assert_error(run("plan", "bad.py:net"), r"bad.py:1: ModuleNotFoundError: No module named 'nonexistent_module'")


def test_usage_errors_say_where_help_is(run: Run) -> None:
    assert "try: shardwright plan --help" in run("plan", "--nope")[2]


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DEBUG", "1")
    status, _, err = run("plan", "models.py:broken")
    assert status == 2
    assert "Traceback" in err
    assert 'raise ValueError("no such data set")' in err


def test_bugs_are_told_as_such(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: object) -> Shown:
        raise KeyError("x")

    monkeypatch.setattr(Shown, "load", crash)
    status, _, err = run("explain", "plan.json")
    assert status == 2
    assert err.startswith("error: unexpected KeyError: 'x' (test_cli.py:")
    assert "SHARDWRIGHT_DEBUG=1 shows more" in err
    assert "newer" not in err
    monkeypatch.setattr(versions, "TESTED", ("1.0", "1.1"))
    assert "is newer than Shardwright is tested with (1.0 and 1.1)" in run("explain", "plan.json")[2]


def test_interruption_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: object) -> Shown:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shown, "load", interrupt)
    status, out, err = run("explain", "plan.json")
    assert (status, out, err.strip()) == (130, "", "interrupted")


# ---- clusters ----


def test_clusters_by_name_and_file(tmp_path: Path) -> None:
    assert parse_cluster("local:4").num_devices == 4
    assert parse_cluster("preset:dgx-h100:8").num_devices == 64
    assert parse_cluster("preset:dgx-h100").num_devices == 8
    assert [part.num_devices for part in parse_cluster("preset:dgx-h100:4+dgx-a100").parts] == [32, 8]
    assert parse_cluster("preset:dgx-h100:2:4").num_devices == 8
    assert [part.num_devices for part in parse_cluster("preset:a100-40:1,l40s:1:4").parts] == [8, 4]
    assert parse_cluster("preset:h100-sxm").name == "dgx-h100"  # a GPU stands for the first machine that has it
    parse_cluster("local:3").save(tmp_path / "c.json")
    assert parse_cluster(str(tmp_path / "c.json")).num_devices == 3
    with pytest.raises(ShardwrightError, match="is no cluster"):
        parse_cluster("moon")


TOPO = "GPU0 X NV12 SYS SYS\nGPU1 NV12 X SYS SYS\nGPU2 SYS SYS X NV12\nGPU3 SYS SYS NV12 X\n"


def test_a_cluster_from_what_the_driver_prints(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.txt").write_text(TOPO, encoding="utf-8")
    Path("hosts").write_text("node1\nnode2\nnode2\n", encoding="utf-8")
    asked = ("cluster", "import", "topo.txt", "--gpu", "A100-80", "--network-gb-per-s", "50")
    status, out, _ = run(*asked, "--hosts", "node[1-3]", "-o", "c.json")
    assert (status, out.split(",")[0]) == (0, "3 × 4 A100-80: 2 nvlink × 2 sockets × 3 network")
    assert "links by nvidia-smi topo -m; network as given: 50 GB/s per node" in out
    assert Cluster.load("c.json").levels[-1].bandwidth_bytes_per_s == pytest.approx(50e9 * 0.9 / 4)
    assert run(*asked, "--hosts", "hosts")[1].startswith("2 × 4 A100-80")
    assert run(*asked)[1].startswith("1 × 4 A100-80")
    net = '<pci class="0x020700"><nic><net name="a" speed="100000"/></nic></pci>'
    gpu = '<pci busid="1" class="0x030200"><gpu dev="0"/></pci>'
    Path("nccl.xml").write_text(f'<system version="1"><cpu>{gpu}{net}</cpu></system>', encoding="utf-8")
    status, out, _ = run("cluster", "import", "nccl.xml", "--gpu", "T4", "--nodes", "2")
    assert (status, out.split(",")[0]) == (0, "2 × 1 T4: 1 pcie × 2 network")
    assert "links by NCCL; network by its cards: 12.5 GB/s per node" in out


@each(
    ("arguments", "problem"),
    [
        (("--gpu", "A100-80", "--hosts", "a", "--nodes", "2"), "--hosts and --nodes both say how many nodes there are"),
        (("--gpu", "Z9"), "GPU 'Z9' is not in the table; choose one of V100-16, "),
        (("--gpu", "A100-80", "--hosts", "n[3-1]"), "host list 'n[3-1]': '3-1' is no range of numbers"),
        ((), "Missing option '--gpu'"),
    ],
)
def test_clusters_that_cannot_be_imported(
    arguments: tuple[str, ...], problem: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.txt").write_text(TOPO, encoding="utf-8")
    status, _, err = run("cluster", "import", "topo.txt", *arguments)
    assert status == 2
    assert problem in err


def test_files_of_clusters_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, problem in (("bytes", "expected text in UTF-8, got other bytes"), ("nowhere", "cannot read it (No such")):
        status, _, err = run("cluster", "import", str(tmp_path / name), "--gpu", "T4")
        assert status == 2
        assert f"{name}: {problem}" in err
    status, _, err = run("cluster", "import", "x", "--gpu", "T4", "--hosts", str(tmp_path / "bytes"))
    assert status == 2


def _fake_calibrate(cluster: Cluster, asked: list[object]) -> Callable[..., Cluster]:
    def calibrate(num_ranks: int, **options: Any) -> Cluster:
        asked.append((num_ranks, options["device"], options["thorough"], options["timeout_s"]))
        options["warn"]("noisy: 9 processes were running")
        return cluster

    return calibrate


def test_calibrate_says_how_long_it_takes(run: Run) -> None:
    told = " ".join(run("calibrate", "--help")[1].split())
    assert "About a minute, five with --thorough, if nothing else runs." in told


def test_calibrate_shows_and_saves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = parse_cluster("local:2"), list[object]()
    monkeypatch.setattr("shardwright.cost.calibration.calibrate.calibrate", _fake_calibrate(cluster, asked))
    status, out, err = run("calibrate", "2", "-o", "c.json")
    assert status == 0
    assert out.startswith("local-2: 2 rank")
    assert "\n  dispatch: 3.5 µs for an operator, 0.0 µs for the update of a parameter" in out
    assert err.endswith("warning: noisy: 9 processes were running\n")
    assert "all_reduce over 2 ranks: " in out
    assert parse_cluster("c.json") == cluster
    assert json.loads(run("calibrate", "--format", "json")[1])["name"] == "local-2"
    run("calibrate", "4", "--device", "cuda", "--thorough", "--timeout", "9")
    assert asked == [(2, "cpu", False, None), (2, "cpu", False, None), (4, "cuda", True, 9.0)]
    assert calibrate_command.calibrate.name == "calibrate"


# ---- verify and run ----


def test_what_cannot_be_trained_is_told(run: Run) -> None:
    """A model without values, and one without parameters, of which a plan can be made all the same."""
    assert_error(run("verify", "models.py:unreal", "--cluster", "local:1"), "'up.weight' is a fake tensor and has no ")
    useless = "the loss, depends on no parameter that is trained"
    assert_error(run("verify", "models.py:idle", "--cluster", "local:1"), useless)
    Cluster.local(1).save("cluster.json")
    settings = {**DEFAULTS, "model": {"model": "models.py:idle"}, "cluster": "cluster.json", "steps": 1}
    with pytest.raises(DistributedError, match=useless):
        run_ranks(train, 1, args=(settings,))
    assert "precision       the model's own: no operators;" in run("plan", "models.py:idle")[1]


def test_verify_passes_and_tells_the_norm(run: Run) -> None:
    status, out, err = run("verify", "models.py:net", "--mesh", "tp=2", "--roles", "tensor")
    assert status == 0, err
    assert out.startswith("PASSED: Net on mesh [tp=2], 4 gradients, 0 buffers")
    assert "‖g − g_ref‖₂ / max(‖g_ref‖₂, 1e-5·‖G_ref‖₂)" in out


def test_precisions_by_module(run: Run) -> None:
    """Of two the search chooses one; `verify` compares with a process whose modules run in them too."""
    policy = ("--precision", "down=fp32,*=amp_bf16")
    given = ("--mesh", "dp=2", "--roles", "zero", "--microbatches", "1")
    status, out, err = run("plan", "models.py:net", *policy, "--precision", "fp32", *given)
    assert status == 0, err
    assert "amp_bf16, with down in fp32" in out
    status, out, err = run("verify", "models.py:net", *policy, *given, "--loss-tolerance", "1e-5")
    assert status == 0, err
    assert out.startswith("PASSED: Net on mesh [dp=2], 4 gradients")


STAGED = """
import torch
from torch import nn

class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        parts = lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout())
        self.layers = nn.ModuleList(parts() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def staged():
    return Staged(), {"x": torch.randn(4, 8)}
"""


def test_verify_pipeline_stages(run: Run) -> None:
    """Each stage is compared by what it has, and all together have all; dropout's masks are those of one process."""
    Path("staged.py").write_text(STAGED)
    given = ("--cluster", "local:2", "--stages", "2", "--microbatches", "1")
    status, out, err = run("verify", "staged.py:staged", *given)
    assert status == 0, err
    assert out.startswith("PASSED: Staged on mesh [x=1], 6 gradients, 6 buffers")
    unlike = ("--cluster", "local:3", "--stages", "2,1", "--mesh", "x=2", "--roles", "data", "--microbatches", "1")
    status, out, err = run("verify", "staged.py:staged", *unlike)
    assert status == 0, err
    assert out.startswith("PASSED: Staged on mesh [x=2], 6 gradients, 6 buffers")
    assert_error(run("verify", "staged.py:staged", "--stages", "2,0"), "--stages '2,0': expected a number of pipeline")
    assert _worst([{"a": 1.0}, {"a": 2.0, "b": 3.0}], ("a", "b", "c")) == {"a": 2.0, "b": 3.0, "c": math.inf}


def test_verify_fails_with_status_1(run: Run) -> None:
    status, out, _ = run("verify", "models.py:net", "--mesh", "dp=2", "--roles", "data", "--gradient-tolerance", "0",
                         "--loss-tolerance", "0")  # fmt: skip
    assert status == 1
    assert out.startswith("FAILED")
    assert "OFF" in out


def test_verify_a_plan_as_json(run: Run) -> None:
    run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "zero", "-o", "plan.json")
    status, out, _ = run("verify", "models.py:net", "--plan", "plan.json", "--format", "json")
    found = json.loads(out)
    assert status == 0
    assert found["passed"]
    assert found["loss_error"] <= 1e-5
    assert set(found["gradient_errors"]) == {"up.weight", "up.bias", "down.weight", "down.bias"}


def test_verify_refuses_a_plan_for_another_batch(run: Run) -> None:
    run("plan", "models.py:scaled", "-o", "plan.json")
    assert_error(run("verify", "models.py:net", "--plan", "plan.json"), "plan for 'Net' has fingerprint")


def test_dry_run(run: Run) -> None:
    four = ("--cluster", "local:4", "--mesh", "dp=2,tp=2", "--roles", "zero,tensor")
    run("plan", "models.py:net", *four, "-o", "plan.json")
    status, out, err = run("verify", "plan.json", "--dry-run", "--rank", "3")
    assert status == 0, out + err
    assert out.startswith("PASSED: dry run of Net on mesh [dp=2, tp=2]\n  rank 3 of 4, ")
    assert re.search(r"\n  all_gather +dp +weights +(\d+) +\1 +(\S+ \S+) +\2  ok\n", out)
    assert "verify: running the program of rank 3 of 4 without data\n" in err
    found = json.loads(run("verify", "--plan", "plan.json", "--dry-run", "--format", "json")[1])
    assert found["passed"]
    assert {c["collective"] for c in found["collectives"]} >= {"all_gather", "reduce_scatter"}
    assert all(c["predicted"] == c["found"] > 0 for c in found["collectives"])
    assert set(found["memory"]["found"]) >= {"parameters", "optimizer", "buffers"}


def test_dry_run_of_an_old_prediction_fails_with_status_1(run: Run) -> None:
    run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text())
    data["prediction"]["memory"]["activations_bytes"] += 10**6
    Path("plan.json").write_text(json.dumps(data))
    status, out, _ = run("verify", "plan.json", "--dry-run")
    assert status == 1
    assert out.startswith("FAILED: dry run of Net")
    assert "memory in all: the plan says 1." in out


@each(
    "arguments, message",
    [
        (["plan.json", "--plan", "plan.json"], "--dry-run takes one plan file, got 2; such as"),
        ([], "--dry-run takes one plan file, got 0"),
        (["nope.json"], "nope.json: cannot read the plan: No such file"),
        (["models.py:net"], "models.py:net: cannot read the plan"),
        (["plan.json", "--mesh", "dp=2"], "--dry-run takes a plan file alone"),
        (["--hf-config", "config.json"], "--dry-run takes a plan file alone"),
        (["plan.json", "--rank", "2"], "rank 2: the mesh .* has ranks 0 to 1"),
        (["old.json"], "plan version 1 is not supported"),
    ],
)
def test_dry_run_of_what_it_cannot_run(run: Run, arguments: list[str], message: str) -> None:
    if not Path("old.json").exists():
        run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")
        Path("old.json").write_text(json.dumps({**json.loads(Path("plan.json").read_text()), "version": 1}))
    assert_error(run("verify", *arguments, "--dry-run"), message)


# ---- what goes together, and what fits ----


def test_a_plan_that_does_not_fit_ends_with_status_3_and_says_by_how_much(run: Run) -> None:
    run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text())
    used = sum(data["prediction"]["memory"].values())
    data["report"]["limit_bytes"] = used - 1000
    data["cluster"]["device"]["memory_bytes"] = data["prediction"]["device_bytes"] = used - 500
    Path("tight.json").write_text(json.dumps(data))
    for command in (
        "explain tight.json", "compare plan.json tight.json", "view tight.json", "run models.py:net --plan tight.json",
        "verify models.py:net --plan tight.json", "verify tight.json --dry-run",
    ):  # fmt: skip
        status, _, err = run(*command.split())
        assert status == 3, (command, err)
        assert re.search(r"error: no plan fits: .*more than the .* that may be used", err), (command, err)


@each("command", ["run", "verify"])
def test_a_plan_has_its_own_cluster(run: Run, command: str) -> None:
    if not Path("plan.json").exists():
        run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")
    arguments = (command, "models.py:net", "--plan", "plan.json", "--cluster", "local:4")
    assert_error(run(*arguments), "--plan and --cluster contradict each other: plan.json is for .*2 × .*; leave out")


def test_run_refuses_devices_that_are_not_here(run: Run) -> None:
    for target in ("models.py:net", "train.py"):
        message = r"run starts ranks on this machine, which has \d GPUs, and dgx-h100 has 8 \(H100"
        assert_error(run("run", target, "--cluster", "preset:dgx-h100:1"), message, status=4)


@each(
    "arguments",
    [
        ["plan", "models.py:net", "-o"],
        ["calibrate", "-o"],
        ["rules", "generate", "--max-ops", "3", "-o"],
        ["view", "plan.json", "-o"],
        ["profile", "plan.json", "models.py:net", "-o"],
        ["timeline", "plan.json", "--trace"],
    ],
)
def test_where_nothing_can_be_written_is_told_before_the_work(run: Run, arguments: list[str]) -> None:
    result = run(*arguments, "no/where.json")
    assert (
        result[2]
        == "error: no/where.json: cannot write the result: No such file or directory; choose a writable path\n"
    )
    assert_error(result, "cannot write", status=4)
    assert not list(Path().glob("**/.*partial"))


@in_whole_grids
@pytest.mark.slow
def test_what_ranks_say_is_the_last_word(run: Run) -> None:
    """Once, and without tracebacks of torchrun."""
    run("plan", "models.py:scaled", "--cluster", "local:1", "-o", "plan.json")
    status, _, err = run("run", "models.py:net", "--plan", "plan.json")
    assert status == 2
    assert err.startswith("error: plan for 'Net' has fingerprint")
    assert err.count("\n") == 1


def test_ranks_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(Start.local(2))["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert "--nproc-per-node=3" in Start.local(3).words  # or torchrun starts one rank
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(Start.local(2))["OMP_NUM_THREADS"] == "7"


@pytest.mark.usefixtures("forked")
def test_run_a_model(run: Run) -> None:
    status, out, err = run("run", "models.py:net", "--cluster", "local:2", "--steps", "3",
                           "--precision", "up=fp32,*=amp_bf16")  # fmt: skip
    assert status == 0, err
    assert "step    3  loss " in out
    assert "median step " in out
    assert "predicted " in out


@pytest.mark.usefixtures("forked")
def test_run_a_model_without_memory(run: Run) -> None:
    """It trains like one with memory; with weights from a file, from other values."""
    torch.save({f"{name}.{kind}": torch.full(shape, 0.5) for name, kind, shape in SHAPES}, "weights.pt")
    losses = list[list[str]]()
    for model, *more in (("hollow",), ("whole",), ("hollow", "--weights", "weights.pt")):
        status, out, err = run("run", f"models.py:{model}", "--cluster", "local:2", "--steps", "2", *more)
        assert status == 0, err
        losses.append([line.split()[3] for line in out.splitlines() if line.startswith("step")])
    assert losses[0] == losses[1] != losses[2]
    assert losses[2][0] == "1332.250000"  # (16 · (8 · 0.5 + 0.5) · 0.5 + 0.5)²
    status, _, err = run("run", "models.py:hollow", "--cluster", "local:2", "--weights", "none.pt")
    assert (status, "none.pt: there is no such file or folder" in err) == (2, True)


SHAPES = [("up", "weight", (16, 8)), ("up", "bias", (16,)), ("down", "weight", (8, 16)), ("down", "bias", (8,))]


@pytest.mark.slow
def test_a_script_that_fails_has_the_last_word(run: Run) -> None:
    """One that runs is in test_api."""
    Path("train.py").write_text("import sys\nassert sys.argv[1] == 'good'\n")
    status, _, err = run("run", "train.py", "--cluster", "local:2", "--", "bad")
    assert status == 1
    assert "AssertionError" in err
    assert "ChildFailedError" not in err


@pytest.mark.slow
def test_a_rank_that_is_killed_is_no_failure_of_the_script(run: Run) -> None:
    Path("train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    status, _, err = run("run", "train.py", "--cluster", "local:1")
    assert (status, err) == (4, "rank 0 was ended by SIGKILL\n")


def test_ranks_get_every_option_that_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file, of which `compile` on each rank makes the same options."""
    seen = list[dict[str, Any]]()

    def launched(command: Sequence[str], *_: object, **__: object) -> int:
        seen.append(json.loads(Path(command[-1]).read_text()))
        return 0

    monkeypatch.setattr(run_command, "launch", launched)
    words = [
        "--mesh",
        "x=2",
        "--roles",
        "zero",
        "--microbatches",
        "2",
        "--pin",
        "no context",
        "--precision",
        "amp_bf16",
    ]
    result = CliRunner().invoke(
        cli, ["run", "models.py:net", "--cluster", "local:2", "--strict", "--pin", "no context", *words]
    )
    assert result.exit_code == 0, result.output
    own: dict[str, Any] = {
        "mesh": {"x": 2},
        "roles": ["zero"],
        "microbatches": 2,
        "pins": ["no context"],
        "precision": ["amp_bf16"],
    }
    assert PlanOptions.of(**seen[0]["options"]) == PlanOptions.of(**own, strict=True)
