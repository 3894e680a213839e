"""The list of experiments: every row, in 80 columns."""

from __future__ import annotations

import pytest

from reproduce.cli.list import listing
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.tables.layout import WIDTH


@pytest.mark.parametrize("devices", [Devices("cpu", 2, 1), Devices("cpu", 8, 16)])
def test_the_list_fits_80_columns_and_has_every_row(devices: Devices) -> None:
    lines = listing(devices).splitlines()
    assert max(map(len, lines)) <= WIDTH
    names = {row.name for experiment in EXPERIMENTS.values() for scale in experiment.scales for row in scale.rows}
    assert names <= {line.partition("  ")[0] for line in lines}
