"""LoRA fine-tuning with peft: the base stays frozen, adapters are trained, and saved as peft reads them.

    torchrun --nproc-per-node 2 examples/lora.py --folder runs/adapter
    torchrun --nproc-per-node 2 examples/lora.py --folder runs/adapter --base FOLDER

The base is a folder of `save_pretrained`, or else a GPT-2 with random weights. Only adapters have gradients and states
of the optimizer; the plan shards the frozen weights like others. Checkpoints and more are in train.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from demo_model import model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from train import data, evaluated, tell
from transformers import AutoModelForCausalLM

import shardwright as sw


def adapted(base: Path | None) -> PeftModel:
    """The base with an adapter beside every linear layer."""
    net = model() if base is None else AutoModelForCausalLM.from_pretrained(base, use_cache=False)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(net, lora).train()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    training, held_out = data(options.length)
    example = {name: torch.stack([x] * options.batch) for name, x in training[0].items()}
    cluster = sw.Cluster.load(options.cluster) if options.cluster else sw.Cluster.detect()
    net = adapted(options.base)
    parallel = sw.compile(net, cluster, kwargs=example, precision=options.precision)

    adapters = [p for p in parallel.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=options.lr)
    loader = sw.Loader(parallel, training, seed=options.seed)
    for step, batch in enumerate(loader, 1):
        loss = parallel.forward_backward(**batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(f"step {step}/{options.steps}  loss {loss.item():.6f}")
        if step == options.steps:
            break
    tell(f"loss on held-out text {evaluated(parallel, held_out, options.batch):.6f}")
    trained = adapters_of(parallel)
    if dist.get_rank() == 0:
        net.load_state_dict(trained, strict=False)
        net.save_pretrained(options.folder)
    tell(f"{sum(x.numel() for x in trained.values()):,} numbers of adapters are in {options.folder}")


def adapters_of(parallel: torch.nn.Module) -> dict[str, Tensor]:
    """The trained parameters of all pipeline stages, whole, on every rank."""
    parameters = cast("Iterable[tuple[str, DTensor]]", parallel.named_parameters())
    own = {name: p.full_tensor().detach().cpu() for name, p in parameters if p.requires_grad}
    stages = [own] * dist.get_world_size()
    dist.all_gather_object(stages, own)
    return {name: value for stage in stages for name, value in stage.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the trained adapters")
    parser.add_argument("--base", type=Path, help="a folder of save_pretrained; by default a GPT-2 of random weights")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a global batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", default=None, help='such as "amp_bf16"; by default the model\'s own')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", type=Path, help="a cluster file; by default what this process runs on")
    train(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
