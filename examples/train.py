"""Train a model as a pipeline: the same script on one process, with a thread for each partition, or under torchrun.

    python examples/train.py resnet18 --partitions 2
    torchrun --nproc-per-node 2 examples/train.py resnet18
    torchrun --nproc-per-node 4 examples/train.py amoebanetd

It prints the loss of each step: the same either way, but for the last digits of convolutions, which may differ from one
start of Python to the next. Data are random.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from torchgpipe import GPipe, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.distributed import DistributedGPipe


def built(name: str) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model's layers and a sample: of AmoebaNet-D, a transformer, or any classifier of torchvision."""
    if name == "amoebanetd":
        from reproduce.models import amoebanetd

        return amoebanetd(3, 16, num_classes=10), torch.zeros(2, 3, 224, 224)
    if name == "transformer":
        layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(8)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10)), torch.zeros(2, 16, 64)
    import torchvision

    sample = torch.zeros(2, 3, 64, 64)
    return sequential(torchvision.models.get_model(name, num_classes=10), sample), sample


def main() -> None:
    """Train a few steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="resnet18")
    parser.add_argument("--partitions", type=int, default=2, help="without torchrun")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()

    ranks = "RANK" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    n = dist.get_world_size() if ranks else options.partitions

    torch.set_num_threads(1)  # as torchrun does; with more, sums are added up in another order
    torch.manual_seed(0)  # every rank builds the same model, and takes its own part
    module, sample = built(options.model)
    balance = balance_by_size(n, module, sample)
    model: GPipe | DistributedGPipe
    if ranks:
        model = DistributedGPipe(module, balance, chunks=options.chunks)
    else:
        model = GPipe(module, balance, devices=["cpu"] * n, chunks=options.chunks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    data = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        x = torch.rand(options.batch, *sample.shape[1:], generator=data)
        target = torch.randint(10, (options.batch,), generator=data)
        began = time.perf_counter()
        loss = model.loss(nn.functional.cross_entropy, x, target)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not ranks or dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(f"step {step}: loss {loss.item()}, gradient norm {norm.item()}, {seconds:.3f} s", flush=True)
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
