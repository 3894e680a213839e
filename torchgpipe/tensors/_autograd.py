"""The one place that touches what PyTorch does not promise to keep.

`tests/library/tensors/test_autograd_adapter.py` fails, by name, when one of these moves.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
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
"""Return whether this thread is within `saved_tensors_hooks`, as `torch.utils.checkpoint` is."""

let_gradients_go_forward: Callable[[bool], None] = torch._C._set_fwd_grad_enabled
"""Switch forward-mode gradients on or off; they are off in the forward of an `autograd.Function`."""

torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Return whether tensor subclasses see what is called on them; not in the backward of a loss of such a subclass."""

with_torch_function: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction
"""Let tensor subclasses see the functions that are called on them."""

without_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""Let nobody see the functions that are called, neither tensor subclasses nor modes."""

push_mode, pop_mode = _push_mode, _pop_mode
"""Let a mode see the operators of this thread; its own `__enter__` also writes to variables that all threads share."""

_NODES_KEEP_GRAPHS = (*map(int, torch.__version__.split(".")[:2]),) >= (2, 13)
"""Whether the node of a custom `autograd.Function`, held from Python, keeps its graph alive."""


def edge_of(y: Tensor) -> GradientEdge:
    """Return where the gradient of `y` enters the graph, which lives as long as this does.

    The same as `get_gradient_edge`, which takes longer, and needs a view of `y` that sparse tensors do not have.
    """
    node = y.grad_fn
    if node is None or (
        not _NODES_KEEP_GRAPHS and isinstance(node, torch.autograd.function.BackwardCFunction)
    ):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def accumulator_of(leaf: Tensor) -> Any:
    """Return the node that adds to a leaf's gradient. It exists for as long as somebody holds it, or a graph does."""
    return get_gradient_edge(leaf).node


ONLY_WHOLE = {"CheckpointFunctionBackward", "RegisterPostBackwardFunctionBackward"}
"""Nodes that add to gradients by themselves, in a backward for all leaves only: those of a reentrant
`torch.utils.checkpoint`, and of layers that FSDP2 (`fully_shard`) shards."""


