"""Check whether a step does what its schedule lists, and time the halves of a split backward.

1. A pipeline with all partitions on one GPU runs a `step` of each schedule. Its gradients are
   compared with those of the layers without a pipeline. Its order of actions is compared with the
   schedule's lists. If a step follows the lists, the activations of some number of micro-batches
   are kept at the same time, at most. The pipeline's memory is compared with this number.
2. The backward of a GPT block in bfloat16 runs as a whole, and in the two halves of zero-bubble
   schedules: first the gradients of inputs, then those of weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from benchmarks.gpu.part import Context, Fields
from benchmarks.league.transformer import Block
from benchmarks.league.transformer import Sizes as BlockSizes
from torchgpipe import GPipe
from torchgpipe.engine.arrangement import arranged, orders
from torchgpipe.schedules import Action
from torchgpipe.task.halves import Halves
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.observe import Task
from torchgpipe.timeline.stopwatch import Mark

PURPOSE = "whether each schedule does its lists, and what halves of a backward cost"
SHARE = 1
NEEDS: list[str] = []

N, M = 2, 6
"""The numbers of devices that the schedules are for, and of micro-batches."""
STAGES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "ZBH1": 1,
    "ZBH2": 1,
    "ZBVZeroBubble": 2,
}
"""For each schedule, the number of stages on a device."""
ROUNDING = 1e-3
"""Gradients may differ by this share: kernels add numbers in another order, perhaps in TF32."""


class Sizes(NamedTuple):
    """The sizes of the pipeline for the schedules, and of the GPT block.

    Attributes:
        width: The width of the pipeline's linear layers.
        samples: The number of samples in a micro-batch.
        block: The sizes of the GPT block.
        sequences: The number of samples in the input of the GPT block.
        rounds: How many times the block is timed.
    """

    width: int
    samples: int
    block: BlockSizes
    sequences: int
    rounds: int


def _block(width: int, heads: int, tokens: int) -> BlockSizes:
    return BlockSizes(1, width, heads, tokens, vocabulary=1, causal=True, fused=True)


SIZES = {
    "paper": Sizes(1024, 16384, _block(4096, 32, 2048), 2, 20),
    "tiny": Sizes(16, 4, _block(32, 2, 16), 2, 3),
}


def run(context: Context) -> Fields:
    """Check each schedule, then time the GPT block."""
    sizes = SIZES[context.size]
    device = context.devices[0]
    checked: Fields = {}
    for name, stages in STAGES.items():
        checked[name] = check(name, stages, sizes, device)
        context.write({"schedules": checked})
    block = time_block(sizes, device)
    return {"schedules": checked, "block": block}


def check(name: str, stages: int, sizes: Sizes, device: torch.device) -> Fields:
    """Run a step of a schedule, and return whether the step did what the schedule lists.

    Returns:
        - `gradients`: whether the gradients are those of the layers without a pipeline.
        - `order`: whether the actions ran in the order of the schedule's lists.
        - `listed`: for how many micro-batches activations are kept at the same time, at most, if
          the actions run in the order of the lists.
        - `kept`: this number as measured: the largest memory of activations, divided by the memory
          of one forward's activations. On a CPU, it is `None`.
    """
    torch.manual_seed(0)
    count = N * stages
    layers = nn.Sequential()
    for _ in range(count):
        layers.append(nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.Tanh()))
    layers.to(device)
    alone = deepcopy(layers)
    x, target = torch.rand(2, M * sizes.samples, sizes.width, device=device)
    model = GPipe(
        layers,
        [1] * count,
        devices=[device] * N,
        chunks=M,
        checkpoint="never",
        engine="graph",
        schedule=name,
    )
    # The first step also allocates gradients and workspaces.
    model.step(mse_loss, x, target)
    model.zero_grad(set_to_none=False)
    watch = Watch(device)
    model.observer = watch
    model.step(mse_loss, x, target)
    model.observer = None

    mse_loss(alone(x), target).backward()
    expected = orders(arranged(name, count, N), M, "never", False).all[0]
    return {
        "gradients": alike(model.parameters(), alone.parameters()),
        "order": watch.actions == list(expected),
        "listed": most_kept(expected),
        "kept": watch.most_kept(),
    }


class Watch:
    """An observer that notes the actions of a step, and the GPU's memory after each forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.actions: list[Action] = []
        self._allocated: list[int] = []

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        """Note one action."""
        if not self.actions:
            self._note_memory()
        self.actions.append(Action(*task))
        yield
        if task.kind == "forward":
            self._note_memory()

    def _note_memory(self) -> None:
        if accelerator.has_streams(self._device):
            self._allocated.append(accelerator.allocated(self._device))

    def most_kept(self) -> float | None:
        """Return for how many micro-batches activations were in memory at the same time, at most.

        The number is the largest memory of activations, divided by the memory of the first
        forward's activations. On a CPU, return `None`, because no memory is measured there.
        """
        if not self._allocated:
            return None
        begin, first, *_ = self._allocated
        return (max(self._allocated) - begin) / (first - begin)


