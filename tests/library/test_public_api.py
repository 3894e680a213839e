"""The public API: torchgpipe 0.0.7's names and signatures. That all has docstrings, ruff finds (ruff.toml)."""

import importlib
import inspect
from functools import reduce
from inspect import Parameter
from typing import Any

import pytest
from torch import nn

from torchgpipe.skip import skippable

# The names that torchgpipe 0.0.7 exports.
MODULES = ("torchgpipe.skip", "torchgpipe.balance", "torchgpipe.batchnorm", "torchgpipe")
# The signatures of 0.0.7; "…" stands for any default.
SIGNATURES = {
    "torchgpipe.GPipe": "module, balance=None, *, devices=None, chunks=1, checkpoint='except_last', "
    "deferred_batch_norm=False",
    "torchgpipe.GPipe.forward": "self, input",
    "torchgpipe.GPipe.cuda": "self, device=None",
    "torchgpipe.GPipe.cpu": "self",
    "torchgpipe.GPipe.to": "self, *args, **kwargs",
    "torchgpipe.GPipe.__len__": "self",
    "torchgpipe.GPipe.__getitem__": "self, index",
    "torchgpipe.GPipe.__iter__": "self",
    "torchgpipe.is_checkpointing": "",
    "torchgpipe.is_recomputing": "",
    "torchgpipe.skip.skippable": "stash=(), pop=()",
    "torchgpipe.skip.stash": "name, tensor",
    "torchgpipe.skip.pop": "name",
    "torchgpipe.skip.Namespace": "",
    "torchgpipe.skip.verify_skippables": "module",
    "torchgpipe.balance.balance_by_time": "partitions, module, sample, *, timeout=1.0, device=…",
    "torchgpipe.balance.balance_by_size": "partitions, module, input, *, chunks=1, param_scale=2.0, device=…",
    "torchgpipe.batchnorm.DeferredBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, chunks=1",
    "torchgpipe.batchnorm.DeferredBatchNorm.convert_deferred_batch_norm": "module, chunks=1",
}


def find(name: str) -> Any:
    """Return an exported object of a module, or a method of it."""
    module = next(m for m in MODULES if name.startswith(f"{m}."))
    names, where = name.removeprefix(f"{module}.").split("."), importlib.import_module(module)
    assert names[0] in where.__all__
    return reduce(getattr, names, where)


def parameters(text: str) -> list[Parameter]:
    names: dict[str, Any] = {}
    exec(f"def function({text.replace('=…', '=None')}): ...", names)
    return list(inspect.signature(names["function"]).parameters.values())


@pytest.mark.parametrize("name, text", SIGNATURES.items(), ids=SIGNATURES)
def test_is_called_as_in_0_0_7(name: str, text: str) -> None:
    new = list(inspect.signature(find(name)).parameters.values())
    old = parameters(text)

    assert [(p.name, p.kind) for p in new[: len(old)]] == [(p.name, p.kind) for p in old]
    for ours, theirs in zip(new, old, strict=False):
        free = f"{ours.name}=…" in text
        assert ours.default is not Parameter.empty if free else ours.default == theirs.default, (
            ours.name
        )
    # New parameters must be keyword-only and have defaults.
    assert all(
        p.kind is Parameter.KEYWORD_ONLY and p.default is not Parameter.empty
        for p in new[len(old) :]
    )


def test_isolate_is_called_as_in_0_0_7() -> None:
    layer: Any = skippable(stash=["a"])(type("Layer", (nn.Module,), {}))
    found = inspect.getfullargspec(layer().isolate)
    assert (found.args, found.kwonlyargs) == (["self", "ns"], ["only"])
