"""Test cases with layers that do more than compute an output.

For example, a layer sets the seed or keeps an auxiliary loss. With a pipeline, this must have the
same effect as without one, or the pipeline must raise an error.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchgpipe.skip import Namespace

from ...library.layers import Pop, Stash, same
from ..parts.layers import WIDTH, Do, acting, between_linears, five, linear, made, weight
from ..row import Row, but_graph_never, but_never, step, steps, three
from .buffers.held import norm_of_two

# Inputs.


def long() -> Tensor:
    return torch.ones(6, 50, requires_grad=True)


def sequences() -> Tensor:
    return torch.randn(6, 4, WIDTH)


def in_bfloat16() -> Tensor:
    return torch.randn(6, WIDTH).bfloat16()


# Layers.


def encode_masked(self: Any, x: Tensor) -> Tensor:
    mask = torch.arange(4) >= 2
    y: Tensor = self.encoder(x, src_key_padding_mask=mask.expand(len(x), 4))
    return y


def padded() -> nn.Module:
    """Return a transformer encoder whose attention ignores padding at the ends of sequences.

    If no gradients are computed, PyTorch runs another implementation of the encoder.
    """
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    return Do(encode_masked, encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))


def evaluating_attention() -> nn.Sequential:
    return nn.Sequential(padded(), linear(), linear()).eval()


def checkpoint_the_norm(self: Any, x: Tensor) -> Any:
    return checkpoint(self.norm, x, use_reentrant=False)


def norm_checkpointed() -> nn.Module:
    return Do(checkpoint_the_norm, norm=nn.BatchNorm1d(WIDTH))


class OwnCheckpoint(torch.autograd.Function):
    """A dropout that does its own recomputation.

    In forward, it saves the state of the random generator. In backward, it restores this state and
    draws the mask again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.numbers = torch.get_rng_state()
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.numbers)
            return F.dropout(grad, 0.5)


def own_checkpoint() -> Any:
    return OwnCheckpoint.apply


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def replace_data(layer: Any) -> None:
    layer.weight.data = layer.weight.sign()


def write_on_weight(layer: Any) -> None:
    layer.weight.seen = True


def penalized(self: Any, x: Tensor) -> Tensor:
    """Return the scaled input, and keep an auxiliary loss, with its graph, in `self.penalty`."""
    y = x * self.weight
    values = y if self.of_output else self.weight
    self.penalty = values.square().mean()
    return y


def with_penalty(*, of_output: bool) -> nn.Module:
    return Do(penalized, weight=weight(), of_output=of_output)


def norm_without_parameters() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, affine=False)


def five_in_bfloat16() -> nn.Sequential:
    return five().bfloat16()


# Uses of the model.


def within_checkpoint(run: Any, x: Tensor) -> None:
    loss = checkpoint(run, x, use_reentrant=False).square().sum()
    loss.backward()


def masks_are_alike(run: nn.Module, x: Tensor) -> bool:
    """Return whether dropout has the same mask in the forward and the backward of a step.

    Some layers save the state of the global random generator in forward, and restore it in
    backward. Their two masks differ if a pipeline makes them draw from another generator.
    """
    given = x.detach().requires_grad_()
    y = run(given)
    y.sum().backward()
    assert given.grad is not None
    return torch.equal(y, given.grad)


def finds_what_was_written(run: nn.Module, x: Tensor) -> bool:
    run(x).sum().backward()
    return any(hasattr(p, "seen") for p in run.parameters())


def threads_of(run: Any, x: Tensor) -> list[Any]:
    """Return the values of `torch.get_num_threads()` in the layers' forward and backward.

    The caller's thread sets the number of threads to several values in turn. All layers must get
    these values.
    """
    seen: set[int] = set()

    def note(*_: Any) -> None:
        seen.add(torch.get_num_threads())

    for layer in run.modules():
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(note)
            layer.register_full_backward_hook(note)
    found: list[Any] = []
    for threads in (1, 3, 2, 1):
        torch.set_num_threads(threads)
        run(x).sum().backward()
        found.append(sorted(seen))
        seen.clear()
    return found


def add_the_penalty(run: Any, x: Tensor, *, observed: bool) -> Any:
    """Run backward from the output's sum plus an auxiliary loss. Return the first layer's gradient.

    The auxiliary loss is the attribute `penalty` of the first layer.

    Args:
        run: The model.
        x: The input.
        observed: Whether the pipeline has an observer. Then each task has an autograd graph of its
            own, and the backward keeps the graphs (`retain_graph`).
    """
    if observed:
        run.observer = nullcontext  # with an observer, each task has a graph of its own
    try:
        loss = run(x).sum() + run[0].penalty
        loss.backward(retain_graph=observed)
        return run[0].weight.grad.clone()
    finally:
        run.zero_grad()


