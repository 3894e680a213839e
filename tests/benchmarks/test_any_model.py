"""`benchmarks.any_model`: a few of its models, and its record."""

from functools import partial
from pathlib import Path

import pytest
from torch import nn

from benchmarks.any_model import check_model, main, table
from benchmarks.any_model_lists import LISTS, Case, torchvision_models
from reproduce.records.record import load

from ..library.traced import Choosing, Residual, rows


# A residual network, auxiliary outputs, a class token, windows with masks, a dictionary of outputs, concatenation.
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("googlenet", "vit_b_32", "swin_t", "lraspp_mobilenet_v3_large", "squeezenet1_0")
        ),
    ],
)
def test_torchvision(name: str) -> None:
    assert check_model("torchvision", name, torchvision_models()[name]()).status == "measured"


def test_a_list_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(kind: type[nn.Module]) -> Case:
        built.append(kind.__name__)
        return Case(kind(), rows())

    models = {kind.__name__: partial(build, kind) for kind in (Residual, Choosing)}
    monkeypatch.setitem(LISTS, "torchvision", lambda: models)
    path = tmp_path / "record.json"
    for more, now in ((["--only", "Choosing"], ["Choosing"]), ([], ["Residual"]), ([], []), (["--again"], [*models])):
        built.clear()
        main(["torchvision", "--json", str(path), *more])
        assert sorted(built) == sorted(now)
    record = load(path)
    assert {each.row: each.status for each in record.results} == {"Residual": "measured", "Choosing": "failed"}
    assert "return self.a(x) if" in (record.results[1].reason or "")
    page = table(record, "pipe")
    assert "Equal, of torchvision: Residual." in page
    assert "| Choosing " in page
    assert max(map(len, page.splitlines())) < 200
