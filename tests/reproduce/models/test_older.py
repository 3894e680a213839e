"""The models of older tables: as many layers and parameters as were published of them."""

from __future__ import annotations

import pytest
import torch

from reproduce.models.older import older_amoebanetd, older_resnet101
from reproduce.records.published import published


def test_layers() -> None:
    with torch.device("meta"):
        assert len(older_resnet101()) == 304
        model = older_amoebanetd(4, 512)
        assert len(model) == 325
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 10)


@pytest.mark.parametrize("row", published("tg-history-amoebanetd-memory-v0.0.2").results, ids=lambda row: row.row)
def test_parameters(row: object) -> None:
    config, values = row.config, row.values  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = older_amoebanetd(config["L"], config["F"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(values["parameters"], rel=0.005)
