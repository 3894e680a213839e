"""The private API of PyTorch that the library uses. A failure here names what has changed.

This file imports torchgpipe only within tests, so that it works even if torchgpipe cannot be imported.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

LIBRARY = Path(__file__).parents[3] / "torchgpipe"

# The name, and the file that uses it.
PRIVATE = [
    ("torch.autograd.Variable._execution_engine", "tensors/_autograd.py"),
    ("torch._C._autograd._get_current_graph_task_keep_graph", "tensors/_autograd.py"),
    ("torch._C._current_graph_task_id", "tensors/_autograd.py"),
    ("torch._C._EnableTorchFunction", "tensors/_autograd.py"),
    ("torch._C.DisableTorchFunction", "tensors/_autograd.py"),
    ("torch.default_generator._cdata", "tensors/_autograd.py"),
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
    ("torch._subclasses.fake_tensor.FakeTensorMode", "trace/record.py"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "trace/recorder.py"),
    ("torch._subclasses.fake_tensor.unset_fake_temporarily", "trace/recorder.py"),
    ("torch.distributed.distributed_c10d._get_default_store", "distributed/connections.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "task/batchnorm.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "task/guards/statistics.py"),
    ("torch.nn.modules.batchnorm._BatchNorm", "trace/sequential.py"),
    ("torch.utils._device.DeviceContext", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch._pop_mode", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch._push_mode", "tensors/_autograd.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/counter.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/live.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "plan/count/known.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "task/guards/seeded.py"),
]
# Attributes that the library accesses on objects.
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


@pytest.mark.parametrize("name", sorted({*OF_OBJECTS, *(name for name, _ in PRIVATE)}))
def test_still_there(name: str) -> None:
    __import__("torch.utils._python_dispatch")
    __import__("torch._subclasses.fake_tensor")
    owner: Any = torch
    for part in name.split(".")[1:]:
        assert hasattr(owner, part), (
            f"PyTorch {torch.__version__} has no {name} any more, which torchgpipe uses"
        )
        owner = getattr(owner, part)


def private_names(source: str) -> set[str]:
    """Return the private names of torch (with a part that begins with one underscore) in a source text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "torch"
        ):
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
    assert used and used == set(PRIVATE), (
        "list what is new, or keep it behind torchgpipe/tensors/_autograd.py"
    )


def test_what_nodes_of_products_have_saved() -> None:
    x = torch.ones(1, 1, 1, requires_grad=True)
    sizes = "{0}_sym_sizes {0}_sym_strides {1}_sym_sizes {1}_sym_strides".format
    for y, names in (
        (torch.mm(x[0], x[0]), f"self mat2 {sizes('self', 'mat2')}"),
        (torch.addmm(x[0], x[0], x[0]), f"mat1 mat2 alpha beta {sizes('mat1', 'mat2')}"),
        (torch.bmm(x, x), "self mat2"),
        (torch.baddbmm(x, x, x), "batch1 batch2 alpha beta"),
        (
            torch.conv1d(x, x),
            "input weight bias_sym_sizes_opt stride padding dilation transposed output_padding groups",
        ),
    ):
        node: Any = y.grad_fn
        needed = [f"_saved_{name}" for name in names.split()] + [
            f"_raw_saved_{name}" for name in names.split()[:2]
        ]
        missing = [name for name in needed if not hasattr(node, name)]
        assert not missing, (
            f"{type(node).__name__} of PyTorch {torch.__version__} has no {missing} any more"
        )
        assert {"data", "unpack_hook"} <= {*dir(getattr(node, needed[-1]))}
