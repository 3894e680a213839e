"""What the library uses of PyTorch without a promise that it stays. A failure here names what has moved.

This file imports from torchgpipe within tests only, so that it says so even where torchgpipe cannot be imported.
"""

from __future__ import annotations

import ast
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

LIBRARY = Path(__file__).parents[2] / "torchgpipe"

# Name, and where the library uses it.
PRIVATE = [
    ("torch.autograd.Variable._execution_engine", "_autograd.py"),
    ("torch._C._autograd._get_current_graph_task_keep_graph", "_autograd.py"),
    ("torch._C._current_graph_task_id", "_autograd.py"),
    ("torch._C._EnableTorchFunction", "_autograd.py"),
    ("torch._C._functorch.peek_interpreter_stack", "_autograd.py"),
    ("torch._C._is_torch_function_enabled", "_autograd.py"),
    ("torch._C._len_torch_function_stack", "_autograd.py"),
    ("torch._C._nn._parse_to", "gpipe.py"),
    ("torch._foreach_add_", "batchnorm.py"),
    ("torch._foreach_copy_", "batchnorm.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "batchnorm.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "contents.py"),
    ("torch.nn.modules.batchnorm._NormBase", "contents.py"),
    ("torch.utils._python_dispatch._pop_mode", "_autograd.py"),
    ("torch.utils._python_dispatch._push_mode", "_autograd.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "randomness.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/counter.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/live.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/remembered.py"),
]
OF_OBJECTS = [
    ("torch.autograd.Variable._execution_engine", "run_backward"),
    ("torch.autograd.graph", "get_gradient_edge"),
    ("torch.autograd.graph", "GradientEdge"),
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch.nn.utils.parametrize", "_cache_enabled"),
    ("torch.ops.aten.rand.default", "_schema"),
    ("torch.Tensor", "_version"),
    ("torch.UntypedStorage", "_cdata"),
]


def find(name: str, where: str) -> Any:
    __import__("torch.utils._python_dispatch")
    try:
        return reduce(getattr, name.split(".")[1:], torch)
    except AttributeError as error:
        pytest.fail(f"PyTorch {torch.__version__} has no {name} any more, which torchgpipe/{where} uses: {error}")


@pytest.mark.parametrize(("name", "where"), PRIVATE)
def test_still_there(name: str, where: str) -> None:
    find(name, where)


@pytest.mark.parametrize(("owner", "name"), OF_OBJECTS, ids=[name for _, name in OF_OBJECTS])
def test_still_has(owner: str, name: str) -> None:
    find(f"{owner}.{name}", "_autograd.py")


@pytest.mark.parametrize("name", ["_parameters", "_buffers", "_modules", "training"])
def test_a_module_still_keeps(name: str) -> None:
    assert name in vars(torch.nn.Module())


def private_names(source: str) -> set[str]:
    """Return the dotted names of torch, with a part that begins with one underscore, in a module's source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            private = any(p.startswith("_") and not p.startswith("__") for p in parts)
            if parts[0] == "torch" and private and all(map(str.isidentifier, parts)):
                found.add(name)
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def test_no_other_private_name_is_used() -> None:
    used = {
        (name, path.relative_to(LIBRARY).as_posix())
        for path in LIBRARY.rglob("*.py")
        for name in private_names(path.read_text())
    }
    assert used == set(PRIVATE), "list what is new, or keep it behind torchgpipe/_autograd.py"


def test_private_names_are_found() -> None:
    source = "import torch._dynamo\nfrom torch._C import x\nfrom torch import nn\ntorch.nn._a.b(torch.__version__)"
    assert private_names(source) == {"torch._dynamo", "torch._C.x", "torch.nn._a.b"}


@pytest.mark.parametrize("keep", [True, False])
def test_run_backward(keep: bool) -> None:
    from torch.autograd.graph import get_gradient_edge

    from torchgpipe._autograd import run_backward

    w, v = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    w.grad = torch.tensor(100.0)
    edges, grads = [get_gradient_edge(w * v), get_gradient_edge(2 * w)], (torch.tensor(10.0), torch.tensor(1.0))
    run_backward(edges, grads, keep_graph=keep)
    assert v.grad is not None
    assert (w.grad.item(), v.grad.item()) == (100 + 50 + 2, 30)
    if keep:
        run_backward(edges, grads, keep_graph=False)
        assert v.grad.item() == 60
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(edges, grads, keep_graph=False)


class Ask(torch.autograd.Function):
    """Ask, in backward, what kind of backward it is."""

    answers: list[tuple[bool, int]] = []  # noqa: RUF012 (of all)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from torchgpipe._autograd import backward_id, keeps_graph

        Ask.answers.append((keeps_graph(), backward_id()))
        return grads[0]


# How backward is asked for, and whether it keeps the graph.
BACKWARDS: dict[str, tuple[Any, bool]] = {
    "backward": (lambda y, x: y.backward(), False),
    "backward, retain_graph": (lambda y, x: y.backward(retain_graph=True), True),
    "autograd.grad": (lambda y, x: torch.autograd.grad(y, x), False),
    "autograd.grad, retain_graph": (lambda y, x: torch.autograd.grad(y, x, retain_graph=True), True),
}


@pytest.mark.parametrize(("ask", "keeps"), BACKWARDS.values(), ids=BACKWARDS.keys())
def test_what_a_backward_says_of_itself(ask: Any, keeps: bool) -> None:
    Ask.answers.clear()
    x = torch.tensor(1.0, requires_grad=True)
    for _ in range(2):
        ask(Ask.apply(Ask.apply(x)), x)
    assert [keeping for keeping, _ in Ask.answers] == [keeps] * 4
    one, same, other, same_again = [number for _, number in Ask.answers]
    assert 0 <= one == same < other == same_again
