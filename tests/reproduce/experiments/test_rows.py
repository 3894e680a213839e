"""Experiments: rows equal the published ones and those of committed runs, and the scale that fits is chosen."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_rows, choose_scale
from reproduce.experiments.resnet import TRAINING
from reproduce.experiments.row import AS_PUBLISHED, PUBLISHED_NODE, Experiment, GiB
from reproduce.machine.devices import Devices
from reproduce.records.places import MEASURED
from reproduce.records.published import published
from reproduce.records.record import load

ALL = list(EXPERIMENTS.values())
WITH_A_TABLE = [experiment for experiment in ALL if experiment.table]
RUNS = sorted(
    map(load, MEASURED.glob("*.json")), key=lambda record: record.run.started if record.run else ""
)

# Fields of published configurations that speed rows lack: units of measurement, and what follows from other fields.
NOT_OURS = {
    "n",
    "m",
    "parameters_exact",
    "layers",
    "dataset_size",
    "last_batch_size",
    "bytes_per_parameter",
    "steps",
    "utilization_sampling_interval_s",
    "devices_in_code",
    "cli_name",
    "gpus_source",
    "outcome",
    "implemented_in_main_py",
}
SAME: Any = dict.fromkeys(
    ("model", "size", "input_shape", "batch_size", "chunks", "balance", "name", "link")
)


@pytest.mark.parametrize("experiment", WITH_A_TABLE, ids=lambda value: value.name)
def test_paper_scale_is_the_published_table(experiment: Experiment) -> None:
    rows = experiment.scale("paper").rows
    exact = [
        row for row in rows if row.configuration == AS_PUBLISHED or experiment.measures == "memory"
    ]
    theirs = published(experiment.table or "").results
    assert [(row.name, row.published) for row in exact] == [
        (result.row, result.row) for result in theirs
    ]
    left_out = NOT_OURS if experiment.measures == "accuracy" else {*NOT_OURS, "epochs"}
    for row, result in zip(exact, theirs, strict=True):
        known = {key: value for key, value in result.config.items() if key not in left_out}
        ours = row.config()
        assert {key: ours.get(key) for key in known} == known
        assert (row.num_classes is None) == (row.criterion is F.binary_cross_entropy_with_logits)
        assert row.over is None or row.over in {other.name for other in exact}


@pytest.mark.parametrize("experiment", ALL, ids=lambda value: value.name)
def test_the_newest_committed_run_has_the_rows_that_are_run_now(experiment: Experiment) -> None:
    """Only runs of all rows are compared, without balances and links, which depend on the machine."""
    scale = experiment.scale("small")
    rows = {row.name: row for row in scale.rows}
    runs = [
        (run.run.settings, [each for each in run.results if each.experiment == experiment.name])
        for run in RUNS
        if run.run is not None
    ]
    settings, results = [
        (how, run) for how, run in runs if [*dict.fromkeys(each.row for each in run)] == [*rows]
    ][-1]
    assert settings[experiment.name] == scale.settings()
    for each in results:
        if each.scale != scale.name:  # models of the published sizes, which are only counted
            continue
        row = rows[each.row]
        link, found = (
            f"{experiment.table}/{row.published}",
            ["link", *["balance"] * (row.balance is None)],
        )
        assert (each.over, each.published) == (row.over, link if row.published else None)
        assert {**row.config(), **{name: each.config.get(name) for name in found}} == {
            "link": None,
            **each.config,
        }
        linked = each.emulated and row.devices > 1 and row.link == PUBLISHED_NODE
        assert bool(each.config.get("link")) == linked


@pytest.mark.parametrize("name", ["amoebanet-speed", "unet-speed", "resnet101-speed", "zoo-speed"])
def test_rows_of_ours_are_the_same_at_both_scales(name: str) -> None:
    """They are equal except for sizes, and for m, which is at most 32 or 8."""
    paper, small = ([row for row in scale.rows if row.equal] for scale in EXPERIMENTS[name].scales)
    assert [replace(row, **SAME) for row in paper] == [replace(row, **SAME) for row in small]
    assert [row.name.replace("m32", "m8") for row in paper] == [row.name for row in small]
    for rows, largest in ((paper, 32), (small, 8)):
        assert {row.chunks for row in rows} == (
            {None, 8} if name == "zoo-speed" else {1, 4, largest}
        )
        assert len({row.batch_size for row in rows if row.equal != "micro-batch"}) == 1
        assert len({row.micro_batch_size for row in rows if row.equal == "micro-batch"}) <= 1
        assert all(row.balance is None or len(row.balance) == row.partitions for row in rows)


RATES: dict[int, dict[float, float]] = {
    256: {
        0: 0.1,
        29.99: 0.1,
        30: 0.01,
        60: 0.001,
        80: 0.0001,
    },  # no warm-up, since the peak equals `base_lr`
    128: {5: 0.1},  # "at least 1"
    1024: {0: 0.1, 1: 0.175, 4: 0.4},
    4096: {2: 0.85, 89.9: 0.0016},
}


@pytest.mark.parametrize("batch_size", RATES)
def test_the_learning_rate_is_warmed_up_and_decays(batch_size: int) -> None:
    recipe, rates = TRAINING.recipe, RATES[batch_size]
    assert {epoch: recipe.learning_rate(batch_size, epoch) for epoch in rates} == pytest.approx(
        rates
    )
    assert replace(recipe, warmup_epochs=0).learning_rate(batch_size, 0) == recipe.peak_lr(
        batch_size
    )


@pytest.mark.parametrize(
    ("kind", "memory", "asked", "expected"),
    [
        ("cuda", 24, None, "paper"),
        ("cuda", 24, "small", "small"),
        ("cuda", 8, None, "small"),
        ("cpu", None, None, "small"),
        (
            "cuda",
            8,
            "paper",
            "--scale paper: it needs 22 GiB of memory each, and 2 CUDA devices have 8.0 GiB; use "
            "--scale small",
        ),
        (
            "cpu",
            64,
            "paper",
            "--scale paper: it needs CUDA devices with 22 GiB of memory each, and this run is on 2 "
            "CPU devices of 1 thread each; use --scale small",
        ),
        (
            "cpu",
            0.5,
            None,
            "--scale small: it needs 4 GiB of memory in all, and 2 CPU devices of 1 thread each have "
            "0.5 GiB",
        ),
        (
            "cpu",
            64,
            "huge",
            "--scale huge: no such scale of amoebanet-speed; there are paper, small",
        ),
    ],
)
def test_the_largest_scale_that_fits_is_chosen(
    kind: str,
    memory: float | None,
    asked: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(kind, 2, threads=1)
    monkeypatch.setattr(Devices, "memory", None if memory is None else memory * GiB)
    if expected in ("paper", "small"):
        assert choose_scale(ALL, devices, asked) == expected
    else:
        with pytest.raises(Error, match=f"^{re.escape(expected)}$"):
            choose_scale(ALL, devices, asked)


def test_extra_rows_are_run_where_they_are_asked_for() -> None:
    for names, extra, counts in (
        ([], False, [20, 20]),
        ([], True, [31, 40]),
        (["n2m4/pb"], False, [1]),
    ):
        (chosen,) = choose_rows([EXPERIMENTS["amoebanet-speed"]], names, extra=extra)
        assert [len(scale.rows) for scale in chosen.scales] == counts
