"""Layers that do more than compute: what they do is done as without a pipeline, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.skip import Namespace

from ...library.layers import Pop, Stash
from ..parts.layers import WIDTH, Do, five, linear, made
from ..row import Row, step, steps


def long() -> Tensor:
    return torch.ones(6, 50, requires_grad=True)


class Padded(nn.Module):
    """Attention that leaves out the ends of sequences, for which PyTorch has another way without gradients."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x, src_key_padding_mask=(torch.arange(4) >= 2).expand(len(x), 4))
        return y


def within_checkpointing(run: nn.Module, x: Tensor) -> None:
    """The pipeline's forward then runs within its own backward."""
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).square().sum().backward()


class OwnCheckpoint(torch.autograd.Function):
    """Keep nothing, and run dropout again in backward with the numbers of the first time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.numbers = torch.get_rng_state()
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.numbers)
            return F.dropout(grad, 0.5)


def seeding(_: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def masks_are_alike(run: nn.Module, x: Tensor) -> bool:
    """A layer that sets the generator back by itself is at odds with private generators only."""
    given = x.detach().requires_grad_()
    y = run(given)
    y.sum().backward()
    return torch.equal(y, given.grad)  # type: ignore[arg-type]


class Rewriting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.sign()
        return super().forward(x)


class Marking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.seen = True  # type: ignore[attr-defined]
        return super().forward(x)


def marks(run: nn.Module, x: Tensor) -> bool:
    run(x).sum().backward()
    return any(hasattr(p, "seen") for p in run.parameters())


def threads_of(run: Any, x: Tensor) -> list[Any]:
    """Layers run with as many threads as the caller would, in backward, too."""
    before, found = torch.get_num_threads(), []
    seen: set[int] = set()
    for layer in run.modules():
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
            layer.register_full_backward_hook(lambda *_: seen.add(torch.get_num_threads()))
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            run(x).sum().backward()
            found.append(sorted(seen))
            seen.clear()
    finally:
        torch.set_num_threads(before)
    return found


class Penalty(nn.Linear):
    """Keep an auxiliary loss, which has a graph of its own."""

    def __init__(self, of_output: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.of_output = of_output

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = (y if self.of_output else self.weight).square().mean()
        return y


def with_penalty(run: Any, x: Tensor) -> Any:
    try:
        (run(x).sum() + run[0].penalty).backward()
        return run[0].weight.grad.clone()
    finally:
        run.zero_grad()


def observed_with_penalty(run: Any, x: Tensor) -> None:
    run.observer = nullcontext  # each task has a graph of its own then
    try:
        (run(x).sum() + run[0].penalty).backward(retain_graph=True)
    finally:
        run.zero_grad()


def shared_norm() -> nn.Sequential:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    return nn.Sequential(*(Do(lambda self, x: self.norm(x), norm=norm) if k % 3 == 0 else linear() for k in range(4)))


def with_other_buffers(run: nn.Module, x: Tensor) -> Tensor:
    run.load_state_dict({name: x.clone() for name, x in run.state_dict().items()}, assign=True)
    return run(x)


def of_another_type(run: nn.Module, x: Tensor) -> list[str]:
    for parameter in run.parameters():
        parameter.grad_dtype = torch.float32
    step(run, x)
    return [str(p.grad.dtype) for p in run.parameters() if p.grad is not None]


def copied(run: nn.Module, x: Tensor, duplicate: Callable[[Any], Any], used: bool) -> Any:
    """A copy is trained, and then the model: neither has anything of the other."""
    if used:
        step(run, x)
    twin = duplicate(run)
    shown = step(twin, x)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    return shown, twin, step(run, x)


SKIP = Namespace()
SKIPPED: list[Any] = [lambda kind=kind: kind().isolate(SKIP) for kind in (Stash, Pop)]
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
KEEPS = "a layer keeps a tensor that has a graph"
ALWAYS = {"always": "no graph is kept there, as the guide says", "ranks": "others do not have what a layer keeps"}
REPLACED = "replaced, added or froze a parameter|was changed in place"

ROWS = [
    Row("attention in evaluation mode", lambda: nn.Sequential(Padded(), linear(), linear()).eval(),
        lambda: torch.randn(6, 4, WIDTH)),
    Row("within plain checkpointing", use=within_checkpointing,
        without={"ranks": "each would run the forward again at a time of its own"}),
    Row("a checkpoint of a layer's own", made(lambda: OwnCheckpoint.apply, nn.Identity), long, (1, 1),
        use=masks_are_alike, refused={"workers": "random numbers in backward"}),
    Row("a layer that sets the seed", made(lambda: lambda x: seeding(None, x), nn.Identity), long, (1, 1),
        use=masks_are_alike, refused={"workers": "manual_seed", "ranks": "manual_seed"}),
    Row("a parameter whose data are replaced in forward", made(lambda: Rewriting(4, 4), linear), balance=(1, 1),
        use=steps, refused={"always": REPLACED, "except_last": REPLACED, "workers": REPLACED, "ranks": REPLACED,
                            "graph never": ""}),
    Row("what a layer writes on a parameter", made(*[lambda: Marking(4, 4)] * 2), balance=(1, 1), use=marks),
    Row("a graph that a layer keeps", made(lambda: Penalty(False), linear), balance=(1, 1), use=with_penalty,
        refused={"graph never": "", "": KEEPS}, without=ALWAYS),
    Row("a graph that a layer keeps, observed", made(lambda: Penalty(True), linear), balance=(1, 1), chunks=1,
        use=observed_with_penalty, refused={"": "another way than its outputs"}, without=ALWAYS),
    Row("the number of threads", made(nn.Tanh, nn.Tanh, nn.Tanh), use=threads_of),
    *(Row(f"{how} of {what}", made(linear, lambda: nn.BatchNorm1d(WIDTH), *SKIPPED, linear),
          use=partial(copied, duplicate=duplicate, used=what == "a used model"))
      for how, duplicate in COPIES.items() for what in ("a new model", "a used model")),
    Row("a norm of two partitions whose buffers were replaced", shared_norm, balance=(2, 2), use=with_other_buffers,
        refused={"": "change the same buffer"}),
    *([Row("gradients of another type", lambda: five().bfloat16(), lambda: torch.randn(6, WIDTH).bfloat16(),
           use=of_another_type)] if hasattr(torch.Tensor, "grad_dtype") else []),
]  # fmt: skip
