"""`benchmarks.any_model`: a few of its models, what it would say of a wrong one, and its record."""

from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

from benchmarks.any_model import check_model, main, table
from benchmarks.any_model_lists import LISTS, Case, torchvision_models
from reproduce.records.record import load

from ..library.traced import Net, rows


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


class Pairwise(Net):
    """Whose outputs depend on the other samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) - x.mean())


class Branching(Pairwise):
    """Which is refused."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) if self.a(x).sum() > 0 else x


def test_a_list_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(kind: type[nn.Module]) -> Case:
        built.append(kind.__name__)
        return Case(kind(), rows())

    models = {kind.__name__: partial(build, kind) for kind in (Pairwise, Branching)}
    monkeypatch.setitem(LISTS, "torchvision", lambda: models)
    path = tmp_path / "record.json"
    for more, now in ((["--only", "Branching"], ["Branching"]), ([], ["Pairwise"]), ([], []), (["--again"], [*models])):
        built.clear()
        main(["torchvision", "--json", str(path), *more])
        assert sorted(built) == sorted(now)
    record = load(path)
    assert {each.row: each.status for each in record.results} == {"Pairwise": "measured", "Branching": "failed"}
    assert "return self.b(x) if" in (record.results[1].reason or "")
    page = table(record, "pipe")
    assert "Equal, of torchvision: Pairwise." in page
    assert "| Branching " in page
    assert max(map(len, page.splitlines())) < 200
