"""Test what the tables of memory experiments say below the numbers."""

from typing import Any

from reproduce.tables.all import tables
from reproduce.tables.layout import MiB

from ..made import ran, record


def test_a_note_has_the_number_of_micro_batches_that_there_were() -> None:
    """Check that 16 samples have 16 micro-batches, even if the row asks for more."""
    peaks: dict[str, Any] = {"model_bytes": MiB, "peak_allocated": lambda row: [MiB] * row.devices}
    results = ran("unet-memory", "small", lambda row: [], **peaks)
    (table,) = tables(record(*results))
    assert "scale small; batch size 16; pipelines in 16 micro-batches" in table.notes
