"""Experiments: the paper scale is the published configuration, to the digit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from reproduce.experiments import (
    AS_PUBLISHED,
    COMPONENTS,
    EQUAL_LAYERS,
    EXPERIMENTS,
    LIKE_PUBLISHED,
    PLANNED,
    PUBLISHED_BALANCE,
    Experiment,
    Row,
)
from reproduce.experiments.resnet import TRAINING
from reproduce.experiments.row import PUBLISHED_NODE
from reproduce.models import MODELS
from reproduce.records.published import published
from reproduce.records.record import Result
from reproduce.run.training import LOSSES

ALL = [
    (experiment, scale, row) for experiment in EXPERIMENTS.values() for scale in experiment.scales for row in scale.rows
]
WITH_A_TABLE = [experiment for experiment in EXPERIMENTS.values() if experiment.table]

# What a published configuration says that a row does not: what it measured in, and what is known from the rest.
NOT_OURS = {
    "n", "m", "parameters_exact", "layers", "dataset_size", "epochs",
    "last_batch_size", "bytes_per_parameter", "steps", "utilization_sampling_interval_s", "devices_in_code", "cli_name",
    "gpus_source", "outcome", "implemented_in_main_py",
}  # fmt: skip


but: Any = replace


def find(experiment: Experiment, row: Row) -> Result:
    return next(result for result in published(experiment.table).results if result.row == row.published)


@pytest.mark.parametrize("experiment", WITH_A_TABLE, ids=lambda value: value.name)
def test_paper_scale_is_the_published_table(experiment: Experiment) -> None:
    rows = experiment.scale("paper").rows
    exact = [row for row in rows if row.configuration == AS_PUBLISHED or experiment.measures == "memory"]
    theirs = published(experiment.table).results
    assert [row.published for row in exact] == [result.row for result in theirs]
    for row, result in zip(exact, theirs, strict=True):
        known = {key: value for key, value in result.config.items() if key not in NOT_OURS}
        ours = row.config()
        assert {key: ours.get(key) for key in known} == known


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda value: value.name)
def test_the_small_scale_keeps_the_shape(experiment: Experiment) -> None:
    """The same n and m; but a memory experiment's m is its batch size, and that is smaller. Nothing is as published."""

    def shape(scale: str) -> tuple[dict[str, tuple[int | None, int | None]], Counter[str]]:
        rows = experiment.scale(scale).rows
        like = [row for row in rows if row.published and experiment.measures != "accuracy"]
        fixed = {row.name: (row.partitions, None if experiment.measures == "memory" else row.chunks) for row in like}
        return fixed, Counter(row.group for row in rows if row.equal)

    assert shape("small") == shape("paper")
    assert not any(row.configuration == AS_PUBLISHED for row in experiment.scale("small").rows)
    assert not any(row.configuration == LIKE_PUBLISHED for row in experiment.scale("paper").rows)


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_the_ablation_adds_one_component_at_a_time(scale: str) -> None:
    rows = EXPERIMENTS["unet-ablation"].scale(scale).rows
    assert [(row.partitions, row.components) for row in rows] == [(4, COMPONENTS[:count]) for count in range(4)]
    assert [row.over for row in rows] == ["baseline"] * 4
    others = [replace(row, name="", over="", published="", components=()) for row in rows]
    assert all(other == others[0] for other in others)


@pytest.mark.parametrize(("experiment", "scale", "row"), ALL, ids=lambda value: value.name)
def test_rows_are_sound(experiment: Experiment, scale: object, row: Row) -> None:
    assert len(row.size) == len(MODELS[row.model].sizes)
    assert row.loss in LOSSES
    assert row.balance is None or len(row.balance) == row.partitions
    if row.chunks is not None:  # the batch yields every micro-batch that is asked for; one published row asks for more
        assert row.micro_batches == min(row.chunks, row.batch_size)
    assert row.over is None or any(row.over == other.name for e, s, other in ALL if e is experiment and s is scale)
    assert row.published is None or find(experiment, row)


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_every_model_of_the_zoo_is_trained_plainly_and_in_two_balances(scale: str) -> None:
    rows = EXPERIMENTS["zoo-speed"].scale(scale).rows
    models = dict.fromkeys(row.model for row in rows)
    assert len(models) == 10 and all(row.input_shape == (3, *row.size, *row.size) for row in rows)
    for model in models:
        plain, *others = (row for row in rows if row.group == model)
        assert (plain.partitions, plain.chunks, plain.over) == (None, None, plain.name)
        pipelines = [(n, balance) for n in (2, 4, 8) for balance in (PLANNED, EQUAL_LAYERS)]
        assert [(row.partitions, row.configuration) for row in others] == pipelines
        same = {"name": "", "configuration": "", "partitions": 1, "chunks": 1, "checkpoint": None}
        assert all(but(row, **same) == but(plain, **same) for row in others)