def leaves_behind(y: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves that the graph of `y` ends in, and whether it can only go backward for all of them at once."""
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
        if not node.next_functions and hasattr(node, "variable"):
            leaves.append(node.variable)
        unseen.extend([following for following, _ in node.next_functions])
    return leaves, only_whole


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Let no hooks of these leaves (`register_hook`) run within this context."""
    hooked = [(x, x._backward_hooks) for x in leaves if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Return whether a gradient stands for several, as of `torch.autograd.grad(is_grads_batched=True)`."""


def run_backward(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    *,
    keep_graph: bool,
    ends: Sequence[GradientEdge] = (),
) -> None:
    """Accumulate gradients into the leaves behind `roots`; if there are `ends`, run what leads to these, and no more.

    The same as `torch.autograd.backward` without its checks, which cost more than the backward of a small layer.
    """
    edges, given, inputs = tuple(roots), tuple(grads), tuple(ends)
    _engine.run_backward(
        edges, given, keep_graph, False, inputs, allow_unreachable=True, accumulate_grad=True
    )


def saved_by(node: Any, name: str) -> Any:
    """Return what an operator's node has saved under a name; of a tensor, its data without a graph."""
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, Tensor) else value


def reads_saved(node: Any, names: Iterable[str]) -> bool:
    """Return whether the tensors that a node has saved are plain ones, and `saved_tensors_hooks` packed none."""
    saved = [getattr(node, f"_raw_saved_{name}") for name in names]
    data = [x.data for x in saved if x.unpack_hook is None]
    plain = [
        x is None or (type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided) for x in data
    ]
    return len(data) == len(saved) and all(plain)


def hooked_in_the_old_way(modules: Iterable[nn.Module]) -> bool:
    """Return whether some of `modules` have hooks of the deprecated `register_backward_hook`."""
    everywhere = vars(nn.modules.module)
    if (
        everywhere["_global_is_full_backward_hook"] is False
        and everywhere["_global_backward_hooks"]
    ):
        return True
    return any([m._is_full_backward_hook is False and len(m._backward_hooks) for m in modules])


def refuse_transforms(*, forward_mode: bool = True) -> None:
    """Raise `RuntimeError` within `torch.func` transforms, and where forward-mode gradients may be under way.

    Tasks that have graphs or threads of their own would lose them.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp, …) do not reach the tasks of a pipeline; transform the layers "
            "without a pipeline, or use torch.autograd.grad"
        )
    if forward_mode and forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode gradients (torch.autograd.forward_ad) do not reach the tasks of a pipeline; use the layers "
            "without a pipeline for that, or torch.no_grad()"
        )


def sharded(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return those of `modules` whose parameters FSDP2 (`fully_shard`) exchanges by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    return {m for root in modules if isinstance(root, fsdp.FSDPModule) for m in root.modules()}


def averages_gradients(modules: Iterable[nn.Module]) -> bool:
    """Return whether `DistributedDataParallel` or `replicate` averages gradients of some of `modules` by itself."""
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    kinds = (DistributedDataParallel, *([] if replicate is None else [replicate.DDP]))
    return any(isinstance(module, kinds) for module in modules)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` has made this module, or has compiled its call or its forward."""
    return module._compiled_call_impl is not None or hasattr(
        module.forward, "_torchdynamo_orig_callable"
    )


# Each `DistributedDataParallel` that there is, also those that `replicate` makes.
_averaging: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _note_averaging(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _averaging.add(module)


# PyTorch calls it for every submodule that a module gets. Nothing else tells a module that
# `DistributedDataParallel` is around it.
register_module_module_registration_hook(_note_averaging)


def misses_steps(model: nn.Module) -> bool:
    """Return whether `DistributedDataParallel` wraps `model`, so that gradients of a `step` would not be averaged.

    It averages in the backward of what its own forward has returned. `replicate` takes each call of the
    model for such a forward, so it sees a `step`.
    """
    if not _averaging or averages_gradients([model]):
        return False
    own = {*model.parameters()}
    return any(
        ddp.require_backward_grad_sync and not own.isdisjoint(ddp.parameters())
        for ddp in _averaging
    )


def refuse_cached_parametrizations() -> None:
    """Raise `RuntimeError` within `torch.nn.utils.parametrize.cached()`."""
    if parametrize._cache_enabled:
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() keeps a weight for all micro-batches, but each needs a graph of its "
            "own; call the pipeline and backward() outside of it, or under torch.no_grad()"
        )


def within_plain_checkpoint(function: str = "") -> bool:
    """Return whether the caller is a layer within `torch.utils.checkpoint`, or within a function there of that name."""
    file = getattr(sys.modules.get("torch.utils.checkpoint"), "__file__", None)
    frame = sys._getframe() if file is not None else None
    while frame is not None and not (
        frame.f_code.co_filename == file and function in ("", frame.f_code.co_name)
    ):
        frame = frame.f_back
    return frame is not None


Stacks = tuple[list[Any], ...]
"""Modes of one thread that see the functions that it calls, and those that see its operators; the outermost first."""

NO_MODES: Stacks = ([], [])


def mode_stacks() -> Stacks:
    """Return this thread's `TorchFunctionMode`s, such as the default device, and its `TorchDispatchMode`s."""
    n, m = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    if not n + m:
        return NO_MODES
    return [*map(torch._C._get_function_stack_at, range(n))], [
        *map(torch._C._get_dispatch_stack_at, range(m))
    ]


def set_mode_stacks(stacks: Stacks) -> None:
    """Let this thread have these modes. None of them is entered or left, so what they write on that is not written."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for _ in range(torch._C._len_torch_dispatch_stack()):
        pop_mode()
    for push, modes in zip(
        (torch._C._push_on_torch_function_stack, push_mode), stacks, strict=True
    ):
        for mode in modes:
            push(mode)


def is_other_generator(generator: Any) -> bool:
    """Return whether an operator was given a generator, and not the default one, of which it gets another object."""
    return generator is not None and generator._cdata != torch.default_generator._cdata  # type: ignore[attr-defined]


def storage_of(x: Tensor) -> int:
    """Return a number that tensors have in common if and only if they share memory."""
    if x.layout is not torch.strided:
        if x.layout is torch.sparse_coo:
            x = x._values()
        elif x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            x = x.detach().values()
        else:
            return id(x)
    return int(x.untyped_storage()._cdata)
