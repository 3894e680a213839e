"""What revision 414bf55 wrote loads: pickled pipelines and saves. Its seeds draw the same numbers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from torchgpipe.state.saves import Saves

from .make import DATA, X, adam, drawn, piped

RETURNED: dict[str, Any] = torch.load(DATA / "returned.pt")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["pipeline", "traced", "rank"])
def test_a_pickled_pipeline(name: str, alone: None) -> None:
    model = torch.load(DATA / "models.pt", weights_only=False)[name]
    assert_close(model.eval()(X), RETURNED[name])
    model.train()
    outputs = model(X)
    (outputs["sum"] if name == "traced" else outputs).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    shutil.copytree(DATA / "saves", folder)
    model, saves = piped(), Saves(folder)
    found = saves.load(model, optimizer := adam(model))
    assert found is not None and found["step"] == 3 and found["data"].tolist() == [0, 1, 2]
    assert_close(model.eval()(X), RETURNED["pipeline"])
    assert_close(
        optimizer.state_dict()["state"], torch.load(DATA / "state.pt")["optimizer"]["state"]
    )
    for step in (4, 5):
        assert (folder / "000001-step-3").exists()  # one of the newest two
        saves.save(step, model, optimizer)
    assert sorted(path.name for path in folder.iterdir()) == [
        "000002-step-4",
        "000003-step-5",
        "lock",
    ]


@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_seeds_draw_the_same(engine: str) -> None:
    assert torch.equal(drawn(engine), RETURNED["drawn"][engine])
