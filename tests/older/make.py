"""What revision 414bf55 wrote, and `make`, which wrote it: copy this folder into a checkout of it, and run there

python -c "from tests.older.make import make; make()"
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.state.saves import Saves

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


class Branched(nn.Module):
    """A module to record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = self.norm(self.first(x)).relu()
        return {"sum": x + self.second(y) * scale, "first": y}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Stash(), nn.BatchNorm1d(4), nn.Dropout(0.5), Pop(), nn.Linear(4, 2))


def piped() -> GPipe:
    return GPipe(layers(), [2, 4], devices=["cpu", "cpu"], chunks=2, deferred_batch_norm=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def drawn(engine: Any) -> Tensor:
    """Return which of some numbers a pipeline's dropouts keep: the same on every machine."""
    torch.manual_seed(5)
    dropouts = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    return GPipe(dropouts, [1, 2], devices=["cpu", "cpu"], chunks=3, engine=engine)(DRAWN).detach()


def make() -> None:
    """Write `DATA`: pipelines, traced layers, a state, a save, and what each of them returns."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    torch.manual_seed(0)
    model = piped()
    optimizer = adam(model)
    model(X).square().sum().backward()
    optimizer.step()
    recorded = sequential(Branched(), X)
    traced = GPipe(recorded, [1, len(recorded) - 1], devices=["cpu", "cpu"], chunks=2)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
    rank = DistributedGPipe(layers(), [6], chunks=2, deferred_batch_norm=True)
    torch.save({"pipeline": model, "traced": traced, "rank": rank}, DATA / "models.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, DATA / "state.pt")
    Saves(DATA / "saves").save(3, model, optimizer, data=torch.arange(3))
    returned = {name: m.eval()(X) for name, m in (("pipeline", model), ("traced", traced), ("rank", rank))}
    torch.save({**returned, "drawn": {name: drawn(name) for name in ("graph", "workers")}}, DATA / "returned.pt")
    dist.destroy_process_group()