def with_other_buffers(run: nn.Module, x: Tensor) -> Tensor:
    copies = {name: tensor.clone() for name, tensor in run.state_dict().items()}
    run.load_state_dict(copies, assign=True)
    return run(x)


def of_another_type(run: nn.Module, x: Tensor) -> list[str]:
    for parameter in run.parameters():
        parameter.grad_dtype = torch.float32
    step(run, x)
    return [str(p.grad.dtype) for p in run.parameters() if p.grad is not None]


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def copied(run: nn.Module, x: Tensor, duplicate: Callable[[Any], Any], used: bool) -> Any:
    """Train a copy of the model, and then the model itself.

    The results show whether the copy and the model share any state, which they must not.

    Args:
        run: The model.
        x: The input.
        duplicate: The function that copies the model.
        used: Whether the model runs a step before it is copied.
    """
    if used:
        step(run, x)
    twin = duplicate(run)
    shown = step(twin, x)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    return shown, twin, step(run, x)


SKIP = Namespace()


def with_a_skip() -> nn.Sequential:
    stash: Any = Stash()
    pop: Any = Pop()
    skipping = [stash.isolate(SKIP), pop.isolate(SKIP)]
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), *skipping, linear())


def masking(name: str, layer: Callable[[], Any], refused: dict[str, str]) -> Row:
    """Return a test case that compares a layer's dropout masks in forward and backward."""
    layers = made(layer, nn.Identity)
    return Row(name, layers, long, (1, 1), use=masks_are_alike, refused=refused)


COPIES = (
    ("deepcopy", copy.deepcopy, "The copy is a pipeline of its own."),
    ("pickle", pickled, "A pipeline can be pickled, so `torch.save` can save it as a whole."),
)
KEEPS = but_graph_never("a layer keeps a tensor that has a graph")
ALWAYS = {
    "always": "no graph is kept there, as the guide says",
    "ranks": "others do not have what a layer keeps",
}
REPLACED = "replaced, added, froze or hooked a parameter|was changed in place"
AROUND_A_NORM = r"checkpoint\(use_reentrant=False\) around a batch norm"

ROWS = [
    Row("attention in evaluation mode", evaluating_attention, sequences),
    # In this case, the pipeline's forward runs within its own backward.
    Row(
        "`torch.utils.checkpoint` around the pipeline",
        use=within_checkpoint,
        without={"ranks": "each would run the forward again at a time of its own"},
        note="This checkpoint keeps only the mini-batch, and runs the whole forward again before "
        'the backward. With the pipeline\'s own `checkpoint="always"`, a partition recomputes '
        "while other partitions run their backwards.",
    ),
    three(
        "`torch.utils.checkpoint` around a norm",
        between_linears(norm_checkpointed),
        use=steps,
        refused=but_never(AROUND_A_NORM),
    ),
    masking(
        "a checkpoint of a layer's own",
        own_checkpoint,
        refused={"workers": "random numbers in backward"},
    ),
    masking(
        "a layer that sets the seed",
        partial(same, seeding),
        refused={"workers": "manual_seed", "ranks": "manual_seed"},
    ),
    Row(
        "a parameter whose data are replaced in forward",
        made(partial(acting, replace_data), linear),
        balance=(1, 1),
        use=steps,
        refused=but_graph_never(REPLACED),
    ),
    Row(
        "what a layer writes on a parameter",
        made(partial(acting, write_on_weight), partial(acting, write_on_weight)),
        balance=(1, 1),
        use=finds_what_was_written,
    ),
    Row(
        "a graph that a layer keeps",
        made(partial(with_penalty, of_output=False), linear),
        balance=(1, 1),
        use=partial(add_the_penalty, observed=False),
        refused=KEEPS,
        without=ALWAYS,
    ),
    Row(
        "a graph that a layer keeps, observed",
        made(partial(with_penalty, of_output=True), linear),
        balance=(1, 1),
        chunks=1,
        use=partial(add_the_penalty, observed=True),
        refused={"": "another way than its outputs"},
        without=ALWAYS,
    ),
    Row("the number of threads", made(nn.Tanh, nn.Tanh, nn.Tanh), use=threads_of),
]
for how, duplicate, note in COPIES:
    new = partial(copied, duplicate=duplicate, used=False)
    used = partial(copied, duplicate=duplicate, used=True)
    ROWS.append(Row(f"{how} of a new model", with_a_skip, use=new))
    ROWS.append(Row(f"{how} of a used model", with_a_skip, use=used, note=note))
ROWS.append(
    Row(
        "a norm of two partitions whose buffers were replaced",
        partial(norm_of_two, norm_without_parameters),
        balance=(2, 2),
        use=with_other_buffers,
        refused={"": "change the same buffer"},
    )
)
if hasattr(torch.Tensor, "grad_dtype"):
    name = "gradients of another type"
    ROWS.append(Row(name, five_in_bfloat16, in_bfloat16, use=of_another_type))
