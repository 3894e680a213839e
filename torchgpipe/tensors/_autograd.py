"""The functions of this library that use private names of PyTorch, collected in one file.

If a later version of PyTorch renames or removes such a name, the test
`tests/library/tensors/test_autograd_adapter.py` fails and says which name is missing.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import _pop_mode, _push_mode

_engine = torch.autograd.Variable._execution_engine

at_end: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Call a function at the end of the running backward, unless the backward fails."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return whether the running backward keeps its graph (`retain_graph=True`)."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the running backward, or -1; a later backward has a higher number."""

packs_saved_tensors: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the `saved_tensors_hooks` of this thread (a plain checkpoint has some), or `None`."""

let_gradients_go_forward: Callable[[bool], None] = torch._C._set_fwd_grad_enabled
"""Switch forward-mode gradients on or off; they are off in an `autograd.Function`'s forward."""

torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Return whether `__torch_function__` is enabled; a tensor subclass's `backward()` disables it."""

with_torch_function: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction
"""Return a context that enables `__torch_function__` of tensor subclasses."""

without_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""Return a context that disables `__torch_function__` of tensor subclasses and of modes."""

push_mode, pop_mode = _push_mode, _pop_mode
"""Push or pop a mode of this thread. A mode's own `__enter__` also changes shared variables."""

_major, _minor, *_ = torch.__version__.split(".")

_NODES_KEEP_GRAPHS = (int(_major), int(_minor)) >= (2, 13)
"""Whether a Python reference to the node of a custom `autograd.Function` keeps its graph alive."""


def edge_of(y: Tensor) -> GradientEdge:
    """Return the gradient edge of a tensor: the place in the graph at which its backward begins.

    The edge keeps the graph alive. The result is the same as that of PyTorch's `get_gradient_edge`.
    But PyTorch's function takes longer, and it makes a view of the tensor, which sparse tensors do
    not support.
    """
    node = y.grad_fn
    if node is None:
        return get_gradient_edge(y)
    if not _NODES_KEEP_GRAPHS and isinstance(node, torch.autograd.function.BackwardCFunction):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def accumulator_of(leaf: Tensor) -> Any:
    """Return the `AccumulateGrad` node of a leaf: the node that adds gradients to its `.grad`.

    PyTorch deletes the node when no graph and no Python variable refers to it any more.
    """
    return get_gradient_edge(leaf).node


ONLY_WHOLE = {"CheckpointFunctionBackward", "RegisterPostBackwardFunctionBackward"}
"""Names of the nodes of a reentrant `torch.utils.checkpoint`, and of FSDP2 (`fully_shard`).

These nodes accumulate gradients themselves, but only in a backward that goes to all leaves.
"""


is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Return whether a tensor is a batch of gradients, which `is_grads_batched=True` makes."""


def run_backward(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    *,
    keep_graph: bool,
    ends: Sequence[GradientEdge] = (),
) -> None:
    """Run a backward, which adds the gradients of leaves to their `.grad`.

    This function does the work of `torch.autograd.backward`, but without the checks, which would
    take longer than the backward of a small layer.

    Args:
        roots: The edges at which the backward begins.
        grads: For each root, the gradient to begin with.
        keep_graph: Whether to keep the graph for another backward.
        ends: The edges at which the backward ends; if empty, the backward goes to all leaves.
    """
    edges, given, inputs, create_graph = tuple(roots), tuple(grads), tuple(ends), False
    _engine.run_backward(
        edges, given, keep_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


def saved_by(node: Any, name: str) -> Any:
    """Return a value that an autograd node has saved for its backward; a tensor is detached.

    Args:
        node: The node.
        name: The name of the value, such as "weight".
    """
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, Tensor) else value


def reads_saved(node: Any, names: Iterable[str]) -> bool:
    """Return whether all tensors that an autograd node has saved under these names can be read.

    They can be read if they are dense, if their class is `Tensor` or `Parameter`, and if no
    `saved_tensors_hooks` has packed them.
    """
    for name in names:
        saved = getattr(node, f"_raw_saved_{name}")
        if saved.unpack_hook is not None:
            return False
        data = saved.data
        if data is not None:
            plain = type(data) in (Tensor, Parameter)
            if not plain or data.layout is not torch.strided:
                return False
    return True


def hooked_in_the_old_way(modules: Iterable[Module]) -> bool:
    """Return whether a hook of the deprecated `register_backward_hook` runs for any module."""
    everywhere = vars(torch.nn.modules.module)
    full = everywhere["_global_is_full_backward_hook"]
    if full is False and everywhere["_global_backward_hooks"]:
        return True
    for module in modules:
        if module._is_full_backward_hook is False and module._backward_hooks:
            return True
    return False


def refuse_transforms(*, forward_mode: bool = True) -> None:
    """Raise `RuntimeError` if the caller is within a `torch.func` transform or forward-mode AD.

    A pipeline runs each task in a separate graph or thread. Transforms and forward-mode gradients
    do not reach these graphs and threads.

    Args:
        forward_mode: Whether to refuse forward-mode gradients, too.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp, …) do not reach the tasks of a pipeline; "
            "transform the layers without a pipeline, or use torch.autograd.grad"
        )
    if forward_mode and forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode gradients (torch.autograd.forward_ad) do not reach the tasks of a "
            "pipeline; use the layers without a pipeline for that, or torch.no_grad()"
        )