def test_accuracy_rows_keep_the_recipe() -> None:
    """What `NOT_OURS` leaves out, as speed experiments have no such thing; and pipelines train as plain layers do."""
    experiment = EXPERIMENTS["resnet101-accuracy"]
    for row in experiment.scale("paper").rows:
        assert row.config()["epochs"] == find(experiment, row).config.get("epochs", 90)
    plain, *pipelines = experiment.scale("small").rows
    same = ("model", "size", "batch_size", "optimizer", "recipe", "data", "num_classes", "input_shape")
    for row in pipelines:
        assert all(getattr(row, key) == getattr(plain, key) for key in same)
        assert row.over == plain.name and row.checkpoint == "except_last"
    assert {row.chunks for row in pipelines if row.deferred_batch_norm and row.partitions == 2} == {2, 4}


@pytest.mark.parametrize(
    ("batch_size", "rates"),
    [
        (256, {0: 0.1, 29.99: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001}),  # nothing to warm up to
        (128, {5: 0.1}),  # "at least 1"
        (1024, {0: 0.1, 1: 0.175, 4: 0.4}),
        (4096, {2: 0.85, 89.9: 0.0016}),
    ],
)
def test_the_learning_rate_is_warmed_up_and_decays(batch_size: int, rates: dict[float, float]) -> None:
    assert {epoch: TRAINING.recipe.learning_rate(batch_size, epoch) for epoch in rates} == pytest.approx(rates)
    assert replace(TRAINING.recipe, warmup_epochs=0).learning_rate(batch_size, 0) == TRAINING.recipe.peak(batch_size)


SPEED = [experiment.name for experiment in WITH_A_TABLE if experiment.measures == "speed"]


@pytest.mark.parametrize("name", SPEED)
def test_rows_like_the_published_come_in_two_balances(name: str) -> None:
    """In one that is profiled here, and in the published one, which is there to see what it is worth."""
    rows = EXPERIMENTS[name].scale("small").rows
    theirs = {row.name: row for row in EXPERIMENTS[name].scale("paper").rows}
    like = {row.name: row for row in rows if row.configuration == LIKE_PUBLISHED}
    again = {row.name: row for row in rows if row.configuration == PUBLISHED_BALANCE}
    assert list(like) == [row.name for row in theirs.values() if row.configuration == AS_PUBLISHED]
    assert list(again) == [f"{row.name}/pb" for row in like.values() if row.devices > 1]
    assert not any(row.balance for row in like.values())
    for row in again.values():
        first = like[row.name.removesuffix("/pb")]
        assert row.balance == theirs[first.name].balance and row.published is None
        same = {"name": "", "configuration": "", "balance": None, "published": None}
        assert but(row, **same) == but(first, **same)
    assert all((row.link == PUBLISHED_NODE) == (row.equal is None) for row in rows)


@pytest.mark.parametrize("equal", ["batch", "micro-batch"])
@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("name", SPEED)
def test_controls_keep_one_thing_equal(name: str, scale: str, equal: str) -> None:
    rows = [row for row in EXPERIMENTS[name].scale(scale).rows if row.equal == equal]
    size = {row.batch_size if equal == "batch" else row.micro_batch_size for row in rows}
    assert len(size) == len({(row.model, row.size, row.optimizer.name) for row in rows}) == 1
    chunks = [row.chunks for row in rows if row.configuration == "checkpoint-only"]
    assert len(chunks) > 1 and 1 not in chunks, "naive has m=1"
    assert [(row.configuration, row.partitions, row.chunks, row.checkpoint) for row in rows] == [
        *(("naive", n, 1, "never") for n in (2, 4, 8)),
        *(("checkpoint-only", 1, m, "always") for m in chunks),
        *(("GPipe", n, m, "except_last") for n in (2, 4, 8) for m in chunks),
    ]
    named = {row.name: row for row in rows}
    assert all(named[str(row.over)].configuration == "naive" for row in rows)
    assert all(named[str(row.over)].partitions == row.partitions for row in rows if row.partitions != 1)


@pytest.mark.parametrize(
    ("batch_size", "chunks", "size", "count"),
    [(32, 32, 1, 32), (32, 128, 1, 32), (13, 8, 2, 7), (64, 4, 16, 4), (5, None, None, None)],
)
def test_micro_batches(batch_size: int, chunks: int | None, size: int | None, count: int | None) -> None:
    row = Row(**{**vars(ALL[0][2]), "batch_size": batch_size, "chunks": chunks})
    assert (row.micro_batch_size, row.micro_batches) == (size, count)
