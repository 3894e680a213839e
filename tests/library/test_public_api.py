"""Test that all public names and signatures of torchgpipe 0.0.7 can still be used."""

import importlib
import inspect
from functools import reduce
from inspect import Parameter
from typing import Any

import pytest
from torch import nn

from torchgpipe.skip import skippable

# The modules that torchgpipe 0.0.7 exports names from.
MODULES = ("torchgpipe.skip", "torchgpipe.balance", "torchgpipe.batchnorm", "torchgpipe")
GPIPE = (
    "module, balance=None, *, devices=None, chunks=1, checkpoint='except_last', "
    "deferred_batch_norm=False"
)
BY_TIME = "partitions, module, sample, *, timeout=1.0, device=…"
BY_SIZE = "partitions, module, input, *, chunks=1, param_scale=2.0, device=…"
BATCH_NORM = "num_features, eps=1e-05, momentum=0.1, affine=True, chunks=1"
# The signatures of torchgpipe 0.0.7; "…" stands for any default.
SIGNATURES = {
    "torchgpipe.GPipe": GPIPE,
    # In 0.0.7, it was `self, input`. Now it also takes the arguments of a traced module.
    "torchgpipe.GPipe.forward": "self, *args, **kwargs",
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
    "torchgpipe.balance.balance_by_time": BY_TIME,
    "torchgpipe.balance.balance_by_size": BY_SIZE,
    "torchgpipe.batchnorm.DeferredBatchNorm": BATCH_NORM,
    "torchgpipe.batchnorm.DeferredBatchNorm.convert_deferred_batch_norm": "module, chunks=1",
}


def find(name: str) -> Any:
    """Import the public object with a full name such as "torchgpipe.skip.pop", and return it."""
    module_name = next(m for m in MODULES if name.startswith(f"{m}."))
    module = importlib.import_module(module_name)
    names = name.removeprefix(f"{module_name}.").split(".")
    assert names[0] in module.__all__
    return reduce(getattr, names, module)


def parameters_of(function: Any) -> list[Parameter]:
    return list(inspect.signature(function).parameters.values())


def parameters(text: str) -> list[Parameter]:
    definition = f"def function({text.replace('=…', '=None')}): ..."
    names: dict[str, Any] = {}
    exec(definition, names)
    return parameters_of(names["function"])


@pytest.mark.parametrize("name, text", SIGNATURES.items(), ids=SIGNATURES)
def test_is_called_as_in_0_0_7(name: str, text: str) -> None:
    new = parameters_of(find(name))
    old = parameters(text)

    assert len(new) >= len(old)
    for ours, theirs in zip(new, old, strict=False):
        assert ours.name == theirs.name
        assert ours.kind == theirs.kind
        if f"{ours.name}=…" in text:
            assert ours.default is not Parameter.empty, ours.name
        else:
            assert ours.default == theirs.default, ours.name
    for added in new[len(old) :]:
        assert added.kind is Parameter.KEYWORD_ONLY
        assert added.default is not Parameter.empty


def test_isolate_is_called_as_in_0_0_7() -> None:
    kind: Any = skippable(stash=["a"])(type("Layer", (nn.Module,), {}))
    found = inspect.getfullargspec(kind().isolate)
    assert found.args == ["self", "ns"]
    assert found.kwonlyargs == ["only"]
