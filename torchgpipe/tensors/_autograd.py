"""The functions of this library that use private names of PyTorch's autograd.

A later version of PyTorch may rename or remove these names. Then
`tests/library/tensors/test_autograd_adapter.py` fails and says which name is gone.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
"""Call a function at the end of the backward in progress, unless that fails."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return whether the backward in progress was asked to keep its graph (`retain_graph=True`)."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward in progress; a later backward has a higher one."""

packs_saved_tensors: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return whether this thread is within `saved_tensors_hooks`, as it is in a plain checkpoint."""

let_gradients_go_forward: Callable[[bool], None] = torch._C._set_fwd_grad_enabled
"""Switch forward-mode gradients on or off; they are off in an `autograd.Function`'s forward."""

torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Return whether tensor subclasses see what is called on them; not in such a loss's backward."""

with_torch_function: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction
"""Let tensor subclasses see the functions that are called on them."""

without_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""Hide the functions that are called from tensor subclasses and from modes."""

push_mode, pop_mode = _push_mode, _pop_mode
"""Begin or end a mode of this thread; its own `__enter__` writes to what all threads share."""

_major, _minor, *_ = torch.__version__.split(".")

_NODES_KEEP_GRAPHS = (int(_major), int(_minor)) >= (2, 13)
"""Whether the node of a custom `autograd.Function`, held from Python, keeps its graph alive."""


def edge_of(y: Tensor) -> GradientEdge:
    """Return the edge by which the gradient of `y` enters the graph; it keeps the graph alive.

    The result is that of `get_gradient_edge`. But that function takes longer, and it needs a view
    of `y`, which sparse tensors do not have.
    """
    node = y.grad_fn
    if node is None:
        return get_gradient_edge(y)
    if not _NODES_KEEP_GRAPHS and isinstance(node, torch.autograd.function.BackwardCFunction):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def accumulator_of(leaf: Tensor) -> Any:
    """Return the node that accumulates a leaf's gradient.

    The node exists only while a graph or a reference from Python holds it.
    """
    return get_gradient_edge(leaf).node


ONLY_WHOLE = {"CheckpointFunctionBackward", "RegisterPostBackwardFunctionBackward"}
"""Nodes of a reentrant `torch.utils.checkpoint`, and of FSDP2 (`fully_shard`).

They accumulate gradients by themselves, but only in a backward that goes to all leaves.
"""


def leaves_behind(y: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves behind `y`, and whether backward works only for all of them at once."""
    leaves: list[Tensor] = []
    only_whole = False
    unseen = [get_gradient_edge(y).node]
    seen: set[Any] = {None}
    while unseen:
        node: Any = unseen.pop()
        if node in seen:
            continue
        seen.add(node)
        only_whole |= node.name() in ONLY_WHOLE
        edges = node.next_functions
        if not edges and hasattr(node, "variable"):
            leaves.append(node.variable)
        unseen.extend([following for following, _ in edges])
    return leaves, only_whole


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of these leaves (`register_hook`) from running within this context."""
    hooked = [(x, x._backward_hooks) for x in leaves if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Return whether a gradient stands for several, as with `is_grads_batched=True`."""


def run_backward(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    *,
    keep_graph: bool,
    ends: Sequence[GradientEdge] = (),
) -> None:
    """Run a backward, and accumulate gradients into leaves.

    It does the same as `torch.autograd.backward`, but without checks that take longer than the
    backward of a small layer.

    Args:
        roots: The edges at which the backward begins.
        grads: The gradient for each root.
        keep_graph: Whether the graph can be used for another backward.
        ends: The only edges to which the backward goes; if there are none, it goes to all leaves.
    """
    edges, given, inputs, create_graph = tuple(roots), tuple(grads), tuple(ends), False
    _engine.run_backward(
        edges, given, keep_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


def saved_by(node: Any, name: str) -> Any:
    """Return the value that an operator's node has saved under a name; a tensor is detached."""
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, Tensor) else value


