"""A small model for ranks, functions that train it and return the results, and checks of saves."""

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
    """Return eight layers, with dropout if `draws` is true, else without."""
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
    """Train, and return all results by name.

    The results are losses, gradient norms, gradients, and the final states of optimizer and model.

    Args:
        model: A pipeline, or plain layers.
        optimizer: The optimizer of the model.
        data: The seed of the mini-batches.
        sizes: The sizes of the mini-batches.
        loss_of: A function that runs forward and backward and returns the loss, given an input and
            a target. By default, `model.loss` and `backward` do this.
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
    """Assert that one rank's results are equal to the same results of the whole model.

    Only results whose names begin with `prefix` are compared.
    """
    differ = []
    for name, x in found.items():
        if name.startswith(prefix) and not torch.equal(x, expected[name]):
            differ.append(name)
    assert differ == []


def assert_goes_on(folder: Path, make: Callable[[int], tuple[Any, torch.optim.Optimizer]]) -> None:
    """Assert that training from a saved state gives the same results as an undisturbed training.

    The undisturbed pipeline and the saved one are made with seed 1, and the one that loads the
    state with seed 2.
    """
    given = {"data": torch.arange(3), "plain": {"a": [1, (2.5,)]}}
    seen = []
    for run in ("undisturbed", "saved", "loaded"):
        saves = Saves(folder)
        model, optimizer = make(2 if run == "loaded" else 1)
        if run == "loaded":
            # Loading must undo these two changes: another learning rate, and gradients of an
            # earlier mini-batch.
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
