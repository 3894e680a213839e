"""Measure what `torch.compile` gains on a transformer, with pipelines and without.

The model has 12 equal layers, of one of two kinds:

- `formulas` computes attention and GELU by formulas of many operators, which the compiler can fuse
- `fused` calls `scaled_dot_product_attention` and `gelu`, which PyTorch has fused already

There are three ways to train it:

- `plain` runs the layers on one micro-batch after another, without a pipeline
- `workers` is a `GPipe` of two partitions, each in a thread
- `ranks` is a `DistributedGPipe` of two partitions, each in a process

With checkpointing, `plain` runs each half of the layers within `torch.utils.checkpoint`.

In each way, a step with uncompiled layers and a step with compiled layers are timed in each round.
The table's ratio is the uncompiled step's time divided by the compiled step's time, as the median
over all rounds. If the ratio of a pipeline is as high as that of `plain`, the pipeline gains as
much from compilation as layers without a pipeline.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from itertools import product, starmap
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Found, by_case, collect, command, in_format, start
from reproduce.error import Error
from reproduce.records.record import Record, Result
from reproduce.run.engines.launch import Ended, Launched
from reproduce.tables.layout import grid
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.layers.compiled import compile_layer

LAYERS = 12
HEADS = 4
N = 2
"""The number of partitions."""
WAYS = {"plain": 1, "workers": 1, "ranks": N}
"""For each way to train, how many processes it takes."""
CHECKPOINTS = ("never", "always")

# For each size: the width of the layers, the tokens of a sample, and the samples of a micro-batch.
SIZES = {"tiny": (16, 8, 1), "small": (128, 64, 2), "large": (256, 128, 4)}
CHUNKS = 4
"""The number of micro-batches."""

Seconds = dict[str, list[float]]
"""The seconds of each step, "uncompiled" and "compiled"."""


class Case(NamedTuple):
    """What to measure.

    The fields are a kind of layers (a key of `KINDS`, such as "fused"), a way to train (a key of
    `WAYS`, such as "ranks"), and a checkpoint mode.
    """

    layers: str
    way: str
    checkpoint: str


class Job(NamedTuple):
    """A case to measure, with the model's size, the number of rounds, and the compiler's backend.

    In each round, an uncompiled step and a compiled step are timed.
    """

    case: Case
    size: str
    rounds: int
    seed: int
    backend: str


class Block(nn.Module):
    """A layer of a transformer, which computes attention and GELU by formulas.

    Args:
        width: The number of features of each token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        heads = self.heads(self.first(x)).view(samples, tokens, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = self.attention(q, k, v).transpose(1, 2)
        x = x + self.mixed(attended.reshape(samples, tokens, width))
        y: Tensor = self.narrow(self.activation(self.wide(self.second(x))))
        return x + y

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to itself and to earlier tokens."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    def activation(self, x: Tensor) -> Tensor:
        """Compute GELU by the approximation with tanh (https://arxiv.org/abs/1606.08415)."""
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class FusedBlock(Block):
    """A layer of a transformer, which calls the fused operators of PyTorch."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to itself and to earlier tokens."""
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def activation(self, x: Tensor) -> Tensor:
        """Compute GELU by the approximation with tanh."""
        return gelu(x, approximate="tanh")


KINDS = {"formulas": Block, "fused": FusedBlock}
"""The class of each kind of layers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all chosen cases; record the results and print a table."""
    parser = command("compiled", __doc__, rounds=20, seed=0)
    add, ways, modes = parser.add_argument, list(WAYS), list(CHECKPOINTS)
    add("--layers", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of layers")
    add("--way", nargs="+", choices=ways, default=ways, help="to train")
    add("--checkpoint", nargs="+", choices=modes, default=modes, help="mode of checkpointing")
    add("--size", choices=list(SIZES), default="small", help="of the layers")
    add("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(arguments)
    title = f"seconds of a step of {LAYERS} transformer layers, compiled and uncompiled"
    record = start(options, "compiled", title, {"seconds": "s"}, devices=N)
    jobs = []
    for case in starmap(Case, product(options.layers, options.way, options.checkpoint)):
        job = Job(case, options.size, options.rounds, options.seed, options.backend)
        jobs.append(job)
    collect(record, options.out, measure(jobs), len(jobs), in_format(options.format, table))


def measure(jobs: Sequence[Job]) -> Found:
    """Measure jobs, and yield for each job a list of two results.

    The first result has the seconds of each uncompiled step. The second result has the seconds of
    each compiled step, and the median of the ratios (uncompiled by compiled).
    """
    for job in jobs:
        first, *_ = _measured(job)
        turns = zip(first["uncompiled"], first["compiled"], strict=True)
        ratio = statistics.median(eager / compiled for eager, compiled in turns)
        experiment = ", ".join(job.case)
        results = []
        for name, seconds in first.items():
            values: dict[str, Any] = {"ratio": ratio} if name == "compiled" else {}
            timed = {"seconds": seconds}
            results.append(Result(experiment, name, "measured", values=values, samples=timed))
        yield results


def _measured(job: Job) -> Iterator[Seconds]:
    """Run a job (a case to measure) in new processes; yield a dictionary from each process.

    The dictionary has two keys, "uncompiled" and "compiled". Each value is a list of the seconds of
    each step.
    """
    count = WAYS[job.case.way]
    with (
        TemporaryDirectory() as folder,
        closing(Launched("spawn", count, _process, folder, job)) as launched,
    ):
        running = set(range(count))
        while running:
            for k, answer in launched.receive(running):
                running.remove(k)
                if isinstance(answer, Ended):
                    raise Error(f"process {k} ended {answer.how}")
                yield answer


def _process(k: int, link: Connection, folder: str, job: Job) -> None:
    """Time uncompiled and compiled steps as process `k` of a job; send the seconds of each step."""
    torch.set_num_threads(1)
    count = WAYS[job.case.way]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=k, world_size=count)
    torch.manual_seed(job.seed)
    width, tokens, samples = SIZES[job.size]
    layers = nn.Sequential(*[KINDS[job.case.layers](width) for _ in range(LAYERS)])
    x, target = torch.rand(2, CHUNKS * samples, tokens, width)
    steps = {}
    models = []
    for name in ("uncompiled", "compiled"):
        model, step = _way(job.case, deepcopy(layers), x, target)
        if name == "compiled":
            _compile(model, job.backend)
        steps[name] = step
        models.append(model)
    _check_gradients(models, [*steps.values()])

    seconds: Seconds = {name: [] for name in steps}
    order = random.Random(job.seed)
    for turn in range(-3, job.rounds):
        for name in order.sample(sorted(steps), len(steps)):
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            dist.barrier()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    link.send(seconds)
    link.poll(None)  # wait to be killed: the other process may still need this one


def _way(
    case: Case, layers: nn.Sequential, x: Tensor, target: Tensor
) -> tuple[nn.Module, Callable[[], object]]:
    """Build a case's model from layers; return it with a function that runs a training step."""
    half = LAYERS // N
    options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": case.checkpoint}
    options["schedule"] = "1F1B"
    if case.way == "plain":
        return layers, partial(_plain_step, case.checkpoint, layers, x, target)
    model: Any
    if case.way == "workers":
        model = GPipe(layers, [half] * N, devices=["cpu"] * N, engine="workers", **options)
        return model, partial(model.step, mse_loss, x, target)
    model = DistributedGPipe(layers, [half] * N, **options)
    given = (x, None) if dist.get_rank() == 0 else (None, target)
    return model, partial(model.step, mse_loss, *given)


def _plain_step(mode: str, layers: nn.Sequential, x: Tensor, target: Tensor) -> None:
    """Run a training step without a pipeline, one micro-batch after another.

    Args:
        mode: "never", or "always", which recomputes each half of the layers.
        layers: The layers.
        x: The input of the first layer, for all micro-batches.
        target: The target of the loss, for all micro-batches.
    """
    half = LAYERS // N
    for part, part_target in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        y = part
        if mode == "never":
            y = layers(y)
        else:
            # Reentrant checkpointing makes no graph in the first pass, and gives gradients only if
            # an input requires grad.
            y = y.detach().requires_grad_()
            for partition in (layers[:half], layers[half:]):
                y = checkpoint(partition, y, use_reentrant=True)
        (mse_loss(y, part_target) / CHUNKS).backward()


def _compile(model: Any, backend: str) -> None:
    """Compile each layer of a model, which is a pipeline or an `nn.Sequential`."""
    if isinstance(model, nn.Sequential):
        for layer in model:
            compile_layer(layer, backend=backend)
    else:
        model.compile(backend=backend)


def _check_gradients(models: Sequence[nn.Module], steps: Sequence[Callable[[], object]]) -> None:
    """Run one step of each model, and check that all models compute the same gradients."""
    expected: list[Tensor] | None = None
    for model, step in zip(models, steps, strict=True):
        step()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if expected is None:
            expected = gradients
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def table(record: Record, style: str = "simple") -> str:
    """Render a table of milliseconds and ratios."""
    rows: list[list[str]] = []
    for case, found in by_case(record).items():
        times = []
        for name in ("uncompiled", "compiled"):
            seconds = float(found[name].values["seconds"])
            times.append(f"{1000 * seconds:.2f}")
        ratio = float(found["compiled"].values["ratio"])
        rows.append([*case.split(", "), *times, f"{ratio:.3f}"])
    heads = ["layers", "way", "checkpoint", "ms a step", "ms a step, compiled", "ratio"]
    return grid(heads, rows, style)


if __name__ == "__main__":
    main()
