"""Checkpoints: whole files only, of the same training only, for one run at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from reproduce.error import Error
from reproduce.run.accuracy.checkpoints import Checkpoints


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "new" / "folder")
    path = store.path("a row", {"seed": 1})
    assert store.load(path) is None
    store.save(path, {"weights": torch.arange(3), "epoch": 1})
    store.save(path, {"weights": torch.arange(4), "epoch": 2})
    found = store.load(path)
    assert found is not None and found["epoch"] == 2 and found["weights"].tolist() == [0, 1, 2, 3]
    assert [file.name for file in store.folder.iterdir() if file.suffix] == [path.name], "nothing else is left"


def test_another_training_has_another_file(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    paths = {store.path("a", {"seed": 1, "lr": 0.1}), store.path("a", {"seed": 2, "lr": 0.1}), store.path("b", {})}
    assert len(paths) == 3
    assert store.path("a", {"lr": 0.1, "seed": 1}) in paths, "the order of the settings does not matter"


@pytest.mark.parametrize("at", ["torch.save", "os.fsync", "os.replace"])
def test_whatever_fails_leaves_the_old_checkpoint(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    path = store.path("a", {})
    store.save(path, {"epoch": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Error, match=r"\(No space left on device\); make"):
        patch.setattr(at, fail)
        store.save(path, {"epoch": 2})
    assert store.load(path) == {"epoch": 1}
    assert not list(tmp_path.glob("*.part"))


def test_what_a_kill_left_is_written_over(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    path = store.path("a", {})
    path.with_suffix(".part").write_bytes(b"half")
    store.save(path, {"epoch": 1})
    assert store.load(path) == {"epoch": 1} and not list(tmp_path.glob("*.part"))


def test_a_broken_checkpoint_is_told(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    path = store.path("a", {})
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(Error) as caught:
        store.load(path)
    assert f"{path}: cannot be read (" in str(caught.value) and "delete it, or use --fresh" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fresh_leaves_out_what_runs_before_wrote(tmp_path: Path) -> None:
    old = Checkpoints(tmp_path)
    path = old.path("a", {})
    old.save(path, {"epoch": 1})
    old.close()
    store = Checkpoints(tmp_path, fresh=True)
    assert store.load(path) is None
    store.save(path, {"epoch": 7})
    assert store.load(path) == {"epoch": 7}


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path)
    with pytest.raises(Error, match="another run keeps its checkpoints there; wait for it, or name"):
        Checkpoints(tmp_path)
    first.close()
    Checkpoints(tmp_path).close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Error, match=r"cannot be written \(.*\); name another --out"):
        Checkpoints(tmp_path / "file" / "folder")


def test_kept_and_removed(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    kept, removed = store.path("a", {}), store.path("b", {})
    for path in (kept, removed):
        store.save(path, {"epoch": 1})
    store.keep(kept, "run")
    store.remove(removed)
    assert store.load(kept) is None and store.load(removed) is None
    assert os.listdir(tmp_path / "run") == [kept.name]
