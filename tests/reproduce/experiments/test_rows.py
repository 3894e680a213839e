"""Tests of experiments, which are lists of rows (configurations to run).

Rows must agree with the published tables and with committed runs. By default, an experiment must
run at the largest scale (set of sizes) that fits the devices.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_rows, choose_scale
from reproduce.experiments.resnet import TRAINING
from reproduce.experiments.row import AS_PUBLISHED, PUBLISHED_NODE, Experiment, GiB, Row
from reproduce.machine.devices import Devices
from reproduce.numbers.significance import Rule, needed
from reproduce.records.places import MEASURED
from reproduce.records.published import published
from reproduce.records.record import Record, Result, Run, load

ALL = list(EXPERIMENTS.values())
TIMED = [experiment for experiment in ALL if experiment.measures in ("speed", "ablation")]
WITH_A_TABLE = [experiment for experiment in ALL if experiment.table]


def started(record: Record) -> str:
    return record.run.started if record.run else ""


RUNS = sorted(map(load, MEASURED.glob("*.json")), key=started)

# Fields of published configurations that the rows (configurations) of experiments do not have. Some
# describe the published measurement. The others can be computed from fields that the rows have.
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
# Fields that can differ between the two scales of an experiment.
SIZES = ("model", "size", "input_shape", "batch_size", "chunks", "balance", "name", "link")
WITHOUT_SIZES: Any = dict.fromkeys(SIZES)


def name_of(experiment: Experiment) -> str:
    return experiment.name


@pytest.mark.parametrize("experiment", WITH_A_TABLE, ids=name_of)
def test_paper_scale_is_the_published_table(experiment: Experiment) -> None:
    rows = list(experiment.scale("paper").rows)
    if experiment.measures != "memory":
        rows = [row for row in rows if row.configuration == AS_PUBLISHED]
    names = {row.name for row in rows}
    left_out = set(NOT_OURS)
    if experiment.measures != "accuracy":
        left_out.add("epochs")
    table = published(experiment.table or "")
    for row, result in zip(rows, table.results, strict=True):
        assert row.name == row.published == result.row
        ours = row.config()
        for key, value in result.config.items():
            if key not in left_out:
                assert ours.get(key) == value
        binary = row.criterion is F.binary_cross_entropy_with_logits
        assert (row.num_classes is None) == binary
        assert row.over is None or row.over in names


@pytest.mark.parametrize("experiment", TIMED, ids=name_of)
def test_compare_can_judge_two_default_runs(experiment: Experiment) -> None:
    """Check that a run with default options times enough steps of each row (configuration).

    If there were fewer steps, `compare` could call no difference between two runs significant.
    """
    least = needed(Rule().alpha, paired=False)
    for scale in experiment.scales:
        assert min(scale.steps, scale.least_steps) >= least


# The fields of a scale (set of sizes) that say how many steps to time. An old run may differ in
# these fields, because they change only how often its rows (configurations) were timed.
HOW_OFTEN = ("steps", "least_steps")


def newest_run(experiment: Experiment, rows: list[Row]) -> tuple[Run, list[Result]]:
    """Return the newest committed run of an experiment, and its results.

    The run has all rows (configurations) that run by default. It may also have rows that run only
    with the option `--all`.
    """
    usual = {row.name for row in rows if not row.extra}
    for record in reversed(RUNS):
        results = [each for each in record.results if each.experiment == experiment.name]
        names = dict.fromkeys(each.row for each in results)
        in_order = [row.name for row in rows if row.name in names]
        if record.run is not None and list(names) == in_order and usual <= names.keys():
            return record.run, results
    raise AssertionError(f"no run of all usual rows of {experiment.name} is committed")


@pytest.mark.parametrize("experiment", ALL, ids=name_of)
def test_the_newest_committed_run_has_the_rows_that_are_run_now(experiment: Experiment) -> None:
    """Check that the newest committed run of an experiment has the rows that the code runs now.

    Balances and links are not compared, because they depend on the machine. The name of a row's
    group may be missing, because older versions did not record it.
    """
    scale = experiment.scale("small")
    rows = {row.name: row for row in scale.rows}

    run, results = newest_run(experiment, list(scale.rows))

    settings = scale.settings() | run.settings[experiment.name]
    for name in HOW_OFTEN:
        if name in settings:
            settings[name] = scale.settings()[name]
    assert settings == scale.settings()
    for result in results:
        if result.scale != scale.name:  # a model of a published size, which is only counted
            continue
        row = rows[result.row]
        theirs = {"link": None, "group": row.group, **result.config}
        published_row = f"{experiment.table}/{row.published}" if row.published else None
        assert result.published == published_row
        assert result.over == row.over
        ours = {**row.config(), "link": theirs["link"]}
        if row.balance is None:
            ours["balance"] = theirs.get("balance")
        assert ours == theirs
        linked = result.emulated and row.devices > 1 and row.link == PUBLISHED_NODE
        assert bool(theirs["link"]) == linked


@pytest.mark.parametrize("name", ["amoebanet-speed", "unet-speed", "resnet101-speed", "zoo-speed"])
def test_rows_of_ours_are_the_same_at_both_scales(name: str) -> None:
    """Check that rows (configurations) that are not from papers are the same at both scales.

    At the scales `paper` and `small`, rows may differ only in sizes. The largest number of
    micro-batches is 32 at the scale `paper`, and 8 at the scale `small`.
    """

    def ours(scale: str) -> list[Row]:
        rows = EXPERIMENTS[name].scale(scale).rows
        return [row for row in rows if row.equal]

    paper, small = ours("paper"), ours("small")
    for row, small_row in zip(paper, small, strict=True):
        assert replace(row, **WITHOUT_SIZES) == replace(small_row, **WITHOUT_SIZES)
        assert row.name.replace("m32", "m8") == small_row.name
    for rows, largest in ((paper, 32), (small, 8)):
        chunks, batch_sizes, micro_batch_sizes = set(), set(), set()
        for row in rows:
            chunks.add(row.chunks)
            if row.equal == "micro-batch":
                micro_batch_sizes.add(row.micro_batch_size)
            else:
                batch_sizes.add(row.batch_size)
            assert row.balance is None or len(row.balance) == row.partitions
        assert chunks == ({None, 8} if name == "zoo-speed" else {1, 4, largest})
        assert len(batch_sizes) == 1
        assert len(micro_batch_sizes) <= 1


RATES: dict[int, dict[float, float]] = {
    # There is no warm-up, because the peak rate equals `base_lr`.
    256: {0: 0.1, 29.99: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001},
    128: {5: 0.1},  # the factor is at least 1
    1024: {0: 0.1, 1: 0.175, 4: 0.4},
    4096: {2: 0.85, 89.9: 0.0016},
}


@pytest.mark.parametrize("batch_size", RATES)
def test_the_learning_rate_is_warmed_up_and_decays(batch_size: int) -> None:
    recipe = TRAINING.recipe
    for epoch, rate in RATES[batch_size].items():
        assert recipe.learning_rate(batch_size, epoch) == pytest.approx(rate)
    cold = replace(recipe, warmup_epochs=0)
    assert cold.learning_rate(batch_size, 0) == recipe.peak_lr(batch_size)


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
            "--scale small: it needs 4 GiB of memory in all, and 2 CPU devices of 1 thread each "
            "have 0.5 GiB",
        ),
        (
            "cpu",
            64,
            "huge",
            "--scale huge: no such scale of amoebanet-speed; choose paper or small",
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
    experiment = EXPERIMENTS["amoebanet-speed"]
    for names, extra, counts in (
        ([], False, [20, 20]),
        ([], True, [31, 40]),
        (["n2m4/pb"], False, [1]),
    ):
        (chosen,) = choose_rows([experiment], names, extra=extra)
        assert [len(scale.rows) for scale in chosen.scales] == counts
