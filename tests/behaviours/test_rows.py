"""Every row of rows/ with every engine and mode: a pipeline has the results of its layers, or it refuses."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.others.ours import Layers, Threads

from ..plain import piped
from .compare import differences
from .pipe import Pipe, Training
from .row import ENGINES, MODES, Case, Row, cases, unlike
from .rows import at_once, between, buffers, gradients, passed, random, tools, unusual
from .rows.training import ROWS

GROUPS = (passed, gradients, between, buffers, random, unusual, at_once, tools)
NAMES = {row: f"{group.__name__.split('.')[-1]}: {row.name}" for group in GROUPS for row in group.ROWS}
# The others differ from plain layers; benchmarks/conformance.py lists them with the reason, `unlike`.
TOGETHER = [row for row in ROWS if not row.unlike]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        chosen = cases([*NAMES], pairs=metafunc.config.getoption("slow"))
        metafunc.parametrize("case", chosen, ids=lambda case: "-".join((NAMES[case.row], *filter(None, case[1:]))))


# From a reentrant checkpoint in the first pass, which runs without a graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
# Before torch 2.13, if a layer raises, the generator in `checkpoint` is closed only when the error is freed.
@pytest.mark.filterwarnings("ignore:.*_checkpoint_without_reentrant:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# From torch.compile, also with plain layers; from torch.distributed.checkpoint; from a forked process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_rows(case: Case) -> None:
    assert unlike(*case) == []


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ENGINES[:2])
@pytest.mark.parametrize("row", tools.REPLICAS, ids=lambda row: row.name)
def test_replicas(row: Row, kind: str, mode: str) -> None:
    assert unlike(row, "", kind, mode) == []


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: str, training: bool, deferred: bool) -> None:
    layers = random.channels(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Dropout()))
    options = {"deferred_batch_norm": True} if deferred else {}
    row = Row("", lambda: layers().train(training), random.given, chunks=4, options=options)
    assert unlike(row, "", "graph", checkpoint, ["meta"]) == []


def left(row: Training, pipe: type[Pipe], folder: Path) -> Any:
    """Return the results of a training row with a `Pipe`, which trains with criteria, optimizers and files."""
    folder.mkdir()
    found = row.action(pipe(row, folder))
    return found.found() if isinstance(found, Pipe) else found


@pytest.mark.parametrize("row", TOGETHER, ids=lambda row: row.name)
def test_training(row: Training, engine: str, checkpoint: str, tmp_path: Path) -> None:
    class Piped(Threads):
        def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
            mode = {"always": "always"}.get(options["checkpoint"], checkpoint)
            return piped(layers, balance, **options | {"engine": engine, "checkpoint": mode})

    if refusal := row.refused.get(engine):
        with pytest.raises((RuntimeError, ValueError), match=refusal):
            left(row, Piped, tmp_path / "ours")
        return
    ours = left(row, Piped, tmp_path / "ours")
    if engine == "ranks" and not ours:
        return  # only another rank has the result
    plain = left(row, Layers, tmp_path / "plain")
    assert not any(x is False for x in plain.values()), "the plain layers do not do it either"
    assert differences(ours, plain, row.tolerance) == []
