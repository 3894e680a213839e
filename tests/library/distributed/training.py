"""A model for ranks to train, all visible results of the training, and whether it goes on to the same ones."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences


def layers(seed: int = 4, *, draws: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    drawing = [nn.Dropout(0.3) if draws else nn.Tanh() for _ in range(3)]
    return nn.Sequential(
        nn.Linear(5, 6),
        drawing[0],
        nn.BatchNorm1d(6),
        nn.Linear(6, 6),
        drawing[1],
        nn.Linear(6, 7),
        drawing[2],
        nn.Linear(7, 4),
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained(
    model: Any,
    optimizer: torch.optim.Optimizer,
    data: int,
    sizes: Sequence[int] = (8, 8, 8),
    loss_of: Callable[..., Tensor] | None = None,
) -> dict[str, Any]:
    """Train on a seed's mini-batches of these sizes; return all visible results. `loss_of` also runs backward."""
    draw, seen = torch.Generator().manual_seed(data), dict[str, Any]()
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    for k, size in enumerate(sizes):
        x, target = torch.randn(size, 5, generator=draw), torch.randint(4, (size,), generator=draw)
        x = x.to(next(model.parameters()).dtype)
        if loss_of is None:
            loss = model.loss(nn.functional.cross_entropy, x, target)
            loss.backward()
        else:
            loss = loss_of(x, target)
        seen[f"loss {k}"] = loss.detach()
        seen[f"norm {k}"] = getattr(
            model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, [*names])
        )(0.3)
        seen |= {f"gradient {k} of {name}": p.grad for p, name in names.items()}
        optimizer.step()
        optimizer.zero_grad()
    seen |= {
        f"{what} of {names[p]}": x
        for p, state in optimizer.state.items()
        for what, x in state.items()
    }
    seen |= model.state_dict()
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in seen.items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    """Assert that results of this rank, those with the prefix `what`, equal the expected ones of the whole model."""
    assert [
        name
        for name, x in found.items()
        if name.startswith(what) and not torch.equal(x, expected[name])
    ] == []


def assert_goes_on(folder: Path, make: Callable[[int], tuple[Any, torch.optim.Optimizer]]) -> None:
    """Assert that after a save a new pipeline, made with seed 2 in place of 1, trains on to the same results."""
    seen, given = [], {"data": torch.arange(3), "plain": {"a": [1, (2.5,)]}}
    for run in ("undisturbed", "first", "second"):
        saves, (model, optimizer) = Saves(folder), make(1 + (run == "second"))
        if run == "second":
            # Neither its settings nor the gradients of a mini-batch that failed must stay.
            optimizer.param_groups[0]["lr"] *= 3
            x = torch.ones(8, 5, dtype=next(model.parameters()).dtype)
            model.loss(lambda y, _: y.sum(), x, None).backward()
            assert differences(saves.load(model, optimizer), {"step": 7, **given}) == []
        else:
            assert saves.load(model, optimizer) is None
            trained(model, optimizer, 5)
        if run == "first":
            saves.save(7, model, optimizer, **given)
        else:
            seen.append((trained(model, optimizer, 6), optimizer.state_dict()["param_groups"]))
        getattr(model, "close", int)()
    assert differences(seen[0], seen[1]) == []