def sharded(modules: Iterable[Module]) -> set[Module]:
    """Return the modules that FSDP2 (`fully_shard`) has sharded, and all modules inside them.

    A pipeline does not replace the parameters of these modules, because FSDP2 exchanges them
    between ranks.
    """
    found: set[Module] = set()
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return found
    for root in modules:
        if isinstance(root, fsdp.FSDPModule):
            found.update(root.modules())
    return found


def averages_gradients(modules: Iterable[Module]) -> bool:
    """Return whether any module is wrapped in `DistributedDataParallel` or marked by `replicate`.

    Both average the gradients of the module's parameters over ranks.
    """
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if replicate is not None:
        kinds = (*kinds, replicate.DDP)
    return any(isinstance(module, kinds) for module in modules)


def is_compiled(module: Module) -> bool:
    """Return whether a module is compiled: its `forward`, or its call by `module.compile()`."""
    return has_compiled_forward(module) or module._compiled_call_impl is not None


def has_compiled_forward(module: Module) -> bool:
    """Return whether a module's `forward` is compiled, as in the result of `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


_averaging: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Every `DistributedDataParallel` of this process, also those that `replicate` makes."""


def _note_averaging(module: Module, name: str, submodule: Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _averaging.add(module)


# PyTorch calls `_note_averaging` each time a module gets a submodule. A pipeline has no other way
# to learn that `DistributedDataParallel` wraps it.
register_module_module_registration_hook(_note_averaging)


def misses_steps(model: Module) -> bool:
    """Return whether `DistributedDataParallel` would fail to average the gradients of `step`.

    If a pipeline is wrapped in `DistributedDataParallel`, gradients are averaged only in a backward
    that follows the wrapper's own `forward`. The pipeline's method `step` does not call this
    `forward`. The result is `False` for a pipeline without wrapper, with `replicate` (which works
    with `step`), and within `no_sync()`, which turns the averaging off.

    Args:
        model: The pipeline.
    """
    if not _averaging or averages_gradients([model]):
        return False
    own = {*model.parameters()}
    for ddp in _averaging:
        if ddp.require_backward_grad_sync and not own.isdisjoint(ddp.parameters()):
            return True
    return False


def refuse_cached_parametrizations() -> None:
    """Raise `RuntimeError` if the caller is within `torch.nn.utils.parametrize.cached()`.

    Micro-batches would share the graphs of cached weights, which the first backward frees.
    """
    if parametrize._cache_enabled:
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() keeps a weight for all micro-batches, but each "
            "micro-batch needs a graph of its own; call the pipeline and backward() outside of "
            "cached(), or under torch.no_grad()"
        )


def within_plain_checkpoint(function: str = "") -> bool:
    """Return whether the current code runs inside of PyTorch's own `torch.utils.checkpoint`.

    Args:
        function: The name of a function in the file of `torch.utils.checkpoint`. If it is given,
            the result is whether the current code runs inside of this function.
    """
    file = getattr(sys.modules.get("torch.utils.checkpoint"), "__file__", None)
    if file is None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and function in ("", code.co_name):
            return True
        frame = frame.f_back
    return False


Stacks = tuple[list[Any], ...]
"""A thread's `TorchFunctionMode`s and its `TorchDispatchMode`s, each from the outermost inward."""

NO_MODES: Stacks = ([], [])


def mode_stacks() -> Stacks:
    """Return this thread's `TorchFunctionMode`s, and its `TorchDispatchMode`s."""
    functions = torch._C._len_torch_function_stack()
    operators = torch._C._len_torch_dispatch_stack()
    if not functions and not operators:
        return NO_MODES
    see_functions = map(torch._C._get_function_stack_at, range(functions))
    see_operators = map(torch._C._get_dispatch_stack_at, range(operators))
    return [*see_functions], [*see_operators]


def set_mode_stacks(stacks: Stacks) -> None:
    """Replace this thread's `TorchFunctionMode`s and `TorchDispatchMode`s by those in `stacks`.

    The methods `__enter__` and `__exit__` of the modes are not called.
    """
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for _ in range(torch._C._len_torch_dispatch_stack()):
        pop_mode()
    see_functions, see_operators = stacks
    for mode in see_functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in see_operators:
        push_mode(mode)


def is_other_generator(generator: Any) -> bool:
    """Return whether an operator's argument `generator` is not the default CPU generator.

    PyTorch hands the default generator to operators as another Python object, so a comparison with
    `is` does not work. `None` stands for the default generator, too.
    """
    if generator is None:
        return False
    default = torch.default_generator._cdata  # type: ignore[attr-defined]
    return bool(generator._cdata != default)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def storage_of(x: Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they have the same storage."""
    layout = x.layout
    if layout is not torch.strided:
        if layout is torch.sparse_coo:
            x = x._values()
        elif layout in _COMPRESSED:
            x = x.detach().values()
        else:
            return id(x)
    return int(x.untyped_storage()._cdata)
