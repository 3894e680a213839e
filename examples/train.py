"""Train a model as a pipeline.

The script runs either in one process, with a thread for each partition, or in several processes
under torchrun:

    python examples/train.py resnet18 --partitions 2
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/train.py resnet18
    torchrun --local-addr 127.0.0.1 --nproc-per-node 4 examples/train.py amoebanetd

The script prints the loss of each step. The losses are the same with threads and under torchrun.
Only the last digits of convolutions can differ from one start of Python to the next. The data are
random.

With --save, the script saves its state in a folder, and continues from the newest state there. So
torchrun can restart the script after a failure:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --local-addr 127.0.0.1 \\
        --nproc-per-node 4 --max-restarts 3 \\
        examples/train.py transformer --steps 100 --save states --every 10
"""

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Flatten, Linear, Sequential, TransformerEncoderLayer
from torch.nn.functional import cross_entropy

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.patience import waiting_for
from torchgpipe.plan import plan
from torchgpipe.saves import Saves
from torchgpipe.timeline import record


def built(name: str) -> tuple[Sequential, Tensor]:
    """Return the layers of a model, and a sample of its input.

    The model is `amoebanetd`, `transformer`, or any classifier of torchvision.
    """
    if name == "amoebanetd":
        from reproduce.models.built import amoebanetd

        return amoebanetd(3, 16, num_classes=10), torch.zeros(2, 3, 224, 224)
    if name == "transformer":
        layers = [TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(8)]
        head = Linear(16 * 64, 10)
        return Sequential(*layers, Flatten(), head), torch.zeros(2, 16, 64)
    import torchvision

    module = torchvision.models.get_model(name, num_classes=10)
    sample = torch.zeros(2, 3, 64, 64)
    return sequential(module, sample), sample


def balanced(module: Sequential, sample: Tensor, n: int, batch: int, chunks: int) -> list[int]:
    """Plan a balance for n devices, and return it.

    The plan uses a hardware description and measures no time. So all ranks find the same balance,
    even if the script is restarted after a failure.
    """
    found = plan(module, sample, batch_size=batch, devices=n, hardware="h100x8", chunks=chunks)
    best = found.by_devices[n].best
    return list(best.setup.balance)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="resnet18")
    parser.add_argument("--partitions", type=int, default=2, help="without torchrun")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    traced = "write when each task of the third step ran, for Perfetto"
    parser.add_argument("--trace", metavar="FILE", help=traced)
    saved = "save the state there, and go on from the newest state"
    parser.add_argument("--save", metavar="FOLDER", help=saved)
    parser.add_argument("--every", type=int, default=1, metavar="STEPS")
    options = parser.parse_args()
    if options.every < 1:
        parser.error(f"--every must be at least 1, but is {options.every}")
    return options


def main() -> None:
    """Train the model for a few steps."""
    options = arguments()
    ranks = "RANK" in os.environ
    if ranks:
        address = os.environ["MASTER_ADDR"]
        with waiting_for(f"other ranks at {address}"):
            dist.init_process_group("gloo")
    n = dist.get_world_size() if ranks else options.partitions

    torch.set_num_threads(1)  # as under torchrun; more threads can change the last digits
    torch.manual_seed(0)  # every rank builds the same model, and keeps its own partition
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
        # Each step has its own seed. So a script that continues a run does not have to skip random
        # numbers.
        data = torch.Generator().manual_seed(step)
        x = torch.rand(options.batch, *sample.shape[1:], generator=data)
        target = torch.randint(10, (options.batch,), generator=data)
        traced = options.trace and step == begin + 2
        began = time.perf_counter()
        with record(model, options.trace) if traced else nullcontext() as recording:
            loss = model.loss(cross_entropy, x, target)
            loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not ranks or dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            numbers = f"loss {loss.item()}, gradient norm {norm.item()}"
            print(f"step {step}: {numbers}, {seconds:.3f} s", flush=True)
            if recording is not None:
                print(recording, flush=True)
        if saves and (step + 1) % options.every == 0:
            saves.save(step, model, optimizer)
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
