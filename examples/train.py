"""Train a model as a pipeline: the same script on one process, with a thread for each partition, or under torchrun.

    python examples/train.py resnet18 --partitions 2
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/train.py resnet18
    torchrun --local-addr 127.0.0.1 --nproc-per-node 4 examples/train.py amoebanetd

It prints the loss of each step: the same either way, but for the last digits of convolutions, which may differ from one
start of Python to the next. Data are random.

With --save it goes on from the newest state in a folder, so that torchrun may start it again after a failure:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --local-addr 127.0.0.1 \\
        --nproc-per-node 4 --max-restarts 3 examples/train.py transformer --steps 100 --save states --every 10
"""

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.patience import waiting_for
from torchgpipe.plan import plan
from torchgpipe.state.saves import Saves
from torchgpipe.timeline import record


def built(name: str) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model's layers and a sample: of AmoebaNet-D, a transformer, or any classifier of torchvision."""
    if name == "amoebanetd":
        from reproduce.models.built import amoebanetd

        return amoebanetd(3, 16, num_classes=10), torch.zeros(2, 3, 224, 224)
    if name == "transformer":
        layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(8)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10)), torch.zeros(2, 16, 64)
    import torchvision

    sample = torch.zeros(2, 3, 64, 64)
    return sequential(torchvision.models.get_model(name, num_classes=10), sample), sample


def balanced(
    module: nn.Sequential, sample: torch.Tensor, n: int, batch: int, chunks: int
) -> list[int]:
    """Return the balance that is planned for n devices: by a description, so that every rank and start has the same."""
    found = plan(module, sample, batch_size=batch, devices=n, hardware="h100x8", chunks=chunks)
    return list(found.by_devices[n].best.setup.balance)


def main() -> None:
    """Train a few steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="resnet18")
    parser.add_argument("--partitions", type=int, default=2, help="without torchrun")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--trace", metavar="FILE", help="write when each task of the third step ran, for Perfetto"
    )
    parser.add_argument(
        "--save", metavar="FOLDER", help="save the state there, and go on from the newest"
    )
    parser.add_argument("--every", type=int, default=1, metavar="STEPS")
    options = parser.parse_args()
    if options.every < 1:
        parser.error(f"--every must be at least 1, but is {options.every}")

    ranks = "RANK" in os.environ
    if ranks:
        with waiting_for(f"other ranks at {os.environ['MASTER_ADDR']}"):
            dist.init_process_group("gloo")
    n = dist.get_world_size() if ranks else options.partitions

    torch.set_num_threads(1)  # as torchrun does; with more, sums are added up in another order
    torch.manual_seed(0)  # every rank builds the same model, and takes its own part
    module, sample = built(options.model)
    balance = balanced(module, sample, n, options.batch, options.chunks)
    model: GPipe | DistributedGPipe
    if ranks:
        model = DistributedGPipe(module, balance, chunks=options.chunks)
    else:
        model = GPipe(module, balance, devices=["cpu"] * n, chunks=options.chunks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    saves = Saves(options.save) if options.save else None
    found = saves.load(model, optimizer) if saves else None
    begin = found["step"] + 1 if found else 0
    for step in range(begin, options.steps):
        data = torch.Generator().manual_seed(
            step
        )  # of each step, so that going on has nothing to skip
        x = torch.rand(options.batch, *sample.shape[1:], generator=data)
        target = torch.randint(10, (options.batch,), generator=data)
        began = time.perf_counter()
        with (
            record(model, options.trace)
            if options.trace and step == begin + 2
            else nullcontext() as recording
        ):
            loss = model.loss(nn.functional.cross_entropy, x, target)
            loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not ranks or dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {step}: loss {loss.item()}, gradient norm {norm.item()}, {seconds:.3f} s",
                flush=True,
            )
            if recording is not None:
                print(recording, flush=True)
        if saves and (step + 1) % options.every == 0:
            saves.save(step, model, optimizer)
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
