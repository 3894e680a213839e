"""Test that this version works with files that an older version (git revision 414bf55) has saved.

The same seeds must also give the same random numbers as in the older version.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from torchgpipe.state.saves import Saves

from .make import DATA, X, adam, drawn, piped

RETURNED: dict[str, Any] = torch.load(DATA / "returned.pt")


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