def most_kept(actions: Sequence[Action]) -> int:
    """Return for how many micro-batches activations are kept at the same time, at most.

    The activations of a micro-batch are kept from its forward to the end of its backward. If the
    schedule splits the backward into two halves (gradients of inputs, and of weights), they are
    kept until both halves have run.
    """
    split = any(action.kind == "backward_weights" for action in actions)
    last = "backward_weights" if split else "backward"
    kept = most = 0
    for action in actions:
        if action.kind == "forward":
            kept += 1
        elif action.kind == last:
            kept -= 1
        most = max(most, kept)
    return most


def alike(ours: Iterable[nn.Parameter], theirs: Iterable[nn.Parameter]) -> bool:
    """Return whether two lists of parameters have the same gradients, up to rounding errors.

    The tolerance of a gradient is relative to the largest absolute value in this gradient.
    """
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None
        assert their.grad is not None
        difference = (our.grad - their.grad).abs().max()
        if not difference <= ROUNDING * their.grad.abs().max():
            return False
    return True


def time_block(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Return the seconds of a GPT block's forward, of its backward, and of the backward's halves.

    All times are medians of several rounds. In each round, the forward runs twice: once before the
    whole backward, and once before the backward in two halves.
    """
    torch.manual_seed(0)
    block = Block(sizes.block).to(device, torch.bfloat16)
    shape = (sizes.sequences, sizes.block.tokens, sizes.block.width)
    x = torch.rand(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.rand_like(x, requires_grad=False)
    halves = Halves([block])
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any], *given: Any, **options: Any) -> Any:
        start = Mark(device)
        found = run(*given, **options)
        end = Mark(device)
        accelerator.synchronize([device])
        seconds.setdefault(name, []).append(end.since(start))
        return found

    for _ in range(1 + sizes.rounds):
        y: Tensor = timed("forward", block, x)
        timed("backward", y.backward, gradient)
        edge = get_gradient_edge(block(x))
        weights = timed("inputs", halves.run_inputs, [edge], [gradient], keep_graph=False)
        timed("weights", weights)
        block.zero_grad()
        x.grad = None
    return {name: median(found[1:]) for name, found in seconds.items()}


def lines(result: Fields) -> list[str]:
    """Return a line about all schedules, one about their memory, and one about split backward."""
    checked = result["schedules"]
    right = [name for name, row in checked.items() if row["gradients"] and row["order"]]
    wrong = [name for name in checked if name not in right]
    found = [
        f"{len(right)} of {len(checked)} schedules did their lists and had the right gradients"
    ]
    if wrong:
        found[0] += f"; not: {', '.join(wrong)}"
    kept = []
    for name, row in checked.items():
        measured = "not measured on a CPU" if row["kept"] is None else f"{row['kept']:.1f}"
        kept.append(f"{name} {row['listed']} ({measured})")
    found.append(f"tasks kept at most, by the lists (by memory): {', '.join(kept)}")
    block = result.get("block")
    if block:
        halves = block["inputs"] + block["weights"]
        ms = {name: f"{1000 * seconds:.2f}" for name, seconds in block.items()}
        found.append(
            f"GPT block in bfloat16: forward {ms['forward']} ms, backward {ms['backward']} ms; in "
            f"halves {ms['inputs']} + {ms['weights']} ms, {halves / block['backward']:.2f} times "
            "the whole"
        )
    return found
