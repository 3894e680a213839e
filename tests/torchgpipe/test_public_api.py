"""The public API: torchgpipe 0.0.7's names and signatures, and a docstring for everything that is public."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.skip import skippable

# What torchgpipe 0.0.7 exports.
NAMES = {
    "torchgpipe": {"GPipe", "is_checkpointing", "is_recomputing"},
    "torchgpipe.skip": {"skippable", "stash", "pop", "Namespace", "verify_skippables"},
    "torchgpipe.balance": {"balance_by_time", "balance_by_size"},
    "torchgpipe.batchnorm": {"DeferredBatchNorm"},
}
# How it is called; a default "…" is free.
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
    value: Any = torchgpipe
    path = "torchgpipe"
    for attribute in name.split(".")[1:]:
        path += f".{attribute}"
        if not hasattr(value, attribute):
            importlib.import_module(path)
        value = getattr(value, attribute)
    return value


def parameters(text: str) -> list[Parameter]:
    names: dict[str, Any] = {}
    exec(f"def function({text.replace('=…', '=None')}): ...", names)
    return list(inspect.signature(names["function"]).parameters.values())


@pytest.mark.parametrize(("module", "names"), NAMES.items(), ids=NAMES.keys())
def test_names_of_0_0_7(module: str, names: set[str]) -> None:
    assert names <= set(find(module).__all__)


@pytest.mark.parametrize(("name", "text"), SIGNATURES.items(), ids=SIGNATURES.keys())
def test_is_called_as_in_0_0_7(name: str, text: str) -> None:
    new = list(inspect.signature(find(name)).parameters.values())
    old = parameters(text)

    assert [(p.name, p.kind) for p in new[: len(old)]] == [(p.name, p.kind) for p in old]
    for ours, theirs in zip(new, old, strict=False):
        if f"{ours.name}=…" in text:
            assert ours.default is not Parameter.empty
        else:
            assert ours.default == theirs.default, ours.name
    # What is new can be left out, and is given by name.
    for added in new[len(old) :]:
        assert added.kind is Parameter.KEYWORD_ONLY
        assert added.default is not Parameter.empty


def test_isolate_is_called_as_in_0_0_7() -> None:
    @skippable(stash=["a"])
    class Layer(nn.Module):
        pass

    found = inspect.signature(Layer().isolate).parameters.values()
    assert [(p.name, p.kind) for p in found] == [
        ("ns", Parameter.POSITIONAL_OR_KEYWORD),
        ("only", Parameter.KEYWORD_ONLY),
    ]


def test_what_a_pipeline_has() -> None:
    model = GPipe(nn.Sequential(nn.ReLU()), [1], devices=["cpu"])
    assert isinstance(model, nn.Module)
    for name in ("balance", "devices", "chunks", "checkpoint", "partitions"):
        assert hasattr(model, name)


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|a|b|rc)\d+)?", torchgpipe.__version__)


def modules() -> Iterator[ModuleType]:
    yield torchgpipe
    for found in pkgutil.walk_packages(torchgpipe.__path__, "torchgpipe."):
        yield importlib.import_module(found.name)


MODULES = {module.__name__: module for module in modules() if not module.__name__.endswith("__version__")}


def names_of(module: ModuleType) -> list[str]:
    """Return what a module offers: its `__all__`, or else the functions and classes that it defines."""
    own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", None) == module.__name__]
    names: list[str] = getattr(module, "__all__", own)
    return names


def public() -> Iterator[tuple[str, Any]]:
    """Yield what is public, and of classes among it the methods and properties."""
    for module in MODULES.values():
        for name in names_of(module):
            value = getattr(module, name)
            if getattr(value, "__module__", None) != module.__name__:
                continue
            yield f"{module.__name__}.{name}", value
            # What a protocol asks for is said by its own docstring.
            described = inspect.isclass(value) and not getattr(value, "_is_protocol", False)
            for attribute, member in vars(value).items() if described else ():
                function = getattr(member, "__func__", member)
                if not attribute.startswith("_") and (inspect.isfunction(function) or isinstance(member, property)):
                    yield f"{module.__name__}.{name}.{attribute}", function


PUBLIC = {name: value for name, value in public() if callable(value) or isinstance(value, property)}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_modules_say_what_they_are_for_and_what_they_offer(module: ModuleType) -> None:
    assert module.__doc__
    assert module.__doc__.split("\n")[0].endswith((".", ":"))
    names = names_of(module)
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    "name", ["gpipe.GPipe.to", "gpipe.GPipe.partitions", "batchnorm.DeferredBatchNorm.convert_deferred_batch_norm"]
)
def test_public_names_are_found(name: str) -> None:
    assert f"torchgpipe.{name}" in PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    value = PUBLIC[name]
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc, f"{name} has no docstring"
    assert doc.strip().split("\n\n")[0].rstrip().endswith((".", ":")), f"{name}: begin with one sentence"
    assert not doc.startswith(f"{name.rpartition('.')[2]}("), f"{name}: made by a decorator, not written"


TYPED: list[Callable[..., Any]] = [value for value in PUBLIC.values() if inspect.isfunction(value)]


@pytest.mark.parametrize("function", TYPED, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_public_function_is_typed(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    assert [p.name for p in given if p.annotation is Parameter.empty] == []
    assert signature.return_annotation is not inspect.Signature.empty
