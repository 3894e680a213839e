"""Define the model whose saved state is in the folder `data`.

Revision 414bf55 of this project has saved the files. The function that did so is in this module at
revision 438bf2e.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash

DATA = Path(__file__).with_name("data")
X = torch.arange(24.0).reshape(6, 4) % 5
DRAWN = torch.ones(6, 8)


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x.tanh()


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("x"))


def piped() -> GPipe:
    norm, dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
    layers = nn.Sequential(nn.Linear(4, 4), Stash(), norm, dropout, Pop(), nn.Linear(4, 2))
    return GPipe(layers, [2, 4], devices=["cpu", "cpu"], chunks=2, deferred_batch_norm=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def drawn(engine: Any) -> Tensor:
    """Run dropout layers in a pipeline on an input of ones, with a fixed seed.

    The zeros in the output show which elements dropout has drawn. They are the same on any machine.
    """
    torch.manual_seed(5)
    dropouts = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    model = GPipe(dropouts, [1, 2], devices=["cpu", "cpu"], chunks=3, engine=engine)
    return model(DRAWN).detach()
