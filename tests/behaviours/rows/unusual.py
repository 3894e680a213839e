"""Layers that do more than compute: what they do is done as without a pipeline, or refused."""

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
from ..parts.layers import WIDTH, Do, acting, five, linear, made, weight
from ..row import Row, step, steps
from .buffers.held import norm_of_two


def long() -> Tensor:
    return torch.ones(6, 50, requires_grad=True)


def padded() -> nn.Module:
    """Attention that leaves out the ends of sequences, for which PyTorch has another way without gradients."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    mask = torch.arange(4) >= 2
    return Do(
        lambda self, x: self.encoder(x, src_key_padding_mask=mask.expand(len(x), 4)),
        encoder=encoder,
    )


def norm_checkpointed() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return Do(
        lambda self, x: torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False),
        norm=norm,
    )


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


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def masks_are_alike(run: nn.Module, x: Tensor) -> bool:
    """A layer that sets the generator back by itself is at odds with private generators only."""
    given = x.detach().requires_grad_()
    y = run(given)
    y.sum().backward()
    return torch.equal(y, given.grad)  # type: ignore[arg-type]


def marks(run: nn.Module, x: Tensor) -> bool:
    run(x).sum().backward()
    return any(hasattr(p, "seen") for p in run.parameters())


def threads_of(run: Any, x: Tensor) -> list[Any]:
    """Layers run with as many threads as the caller would, in backward, too."""
    found: list[Any] = []
    seen: set[int] = set()
    for layer in run.modules():
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
            layer.register_full_backward_hook(lambda *_: seen.add(torch.get_num_threads()))
    for threads in (1, 3, 2, 1):
        torch.set_num_threads(threads)
        run(x).sum().backward()
        found.append(sorted(seen))
        seen.clear()
    return found


def penalized(self: Any, x: Tensor) -> Tensor:
    """Keep an auxiliary loss, which has a graph of its own."""
    y = x * self.weight
    self.penalty = (y if self.of_output else self.weight).square().mean()
    return y


def with_penalty(run: Any, x: Tensor, *, observed: bool) -> Any:
    if observed:
        run.observer = nullcontext  # each task has a graph of its own then
    try:
        (run(x).sum() + run[0].penalty).backward(retain_graph=observed)
        return run[0].weight.grad.clone()
    finally:
        run.zero_grad()


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
COPIES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("deepcopy", copy.deepcopy, "The copy is a pipeline of its own."),
    (
        "pickle",
        lambda model: pickle.loads(pickle.dumps(model)),
        "Also `torch.save` of the whole pipeline.",
    ),
]
KEEPS = "a layer keeps a tensor that has a graph"
ALWAYS = {
    "always": "no graph is kept there, as the guide says",
    "ranks": "others do not have what a layer keeps",
}
REPLACED = "replaced, added, froze or hooked a parameter|was changed in place"

ROWS = [
    Row(
        "attention in evaluation mode",
        lambda: nn.Sequential(padded(), linear(), linear()).eval(),
        lambda: torch.randn(6, 4, WIDTH),
    ),
    # The pipeline's forward then runs within its own backward.
    Row(
        "`torch.utils.checkpoint` around the pipeline",
        use=lambda run, x: (
            torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).square().sum().backward()
        ),
        without={"ranks": "each would run the forward again at a time of its own"},
        note='It keeps the mini-batch alone and runs the whole forward again. `checkpoint="always"` recomputes while '
        "other partitions go backward.",
    ),
    Row(
        "`torch.utils.checkpoint` around a norm",
        made(linear, norm_checkpointed, linear),
        balance=(2, 1),
        use=steps,
        refused=dict.fromkeys(
            ("always", "except_last"), r"checkpoint\(use_reentrant=False\) around a batch norm"
        ),
    ),
    Row(
        "a checkpoint of a layer's own",
        made(lambda: OwnCheckpoint.apply, nn.Identity),
        long,
        (1, 1),
        use=masks_are_alike,
        refused={"workers": "random numbers in backward"},
    ),
    Row(
        "a layer that sets the seed",
        made(lambda: seeding, nn.Identity),
        long,
        (1, 1),
        use=masks_are_alike,
        refused={"workers": "manual_seed", "ranks": "manual_seed"},
    ),
    Row(
        "a parameter whose data are replaced in forward",
        made(
            partial(acting, lambda layer: setattr(layer.weight, "data", layer.weight.sign())),
            linear,
        ),
        balance=(1, 1),
        use=steps,
        refused={"": REPLACED, "graph never": ""},
    ),
    Row(
        "what a layer writes on a parameter",
        made(*[partial(acting, lambda layer: setattr(layer.weight, "seen", True))] * 2),
        balance=(1, 1),
        use=marks,
    ),
    Row(
        "a graph that a layer keeps",
        made(lambda: Do(penalized, weight=weight(), of_output=False), linear),
        balance=(1, 1),
        use=partial(with_penalty, observed=False),
        refused={"graph never": "", "": KEEPS},
        without=ALWAYS,
    ),
    Row(
        "a graph that a layer keeps, observed",
        made(lambda: Do(penalized, weight=weight(), of_output=True), linear),
        balance=(1, 1),
        chunks=1,
        use=partial(with_penalty, observed=True),
        refused={"": "another way than its outputs"},
        without=ALWAYS,
    ),
    Row("the number of threads", made(nn.Tanh, nn.Tanh, nn.Tanh), use=threads_of),
    *(
        Row(
            f"{how} of {what}",
            made(linear, lambda: nn.BatchNorm1d(WIDTH), *SKIPPED, linear),
            use=partial(copied, duplicate=duplicate, used=used),
            note=note if used else "",
        )
        for how, duplicate, note in COPIES
        for what, used in (("a new model", False), ("a used model", True))
    ),
    Row(
        "a norm of two partitions whose buffers were replaced",
        partial(norm_of_two, lambda: nn.BatchNorm1d(WIDTH, affine=False)),
        balance=(2, 2),
        use=with_other_buffers,
        refused={"": "change the same buffer"},
    ),
    *(
        [
            Row(
                "gradients of another type",
                lambda: five().bfloat16(),
                lambda: torch.randn(6, WIDTH).bfloat16(),
                use=of_another_type,
            )
        ]
        if hasattr(torch.Tensor, "grad_dtype")
        else []
    ),
]
