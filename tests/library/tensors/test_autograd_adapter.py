"""Test that PyTorch still has the private names that the library uses.

If a name is missing, the error says which. Each test imports torchgpipe itself, so that the other
tests run even if torchgpipe cannot be imported.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

LIBRARY = Path(__file__).parents[3] / "torchgpipe"

# A private name, and the file of the library that uses it.
PRIVATE = [
    ("torch.autograd.Variable._execution_engine", "tensors/_autograd.py"),
    ("torch._C._autograd._get_current_graph_task_keep_graph", "tensors/_autograd.py"),
    ("torch._C._current_graph_task_id", "tensors/_autograd.py"),
    ("torch._C._EnableTorchFunction", "tensors/_autograd.py"),
    ("torch._C.DisableTorchFunction", "tensors/_autograd.py"),
    ("torch.default_generator._cdata", "tensors/_autograd.py"),
    ("torch._C._autograd._get_sequence_nr", "tensors/leaves.py"),
    ("torch._C._functorch.is_legacy_batchedtensor", "tensors/_autograd.py"),
    ("torch._C._functorch.peek_interpreter_stack", "tensors/_autograd.py"),
    ("torch._ops.HigherOrderOperator", "tensors/_autograd.py"),
    ("torch._C._autograd._top_saved_tensors_default_hooks", "tensors/_autograd.py"),
    ("torch._C._is_torch_function_enabled", "tensors/_autograd.py"),
    ("torch._C._set_fwd_grad_enabled", "tensors/_autograd.py"),
    ("torch._C._get_dispatch_stack_at", "tensors/_autograd.py"),
    ("torch._C._get_function_stack_at", "tensors/_autograd.py"),
    ("torch._C._len_torch_dispatch_stack", "tensors/_autograd.py"),
    ("torch._C._len_torch_function_stack", "tensors/_autograd.py"),
    ("torch._C._pop_torch_function_stack", "tensors/_autograd.py"),
    ("torch._C._push_on_torch_function_stack", "tensors/_autograd.py"),
    ("torch._C._nn._parse_to", "layers/devices.py"),
    ("torch._foreach_add_", "task/batchnorm.py"),
    ("torch._foreach_copy_", "task/batchnorm.py"),
    ("torch._subclasses.fake_tensor.DataDependentOutputException", "trace/record.py"),
    ("torch._subclasses.fake_tensor.DynamicOutputShapeException", "trace/record.py"),
    ("torch._subclasses.fake_tensor.FakeTensor", "trace/recorder.py"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "trace/recorder.py"),
    ("torch._subclasses.fake_tensor.unset_fake_temporarily", "trace/restore.py"),
    ("torch.distributed.distributed_c10d._get_default_store", "distributed/connections.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "engine/arrangement.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "task/batchnorm.py"),
    ("torch.nn.modules.batchnorm._NormBase", "engine/arrangement.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "trace/compare.py"),
    ("torch.utils._device.DeviceContext", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch._pop_mode", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch._push_mode", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/counter.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/live.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/known.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "random/seeded.py"),
    ("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "state/saved_files.py"),
]
# Attributes of PyTorch's objects that the library uses.
OF_OBJECTS = [
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch.autograd.graph.get_gradient_edge",
    "torch.autograd.graph.GradientEdge",
    "torch.autograd.forward_ad._current_level",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.ops.aten.rand.default._schema",
    "torch.Tensor._version",
    "torch.random.default_generator",
    "torch.UntypedStorage._cdata",
]
NAMES = {*OF_OBJECTS}
for _name, _ in PRIVATE:
    NAMES.add(_name)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_still_there(name: str) -> None:
    __import__("torch.utils._python_dispatch")
    __import__("torch._subclasses.fake_tensor")
    missing = f"PyTorch {torch.__version__} has no {name} any more, which torchgpipe uses"
    owner: Any = torch
    for part in name.split(".")[1:]:
        assert hasattr(owner, part), missing
        owner = getattr(owner, part)


def names_in(node: ast.AST) -> list[str]:
    """Return the full names, with dots, that an import statement or an attribute refers to."""
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)]
    return []


def is_private(name: str) -> bool:
    """Return whether a name is a private name of torch, such as `torch._C._nn`.

    A name is private if one of its parts begins with exactly one underscore.
    """
    parts = name.split(".")
    if parts[0] != "torch" or not all(map(str.isidentifier, parts)):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_names(source: str) -> set[str]:
    """Return the private names of torch that a source text uses.

    If both `torch._C` and `torch._C._nn` are found, only the longer name is returned.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for name in names_in(node):
            if is_private(name):
                found.add(name)
    longest = set(found)
    for name in found:
        for other in found:
            if name.startswith(other + "."):
                longest.discard(other)
    return longest


def test_no_other_private_name_is_used() -> None:
    used = set()
    for path in LIBRARY.rglob("*.py"):
        file = path.relative_to(LIBRARY).as_posix()
        for name in private_names(path.read_text()):
            used.add((name, file))
    assert used
    advice = "list what is new, or keep it behind torchgpipe/tensors/_autograd.py"
    assert used == set(PRIVATE), advice


def test_what_nodes_of_products_have_saved() -> None:
    x = torch.ones(1, 1, 1, requires_grad=True)
    matrix = x[0]
    sizes = "{0}_sym_sizes {0}_sym_strides {1}_sym_sizes {1}_sym_strides".format
    of_mm = f"self mat2 {sizes('self', 'mat2')}"
    of_addmm = f"mat1 mat2 alpha beta {sizes('mat1', 'mat2')}"
    of_conv = (
        "input weight bias_sym_sizes_opt stride padding dilation transposed output_padding groups"
    )
    for y, saved in (
        (torch.mm(matrix, matrix), of_mm),
        (torch.addmm(matrix, matrix, matrix), of_addmm),
        (torch.bmm(x, x), "self mat2"),
        (torch.baddbmm(x, x, x), "batch1 batch2 alpha beta"),
        (torch.conv1d(x, x), of_conv),
    ):
        node: Any = y.grad_fn
        names = saved.split()
        missing = set()
        for name in names:
            if not hasattr(node, f"_saved_{name}"):
                missing.add(f"_saved_{name}")
        for name in names[:2]:
            raw = getattr(node, f"_raw_saved_{name}", None)
            if not {"data", "unpack_hook"} <= {*dir(raw)}:
                missing.add(f"_raw_saved_{name}")
        kind = type(node).__name__
        assert not missing, f"{kind} of PyTorch {torch.__version__} has no {missing} any more"
