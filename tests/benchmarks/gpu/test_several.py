"""Test the benchmark for several GPUs, here with two ranks on the CPU."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import several
from benchmarks.gpu.part import Context

from ...reproduce.made import ran, record

CPUS = [torch.device("cpu")] * 2


def test_a_dry_run_trains_two_ranks_and_kills_one(tmp_path: Path) -> None:
    context = Context("several", "tiny", tmp_path, time.monotonic() + 60)

    result = several.run(context)

    assert result["gloo"]["right"]
    assert result["kill"]["told"] == result["kill"]["others"] == 1
    assert result["pairs"] == {"pairs": 2, "wrong": []}
    (line,) = several.lines(result)
    assert line.startswith("2 of 2 pairs copied right; gloo: 2 ranks, right gradients, ")
    assert "a killed rank was noticed by 1 of 1 others within " in line


def test_one_gpu_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(Context, "devices", property(lambda self: [gpu]))
    context = Context("several", "paper", tmp_path, time.monotonic() + 60)
    (line,) = several.lines(several.run(context))
    assert line.startswith("left out, for lack of GPUs")


def test_ranks_with_a_gpu_each_use_nccl_and_ranks_that_share_one_are_staged() -> None:
    gpus = [torch.device("cuda", k) for k in range(3)]
    assert several.ways_of(gpus) == {"NCCL": gpus, "staging": [gpus[0]] * 3}
    assert several.ways_of(CPUS) == {"gloo": CPUS}


def fail(k: int, places: Any, width: int) -> Any:
    raise ZeroDivisionError("trouble")


def test_a_rank_that_fails_says_why() -> None:
    said = several.run_ranks(fail, CPUS, 2, 60.0)
    assert several.failure(said, CPUS) == "rank 0: ZeroDivisionError: trouble"
    assert several.failure({0: {"right": True}}, CPUS[:1]) == ""


def hang(k: int, places: Any, width: int) -> Any:
    if k == 1:
        time.sleep(600)
    return {"right": True}


def test_a_rank_that_hangs_does_not_take_all_the_time() -> None:
    said = several.run_ranks(hang, CPUS, 2, 0.5)
    assert said[1] == {"failed": "said nothing within 0 s"}


def test_the_papers_tables_are_measured_on_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each published table is measured within its share of the time.

    The results name the measured rows (configurations) of a table, or say why there are none.
    """
    folder = tmp_path / "several"
    folder.mkdir()
    asked: dict[str, float] = {}
    results = ran("amoebanet-speed", "paper", lambda row: [100.0], "cuda")

    def run(context: Context, name: str, options: Any, seconds: float) -> Any:
        asked[name] = seconds
        assert {"cuda", "--no-emulate"} < {*options}
        return record(*results, device="cuda") if name == "amoebanet-speed" else "it ended"

    ranks = {"ranks": 2, "right": True, "seconds": 0.01}
    monkeypatch.setattr(Context, "devices", property(lambda self: CPUS))
    monkeypatch.setattr(several, "run_experiment", run)
    monkeypatch.setattr(several, "train", lambda *of: ranks)
    monkeypatch.setattr(several, "kill", lambda *of: {"others": 1, "told": 1, "seconds": 0.2})

    result = several.run(Context("several", "paper", folder, time.monotonic() + 305.0))

    assert asked == {
        "amoebanet-speed": pytest.approx(100, abs=5),
        "unet-speed": pytest.approx(150, abs=5),
        "resnet101-speed": pytest.approx(300, abs=5),
    }
    first, table, others = several.lines(result)
    assert first.endswith("a killed rank was noticed by 1 of 1 others within 0.2 s")
    many = len(results)
    assert table.startswith(f"amoebanet-speed, measured: {many} of {many} rows; n8m32 100 samples")
    assert others == "unet-speed: it ended / resnet101-speed: it ended"


def test_a_wrong_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def wrong(x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        return to(x, *given, **options) * 0

    monkeypatch.setattr(torch.Tensor, "to", wrong)
    assert several.copy_between_pairs(CPUS) == {"pairs": 2, "wrong": [[0, 1], [1, 0]]}


def test_lines_say_what_failed() -> None:
    result = {
        "devices": 2,
        "NCCL": {"ranks": 2, "failed": "rank 1: RuntimeError: no"},
        "kill": {"others": 1, "told": 0, "seconds": None, "failed": "rank 0: Error: no end"},
        "tables": {"unet-speed": {"baseline": {"status": "measured", "speed": 3.0}}},
    }
    assert several.lines({"devices": 2}) == []
    ranks, table = several.lines(result)
    assert ranks == (
        "NCCL: failed, rank 1: RuntimeError: no; a killed rank was noticed by 0 of 1 others, "
        "not by rank 0: Error: no end"
    )
    assert table == "unet-speed, measured: 1 of 1 rows"
