"""Checkpoints: whole files only, of the same training only, for one run at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from reproduce.error import Error
from reproduce.run.accuracy.checkpoints import Checkpoints


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "new" / "folder")


@pytest.fixture
def path(store: Checkpoints) -> Path:
    return store.path("a row", {"seed": 1, "lr": 0.1})


def test_a_checkpoint_comes_back(store: Checkpoints, path: Path) -> None:
    assert store.load(path) is None
    path.with_suffix(".part").write_bytes(b"half, by a run that was killed")
    store.save(path, {"weights": torch.arange(3), "epoch": 1})
    store.save(path, {"weights": torch.arange(4), "epoch": 2})
    found = store.load(path)
    assert found is not None and found["epoch"] == 2 and found["weights"].tolist() == [0, 1, 2, 3]
    assert [file.name for file in store.folder.iterdir() if file.suffix] == [path.name], "nothing else is left"


def test_another_training_has_another_file(store: Checkpoints, path: Path) -> None:
    assert store.path("a row", {"lr": 0.1, "seed": 1}) == path, "the order of the settings does not matter"
    assert path not in (store.path("a row", {"seed": 2, "lr": 0.1}), store.path("b", {"seed": 1, "lr": 0.1}))


@pytest.mark.parametrize("at", ["torch.save", "os.fsync", "os.replace"])
def test_whatever_fails_leaves_the_old_checkpoint(
    at: str, store: Checkpoints, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(path, {"epoch": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Error, match=r"\(No space left on device\); make"):
        patch.setattr(at, fail)
        store.save(path, {"epoch": 2})
    assert store.load(path) == {"epoch": 1}
    assert not list(store.folder.glob("*.part"))


def test_a_broken_checkpoint_is_told(store: Checkpoints, path: Path) -> None:
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(Error, match=r"\.pt: cannot be read \(.*\); delete it, or use --fresh$") as caught:
        store.load(path)
    assert "\n" not in str(caught.value)


def test_fresh_leaves_out_what_runs_before_wrote(store: Checkpoints, path: Path) -> None:
    store.save(path, {"epoch": 1})
    with pytest.raises(Error, match="another run keeps its checkpoints there; wait for it, or name"):
        Checkpoints(store.folder)
    store.close()
    fresh = Checkpoints(store.folder, fresh=True)
    assert fresh.load(path) is None
    fresh.save(path, {"epoch": 7})
    assert fresh.load(path) == {"epoch": 7}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Error, match=r"cannot be written \(.*\); name another --out"):
        Checkpoints(tmp_path / "file" / "folder")


def test_what_is_kept_is_out_of_the_way(store: Checkpoints, path: Path) -> None:
    store.save(path, {"epoch": 1})
    store.keep(path, "run")
    assert store.load(path) is None
    assert os.listdir(store.folder / "run") == [path.name]
