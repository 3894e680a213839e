"""Files of revision 414bf55 of this library can be loaded: pickled pipelines and saved states.

With the same seed, a pipeline draws the random numbers that it drew in that revision.
"""

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
    """Make a process group that consists of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["pipeline", "traced", "rank"])
def test_a_pickled_pipeline(name: str, alone: None) -> None:
    models = torch.load(DATA / "models.pt", weights_only=False)
    model = models[name]
    assert_close(model.eval()(X), RETURNED[name])
    model.train()
    outputs = model(X)
    if name == "traced":
        outputs = outputs["sum"]
    outputs.sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()


def test_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    shutil.copytree(DATA / "saves", folder)
    model, saves = piped(), Saves(folder)
    optimizer = adam(model)
    found = saves.load(model, optimizer)
    assert found is not None
    assert found["step"] == 3
    assert found["data"].tolist() == [0, 1, 2]
    assert_close(model.eval()(X), RETURNED["pipeline"])
    expected = torch.load(DATA / "state.pt")["optimizer"]
    assert_close(optimizer.state_dict()["state"], expected["state"])
    for step in (4, 5):
        assert (folder / "000001-step-3").exists()  # one of the newest two saves
        saves.save(step, model, optimizer)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["000002-step-4", "000003-step-5", "lock"]


@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_seeds_draw_the_same(engine: str) -> None:
    assert torch.equal(drawn(engine), RETURNED["drawn"][engine])
