"""The public API is that of torchgpipe 0.0.7, and every public name is documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm

MODULES = [
    "torchgpipe",
    *(m.name for m in pkgutil.walk_packages(torchgpipe.__path__, "torchgpipe.") if "._" not in m.name),
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torchgpipe", ["GPipe", "is_checkpointing", "is_recomputing", "__version__"]),
        ("torchgpipe.skip", ["skippable", "stash", "pop", "Namespace", "verify_skippables"]),
        ("torchgpipe.balance", ["balance_by_time", "balance_by_size"]),
        ("torchgpipe.batchnorm", ["DeferredBatchNorm"]),
    ],
)
def test_names(module: str, names: list[str]) -> None:
    assert set(names) <= set(importlib.import_module(module).__all__)


def parameters(function: Any) -> dict[str, tuple[str, Any]]:
    return {p.name: (p.kind.name, p.default) for p in inspect.signature(function).parameters.values()}


REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            GPipe,
            [
                ("module", "POSITIONAL_OR_KEYWORD", REQUIRED),
                ("balance", "POSITIONAL_OR_KEYWORD", None),
                ("devices", "KEYWORD_ONLY", None),
                ("chunks", "KEYWORD_ONLY", 1),
                ("checkpoint", "KEYWORD_ONLY", "except_last"),
                ("deferred_batch_norm", "KEYWORD_ONLY", False),
            ],
        ),
        (torchgpipe.skip.skippable, [("stash", "POSITIONAL_OR_KEYWORD", ()), ("pop", "POSITIONAL_OR_KEYWORD", ())]),
        (DeferredBatchNorm.convert_deferred_batch_norm, [
            ("module", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("chunks", "POSITIONAL_OR_KEYWORD", 1),
        ]),
        (torchgpipe.balance.balance_by_time, [
            ("partitions", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("module", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("sample", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("timeout", "KEYWORD_ONLY", 1.0),
        ]),
        (torchgpipe.balance.balance_by_size, [
            ("partitions", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("module", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("input", "POSITIONAL_OR_KEYWORD", REQUIRED),
            ("chunks", "KEYWORD_ONLY", 1),
            ("param_scale", "KEYWORD_ONLY", 2.0),
        ]),
    ],
    ids=["GPipe", "skippable", "convert_deferred_batch_norm", "balance_by_time", "balance_by_size"],
)  # fmt: skip
def test_signatures(function: Any, expected: list[tuple[str, str, Any]]) -> None:
    found = parameters(function)
    assert {name: found.get(name) for name, *_ in expected} == {name: tuple(rest) for name, *rest in expected}
    positional = [name for name, (kind, _) in found.items() if kind == "POSITIONAL_OR_KEYWORD"]
    assert positional == [name for name, kind, _ in expected if kind == "POSITIONAL_OR_KEYWORD"]


@pytest.mark.parametrize("name", MODULES)
def test_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    missing = []
    for public in getattr(module, "__all__", []):
        value = getattr(module, public)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not (value.__doc__ or "").strip():
            missing.append(public)
        if inspect.isclass(value):
            missing += [
                f"{public}.{attribute}"
                for attribute, member in vars(value).items()
                if not attribute.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
                and not (inspect.getdoc(getattr(value, attribute)) or "").strip()
            ]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_exports_are_declared(name: str) -> None:
    module = importlib.import_module(name)
    if name != "torchgpipe.__version__":
        assert all(hasattr(module, public) for public in module.__all__)