def reads_saved(node: Any, names: Iterable[str]) -> bool:
    """Return whether a node has saved only plain, dense tensors under these names.

    A tensor that `saved_tensors_hooks` has packed does not count as plain.
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
    """Return whether any of `modules` has a hook of the deprecated `register_backward_hook`."""
    everywhere = vars(torch.nn.modules.module)
    full = everywhere["_global_is_full_backward_hook"]
    if full is False and everywhere["_global_backward_hooks"]:
        return True
    for module in modules:
        if module._is_full_backward_hook is False and module._backward_hooks:
            return True
    return False


def refuse_transforms(*, forward_mode: bool = True) -> None:
    """Raise `RuntimeError` if the caller is within a transform that tasks would not see.

    Tasks have graphs or threads of their own, which `torch.func` transforms and forward-mode
    gradients do not reach.

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
    """Return the modules among and below `modules` that FSDP2 (`fully_shard`) has sharded.

    FSDP2 exchanges their parameters between ranks by itself.
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
    """Return whether `DistributedDataParallel` or `replicate` averages gradients of `modules`."""
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if replicate is not None:
        kinds = (*kinds, replicate.DDP)
    return any(isinstance(module, kinds) for module in modules)


def is_compiled(module: Module) -> bool:
    """Return whether `torch.compile` has made this module, or has compiled its call or forward."""
    compiled = hasattr(module.forward, "_torchdynamo_orig_callable")
    return compiled or module._compiled_call_impl is not None


_averaging: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Every `DistributedDataParallel` of this process; `replicate` makes them, too."""


def _note_averaging(module: Module, name: str, submodule: Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _averaging.add(module)


# PyTorch calls this function for every submodule that a module gets. There is no other way for a
# module to learn that `DistributedDataParallel` wraps it.
register_module_module_registration_hook(_note_averaging)


def misses_steps(model: Module) -> bool:
    """Return whether `DistributedDataParallel` wraps `model` and would not average a `step`.

    It averages gradients only in the backward of an output of its own forward, which `step` does
    not call. `replicate` does average them, because it takes each call of the model for a forward.
    """
    if not _averaging or averages_gradients([model]):
        return False
    own = {*model.parameters()}
    for ddp in _averaging:
        if ddp.require_backward_grad_sync and not own.isdisjoint(ddp.parameters()):
            return True
    return False


def refuse_cached_parametrizations() -> None:
    """Raise `RuntimeError` within `torch.nn.utils.parametrize.cached()`."""
    if parametrize._cache_enabled:
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() keeps a weight for all micro-batches, but each "
            "micro-batch needs a graph of its own; call the pipeline and backward() outside of it, "
            "or under torch.no_grad()"
        )


def within_plain_checkpoint(function: str = "") -> bool:
    """Return whether the caller is a layer that `torch.utils.checkpoint` runs.

    Args:
        function: The name of a function of that module; with a name, only calls by that function
            count.
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
"""A thread's modes that see functions, and its modes that see operators, each from outside in."""

NO_MODES: Stacks = ([], [])


def mode_stacks() -> Stacks:
    """Return this thread's `TorchFunctionMode`s and its `TorchDispatchMode`s."""
    functions = torch._C._len_torch_function_stack()
    operators = torch._C._len_torch_dispatch_stack()
    if not functions and not operators:
        return NO_MODES
    see_functions = map(torch._C._get_function_stack_at, range(functions))
    see_operators = map(torch._C._get_dispatch_stack_at, range(operators))
    return [*see_functions], [*see_operators]


def set_mode_stacks(stacks: Stacks) -> None:
    """Replace this thread's modes without calling their `__enter__` or `__exit__`."""
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
    """Return whether an operator was given a generator other than the default one.

    The operator gets the default generator as another Python object, so that `is` does not work.
    """
    if generator is None:
        return False
    default = torch.default_generator._cdata  # type: ignore[attr-defined]
    return bool(generator._cdata != default)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def storage_of(x: Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they share memory."""
    layout = x.layout
    if layout is not torch.strided:
        if layout is torch.sparse_coo:
            x = x._values()
        elif layout in _COMPRESSED:
            x = x.detach().values()
        else:
            return id(x)
    return int(x.untyped_storage()._cdata)
