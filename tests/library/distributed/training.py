"""Define a small model for tests over ranks, with functions that train and save it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import BatchNorm1d, Dropout, Linear, Module, Sequential, Tanh

from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences


def layers(seed: int = 4, *, draws: bool = False) -> Sequential:
    """Return eight layers. They include dropout only if `draws` is true."""
    torch.manual_seed(seed)
    between = partial(Dropout, 0.3) if draws else Tanh
    return Sequential(
        Linear(5, 6),
        between(),
        BatchNorm1d(6),
        Linear(6, 6),
        between(),
        Linear(6, 7),
        between(),
        Linear(7, 4),
    )


def adam(model: Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained(
    model: Any,
    optimizer: torch.optim.Optimizer,
    data: int,
    sizes: Sequence[int] = (8, 8, 8),
    loss_of: Callable[..., Tensor] | None = None,
) -> dict[str, Any]:
    """Train a model, and return a dictionary of its results.

    The results are losses, gradient norms, gradients, and the final states of the optimizer and of
    the model.

    Args:
        model: A pipeline, or plain layers.
        optimizer: The optimizer of the model.
        data: The random seed from which the mini-batches are made.
        sizes: The number of samples of each mini-batch.
        loss_of: A function that runs forward and backward on an input and a target, and returns the
            loss. By default, `model.loss` and `backward` do this.
    """
    draw = torch.Generator().manual_seed(data)
    seen: dict[str, Any] = {}
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    dtype = next(model.parameters()).dtype
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, [*names]))
    for k, size in enumerate(sizes):
        x = torch.randn(size, 5, generator=draw).to(dtype)
        target = torch.randint(4, (size,), generator=draw)
        if loss_of is None:
            loss = model.loss(nn.functional.cross_entropy, x, target)
            loss.backward()
        else:
            loss = loss_of(x, target)
        seen[f"loss {k}"] = loss.detach()
        seen[f"norm {k}"] = clip(0.3)
        for parameter, name in names.items():
            seen[f"gradient {k} of {name}"] = parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    for parameter, state in optimizer.state.items():
        for what, x in state.items():
            seen[f"{what} of {names[parameter]}"] = x
    seen |= model.state_dict()
    results = {}
    for name, x in seen.items():
        whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        results[name] = whole.detach().clone()
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any], prefix: str = "") -> None:
    """Assert that a rank's results equal the expected ones, such as those of the whole model.

    Args:
        found: Maps names (of parameters, for example) to the rank's tensors.
        expected: The same for the expected tensors. There may be more of them.
        prefix: Only results whose names begin with this text are compared.
    """
    differ = []
    for name, x in found.items():
        if name.startswith(prefix) and not torch.equal(x, expected[name]):
            differ.append(name)
    assert differ == []


def assert_goes_on(folder: Path, make: Callable[[int], tuple[Any, torch.optim.Optimizer]]) -> None:
    """Assert that a training gives the same results if it is interrupted by a save and a load.

    `make(seed)` makes a pipeline and its optimizer. The pipeline that loads the state is made from
    another seed than the pipeline that has saved it.
    """
    given = {"data": torch.arange(3), "plain": {"a": [1, (2.5,)]}}
    seen = []
    for run in ("undisturbed", "saved", "loaded"):
        saves = Saves(folder)
        model, optimizer = make(2 if run == "loaded" else 1)
        if run == "loaded":
            # Loading must undo both of these: a changed learning rate, and the gradients of another
            # mini-batch.
            optimizer.param_groups[0]["lr"] *= 3
            x = torch.ones(8, 5, dtype=next(model.parameters()).dtype)
            model.loss(lambda y, _: y.sum(), x, None).backward()
            found = saves.load(model, optimizer)
            assert differences(found, {"step": 7, **given}) == []
        else:
            assert saves.load(model, optimizer) is None
            trained(model, optimizer, 5)
        if run == "saved":
            saves.save(7, model, optimizer, **given)
        else:
            results = trained(model, optimizer, 6)
            seen.append((results, optimizer.state_dict()["param_groups"]))
        if hasattr(model, "close"):
            model.close()
    undisturbed, loaded = seen
    assert differences(undisturbed, loaded) == []
