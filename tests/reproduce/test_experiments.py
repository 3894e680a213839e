"""Experiments: the paper scale is the published configuration, to the digit."""

from __future__ import annotations

import pytest

from reproduce.experiments import AS_PUBLISHED, EXPERIMENTS, Experiment, Row
from reproduce.paper import published
from reproduce.record import Result
from reproduce.training import LOSSES, MODELS, size_names

ALL = [
    (experiment, scale, row) for experiment in EXPERIMENTS.values() for scale in experiment.scales for row in scale.rows
]
EXACT = [
    (experiment, row)
    for experiment, scale, row in ALL
    if scale.name == "paper" and (row.configuration == AS_PUBLISHED or experiment.measures == "memory")
]

# What a published configuration says that a row does not: what it measured in, and what is known from the rest.
NOT_OURS = {
    "n", "m", "parameters_exact", "layers", "dataset_size", "epochs", "skip_epochs", "steps_per_epoch",
    "last_batch_size", "bytes_per_parameter", "steps", "devices_in_code", "cli_name", "gpus_source", "outcome",
    "implemented_in_main_py",
}  # fmt: skip


def find(experiment: Experiment, row: Row) -> Result:
    return next(result for result in published(experiment.table).results if result.row == row.published)


@pytest.mark.parametrize(("experiment", "row"), EXACT, ids=lambda value: value.name)
def test_paper_scale_is_the_published_configuration(experiment: Experiment, row: Row) -> None:
    theirs = {key: value for key, value in find(experiment, row).config.items() if key not in NOT_OURS}
    ours = row.config(size_names(row.model))
    assert {key: ours.get(key) for key in theirs} == theirs


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda value: value.name)
def test_every_published_row_is_there_at_paper_scale(experiment: Experiment) -> None:
    exact = [row.published for other, row in EXACT if other is experiment]
    assert exact == [result.row for result in published(experiment.table).results]


@pytest.mark.parametrize(
    "experiment", [each for each in EXPERIMENTS.values() if each.measures != "accuracy"], ids=lambda value: value.name
)
def test_every_scale_asks_for_the_same_partitions_and_chunks(experiment: Experiment) -> None:
    def asked(scale: str) -> set[tuple[str, int | None]]:
        rows = [row for row in experiment.scale(scale).rows if row.configuration != AS_PUBLISHED]
        return {(row.name, row.partitions) for row in rows}

    assert asked("small") == asked("paper")


@pytest.mark.parametrize(("experiment", "scale", "row"), ALL, ids=lambda value: value.name)
def test_rows_are_sound(experiment: Experiment, scale: object, row: Row) -> None:
    names, _ = MODELS[row.model]
    assert len(names) == len(row.size)
    assert row.loss in LOSSES
    assert row.balance is None or len(row.balance) == row.partitions
    assert row.micro_batches == row.chunks, "the batch yields every micro-batch that is asked for"
    assert row.over is None or any(row.over == other.name for e, s, other in ALL if e is experiment and s is scale)
    assert row.published is None or find(experiment, row)


@pytest.mark.parametrize("name", ["paper", "small"])
def test_accuracy_is_told_by_the_whole_recipe(name: str) -> None:
    """What `NOT_OURS` leaves out because speed experiments have no such thing: how long is trained."""
    experiment = EXPERIMENTS["resnet101-accuracy"]
    scale = experiment.scale(name)
    for row in scale.rows:
        config = row.config(size_names(row.model))
        assert config["epochs"] == (find(experiment, row).config.get("epochs", 90) if name == "paper" else 6)
        assert config["gpus"] == row.devices and config["drop_last"] is True
    if name == "small":
        plain, *pipelines = scale.rows
        same = ("model", "size", "batch_size", "optimizer", "recipe", "data", "num_classes", "input_shape")
        for row in pipelines:
            assert [getattr(row, key) for key in same] == [getattr(plain, key) for key in same]
            assert row.over == plain.name and row.checkpoint == "except_last"
        assert {row.chunks for row in pipelines if row.deferred_batch_norm and row.partitions == 2} == {2, 4}


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_speed_is_compared_at_equal_batch_size(scale: str) -> None:
    rows = [row for row in EXPERIMENTS["amoebanet-speed"].scale(scale).rows if row.configuration != AS_PUBLISHED]
    assert len({(row.model, row.size, row.batch_size, row.optimizer.name) for row in rows}) == 1
    naive = [(row.partitions, row.chunks, row.checkpoint) for row in rows if row.configuration == "naive"]
    checkpoint_only = [
        (row.partitions, row.chunks, row.checkpoint) for row in rows if row.configuration == "checkpoint-only"
    ]
    gpipe = [(row.partitions, row.chunks, row.checkpoint) for row in rows if row.configuration == "GPipe"]
    assert naive == [(n, 1, "never") for n in (2, 4, 8)]
    assert checkpoint_only == [(1, m, "always") for m in (1, 4, 32)]
    assert gpipe == [(n, m, "except_last") for n in (2, 4, 8) for m in (1, 4, 32)]
    assert len(rows) == len(naive) + len(checkpoint_only) + len(gpipe)


@pytest.mark.parametrize(
    ("batch_size", "chunks", "size", "count"),
    [(32, 32, 1, 32), (32, 128, 1, 32), (13, 8, 2, 7), (64, 4, 16, 4), (5, None, None, None)],
)
def test_micro_batches(batch_size: int, chunks: int | None, size: int | None, count: int | None) -> None:
    row = Row(**{**vars(ALL[0][2]), "batch_size": batch_size, "chunks": chunks})
    assert (row.micro_batch_size, row.micro_batches) == (size, count)
