"""docs/works-with.md: the code of each row does with a pipeline what it does with the plain layers, or is refused."""

import concurrent.futures
import functools
import gc
import linecache
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchgpipe import GPipe

from ..behaviours.compare import REORDERED, differences, found
from ..plain import Plain
from ..ranks import current
from .given import Block, Checkpointed, LoRA, train
from .page import ENGINES, MODES, PAGE, Row, read, render

ROOT = Path(__file__).parents[2]
PATIENCE = 400  # seconds; only a hang takes as long
ROWS = read(PAGE.read_text(encoding="utf-8"))
ALONE = [row for row in ROWS if not row.ranks]
TOGETHER = [row for row in ROWS if row.ranks]

pytestmark = [
    # Raised within torch.compile, of the plain layers, too.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Of a reentrant checkpoint in a first pass, which takes no gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    # Of torch.distributed.checkpoint: one process is what is meant here.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # From Python 3.12: the forked process is what the row is about.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def names(kind: Any, rank: int = 0, **more: Any) -> dict[str, Any]:
    """Return what the code may use by name; `kind` is called `GPipe` there."""
    compiled: list[nn.Module] = []

    def backend(graph: nn.Module, inputs: object) -> nn.Module:
        compiled.append(graph)
        return graph

    torch.manual_seed(0)
    layers, other_layers = (nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3)) for _ in range(2))
    # Ten samples in four chunks: the last micro-batch is smaller.
    batches = [(torch.randn(10, 6), torch.randn(10, 3)) for _ in range(6)]
    return more | {
        "torch": torch, "nn": nn, "GPipe": kind,
        "Block": Block, "LoRA": LoRA, "Checkpointed": Checkpointed, "train": train,
        "layers": layers, "other_layers": other_layers,
        "balance": [2, 2], "devices": ["cpu", "cpu"], "batches": batches[3 * rank :][:3],
        "backend": backend, "compiled": compiled,
    }  # fmt: skip


def left_by(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run `code` and return the tensors and numbers that it leaves behind, by name."""
    before = set(names)
    # So that an error shows the line.
    file = f"<code {len(linecache.cache)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    exec(compile(code, file, "exec"), names)
    left = found({key: names[key] for key in names.keys() - before})
    return {name: x.detach().as_subclass(Tensor).clone() if isinstance(x, Tensor) else x for name, x in left}


@pytest.fixture(scope="module")
def pool() -> Iterator[concurrent.futures.Executor]:
    """A spawned process, which finds what is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        context = torch.multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            yield pool


@pytest.fixture(scope="module")
def left(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Row, Any], Any]]:
    """Run a row's code; of all models that it made, and their threads, none is there in the end."""
    models: list[weakref.ref[nn.Module]] = []
    before = {*threading.enumerate()}  # a test that failed elsewhere keeps its pipeline

    def left(row: Row, kind: Any) -> dict[str, Any]:
        def made(*args: Any, **options: Any) -> nn.Module:
            model: nn.Module = kind(*args, **options)
            models.append(weakref.ref(model))
            return model

        torch.compiler.reset()
        used = names(made, pool=pool, folder=tmp_path_factory.mktemp("saved"))
        try:
            # Where workers compile a layer at once, how often is left to chance; that it ends is what `holds` asks.
            with torch._dynamo.config.patch(recompile_limit=64):
                all_of_it = left_by(row.code, used)
                assert kind is Plain or eval(row.holds, used), row.holds
                return all_of_it
        finally:
            used.clear()  # hooks of parameters may hold them, which Python's garbage collector cannot see

    yield functools.cache(left)
    torch.compiler.reset()
    gc.collect()
    assert not any(model() is not None for model in models)
    for thread in {*threading.enumerate()} - before:
        if thread.name.startswith("gpipe-partition"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} outlives its pipeline"


def assert_answer(row: Row, engine: Any, mode: Any, left: Callable[[Row, Any], Any]) -> None:
    """Assert that the row's code leaves the same as with the plain layers, or that it is refused as the page says."""
    pipeline = functools.partial(GPipe, engine=engine, checkpoint=mode)  # called `GPipe` in the code
    refusal = row.refusal(engine, mode)
    if refusal is not None:
        with pytest.raises((RuntimeError, TypeError), match=re.escape(refusal)):
            left(row, pipeline)
    else:
        plain = left(row, Plain)
        assert len(plain) > 1, "there is nothing to compare"
        assert differences(left(row, pipeline), plain, REORDERED if row.rounded else 0.0) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", ALONE, ids=lambda row: row.name)
def test_in_one_process(row: Row, engine: str, mode: str, left: Any) -> None:
    if '"fork"' in row.code and not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    assert_answer(row, engine, mode, left)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", TOGETHER, ids=lambda row: row.name)
def test_on_several_ranks(row: Row, engine: str, mode: str) -> None:
    def left(row: Row, kind: Any) -> dict[str, Any]:
        return left_by(row.code, names(kind, current().index, mesh=init_device_mesh("cpu", (2,))))

    assert_answer(row, engine, mode, left)


def test_the_table_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "write it anew: python -m tests.works_with.page"
