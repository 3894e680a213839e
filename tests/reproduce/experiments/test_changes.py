"""Tests of `run … --set`, which changes settings of rows (configurations) from the shell."""

from typing import Any

import pytest

from reproduce.cli.run import with_each_set
from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.changes import change_row, change_rows
from reproduce.experiments.row import EQUAL_LAYERS, Row, Scale


def row_of(experiment: str, name: str, scale: str = "small") -> Row:
    (row,) = [row for row in EXPERIMENTS[experiment].scale(scale).rows if row.name == name]
    return row


@pytest.mark.parametrize(
    ("words", "expanded"),
    [
        ("x --set n=4 m=16 --steps 3", "x --set n=4 --set m=16 --steps 3"),
        ("--set=n=4 m=16 x y=1", "--set=n=4 --set m=16 x y=1"),
        ("--set n=4 --set m=16 k=2", "--set n=4 --set m=16 --set k=2"),
        ("x y=1 --set", "x y=1 --set"),
        ("--set n x=1", "--set n x=1"),
        ("--set n=4 --out=a b=1", "--set n=4 --out=a b=1"),
    ],
)
def test_each_setting_gets_its_option(words: str, expanded: str) -> None:
    assert with_each_set(words.split()) == expanded.split()


@pytest.mark.parametrize(
    ("row", "settings", "fields"),
    [
        ("n2m4", ["m=16"], {"chunks": 16, "partitions": 2, "batch_size": 51}),
        ("n2m4", ["n=4", "m=16", "batch_size=64"], {"partitions": 4, "batch_size": 64}),
        ("n2m4", ["chunks=8"], {"chunks": 8, "changed": {"m": 8}}),
        ("n2m4", ["checkpoint=never"], {"checkpoint": "never"}),
        ("n2m4", ["balance=3,6,7,8"], {"balance": (3, 6, 7, 8), "partitions": 4}),
        ("n2m4/pb", ["n=4"], {"balance": None, "partitions": 4}),
        ("n2m4/pb", ["m=8"], {"balance": (9, 15)}),
        ("n2m4/pb", ["D=32"], {"balance": None, "size": (18, 32)}),
        ("n2m4", ["L=6", "D=32"], {"size": (6, 32), "changed": {"L": 6, "D": 32}}),
        ("n2m4", ["n=2", "m=8"], {"name": "n2m4 m=8", "changed": {"m": 8}}),
    ],
)
def test_settings_change_a_row(row: str, settings: list[str], fields: dict[str, Any]) -> None:
    """Check a row (configuration) whose settings are changed as by the option `--set`.

    The new row has a name and a group of its own, and is not compared with a published result.
    """
    changed = change_row(row_of("amoebanet-speed", row), settings)
    for name, value in fields.items():
        assert getattr(changed, name) == value
    assert changed.name.startswith(f"{row} ")
    assert changed.changed_from == row
    assert changed.published is None
    assert changed.group == "changed"
    config = changed.config()
    assert config["changed_from"] == row
    assert config["changed"] == changed.changed


def test_a_row_of_the_published_size_times_all_its_steps() -> None:
    changed = change_row(row_of("amoebanet-speed", "n2m4", "paper"), ["m=8"])
    assert (changed.skip_epochs, changed.published) == (0, None)
    assert changed.balance == (9, 15)


def test_a_plain_row_becomes_a_pipeline() -> None:
    changed = change_row(row_of("unet-speed", "baseline"), ["n=2", "m=4"])
    assert (changed.partitions, changed.chunks) == (2, 4)
    assert changed.checkpoint == "except_last"


def test_a_balance_of_equal_layers_stays_one() -> None:
    changed = change_row(row_of("zoo-speed", "resnet50 n2 equal"), ["m=4"])
    assert changed.configuration == EQUAL_LAYERS
    assert changed.group == "changed", "it shares no table with other rows of its model"


def test_speed_ups_are_over_rows_with_the_same_changes() -> None:
    scale = EXPERIMENTS["amoebanet-speed"].scale("small")

    def names(*rows: str) -> dict[str, str | None]:
        chosen = tuple(row for row in scale.rows if row.name in rows)
        changed: Scale = change_rows(Scale(name="x", rows=chosen, memory=0, cuda=False, steps=1), M)
        return {row.name: row.over for row in changed.rows}

    assert names("n2m1", "n2m4") == {"n2m1 m=8": "n2m1 m=8", "n2m4 m=8": "n2m1 m=8"}
    assert names("n2m4") == {"n2m4 m=8": None}


M = ["m=8"]


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ("n2m4", "k=3", "n2m4 has no k to set; there are n, m, batch_size, balance, checkpoint, L"),
        ("n2m4", "batchsize=3", "to set; did you mean batch_size"),
        ("n2m4", "schedule=1F1B", "the schedule cannot be changed, because every row runs GPipe's"),
        ("n2m4", "schedule=1F1B", "--set can change n, m, batch_size, balance, checkpoint, L, D"),
        ("n2m4", "n", "--set n: give a field and its value, such as n=4"),
        ("n2m4", "n=x", "--set n=x: n is a number of partitions, such as 4"),
        ("n2m4", "m=0", "--set m=0: m is a number of micro-batches, such as 16"),
        ("n2m4", "D=-1", "--set D=-1: D is a size of the model, a whole number from 1"),
        ("n2m4", "checkpoint=no", "checkpoint is always, except_last or never"),
        ("n2m4", "balance=3,x", "balance is the number of layers of each partition, such as 3,6"),
        ("n2m4", "m=16 m=4", "--set m=16 m=4: m is set twice"),
        ("n2m4", "n=4 partitions=2", "--set n=4 partitions=2: n is set twice"),
        ("n2m4", "n=2 m=4", "--set n=2 m=4: n2m4 has these settings already"),
        ("n2m4", "n=3 balance=12,12", "--set n=3 balance=12,12: balance has 2 partitions, and n"),
        ("n2m4", "balance=12,13", "balance has 25 layers, and AmoebaNet-D has 24"),
        ("n2m4", "n=25", "n=25 is more than the 24 layers of AmoebaNet-D"),
        ("n2m4", "m=64", "m=64 is more than the 51 samples of a mini-batch"),
        ("baseline", "m=4", "baseline is trained without a pipeline; set n and m, too"),
        ("baseline", "n=4", "baseline is trained without a pipeline; set m, too"),
    ],
)
def test_what_cannot_be_set_is_told_in_one_line(row: str, settings: str, said: str) -> None:
    experiment = "unet-speed" if row == "baseline" else "amoebanet-speed"
    with pytest.raises(Error) as error:
        change_row(row_of(experiment, row), settings.split())
    assert said in str(error.value)
    assert "\n" not in str(error.value)
