"""Stand-ins: detached parameters that tasks use instead of a partition's parameters.

What goes wrong without this guard: the graphs of tasks end in the parameters, so each task adds its
own gradient to `.grad`. If a hook clips the gradient of a parameter, it runs for every task, and
clips each summand instead of the sum. And `torch.autograd.grad` does not work.

With this guard, the layers contain stand-ins (stand_ins.py puts them there), and the gradients of
all tasks are summed in the stand-ins. The caller's graph has a node whose inputs are the
parameters. Its backward runs after all tasks, and returns the sums as the parameters' gradients.

What it costs: when a mini-batch begins, a stand-in is made for each parameter that requires grad.
Each first pass and each recomputation reads the version counter of each parameter. When all
forwards have ended, the stand-ins are compared with the parameters once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType

import torch
from torch import Tensor, nn

from torchgpipe.modules import Swap
from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.tensors._autograd import accumulator_of, at_end, backward_id, sharded

BY_ANOTHER_WAY = (
    "a backward reached a partition's layers by another way than its outputs: a layer keeps a "
    "tensor that has a graph, such as an auxiliary loss, which it should return, or calls "
    "backward() in its forward (torch.autograd.grad works)"
)
READS_GRADIENT = (
    "a layer reads the gradient of its parameter (weight.grad), which has none before all "
    "micro-batches have gone backward; read it between steps, and hand the layer what it needs as "
    "a buffer or an input"
)
_SCRIPTED = (
    "a scripted layer ({}) keeps its parameters and buffers to itself, so that a pipeline cannot "
    "hand on their gradients; use the layer that was scripted, or torch.compile it"
)
_LAZY = "{} has no shape for {!r} before its first input: run the layers once, then train"

_OF_A_LAYER = "_made_by_a_layer"

TOKEN = torch.empty(0, device="cpu", requires_grad=True)
"""A dummy input that requires grad: it makes autograd create a node in any case."""

_TOKENS_NODE = accumulator_of(TOKEN)
"""The node of the dummy input, which many threads use.

In anomaly mode, two threads that create the node at the same time can deadlock. So it is created
here, and kept.
"""


class StandInParameters(Guard):
    """The guard that makes the stand-ins, and adds up the gradients of all tasks in them.

    A stand-in is a detached parameter. If tasks used the parameter itself, each task would add its
    own gradient to `.grad`, and hooks of the parameter would run once for each task. With the
    stand-in, the parameter gets the sum of all tasks' gradients, once.

    A parameter that requires grad has one stand-in, even if it occurs twice in `modules`. A buffer
    that requires grad, such as the output of a hypernetwork, is treated like a parameter.

    A backward calls three methods, in this order:

        begin    before its first task: delete sums that a failed backward has left
        take     after all tasks: return the sums, for the parameters. A backward that computes only
                 gradients of inputs does not call it
        _end     at the very end: check that no more gradients have come. A backward that fails
                 does not call it

    An error is raised if a stand-in has a gradient that did not come from the backward of a task.

    Args:
        index: The index of the partition.
        modules: The modules of the partition.
        outer: The ids of stand-ins that another run has put into the layers, if a layer or a hook
            in that run has called this pipeline. These stand-ins stay in the layers.
        away: The parameters that are on another device, because another partition uses them, too.
            Each is mapped to the device of this partition, where its stand-in is a copy.

    Attributes:
        by_parameter: The stand-in of each parameter that requires grad.
        ids: The ids of these parameters and of their stand-ins.
        needs: For each parameter, whether it requires grad.
        swaps: Replacements in the modules' dictionaries, which put the stand-ins into the modules.
    """

    def __init__(
        self,
        index: int,
        modules: Iterable[nn.Module],
        outer: Set[int] = frozenset(),
        away: Mapping[Tensor, torch.device] = MappingProxyType({}),
    ) -> None:
        self._index = index
        self._away = away
        self.by_parameter: dict[Tensor, Tensor] = {}
        self.swaps: list[Swap] = []
        self._all: list[tuple[str, Tensor]] = []
        # Parameters that require no grad, after the dictionary and the name of each.
        self._frozen: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._modules = list(modules)
        kept = sharded(self._modules)
        # The dictionaries that no layer may change in its forward.
        self._watched: list[Mapping[str, Tensor | None]] = []
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                if len(module._parameters) or len(module._buffers):
                    raise RuntimeError(_SCRIPTED.format(module.original_name))
                continue
            self._replace_buffers(module)
            if module in kept:
                continue
            self._watched.append(module._parameters)
            if module._parameters:
                self._replace_parameters(module, outer)
        self._versions = [p._version for _, p in self._all]
        self._ids = self._ids_watched()
        self.ids = {*map(id, self.by_parameter), *map(id, self.by_parameter.values())}
        self.needs = [p.requires_grad for _, p in self._all]
        self._idle = True  # whether no backward has begun since the last call of `take`
        self._backward = -1  # the number of the latest backward, or -1 before the first one
        self._thread: int | None = None  # the thread in which the backward began, until it ends
        anomaly = torch.is_anomaly_enabled()
        # In anomaly mode, keep the nodes: two threads that create a node at once can deadlock.
        self._nodes = [accumulator_of(x) for x in self.by_parameter.values()] if anomaly else []

    def _replace_buffers(self, module: nn.Module) -> None:
        for name in module._buffers:
            x = module._buffers.get(name)  # not by items(), which a recomputation may refuse
            if x is None or not x.requires_grad or hasattr(x, _OF_A_LAYER):
                continue
            self._all.append((name, x))
            # Not the whole dictionary: a layer may replace other buffers meanwhile, or these.
            self.swaps.append(Swap(module._buffers, name, self._stand_in(x), may_stay=True))

    def _replace_parameters(self, module: nn.Module, outer: Set[int]) -> None:
        replaced: dict[str, Tensor | None] = {**module._parameters}
        for name, p in module._parameters.items():
            if p is None:
                continue
            if nn.parameter.is_lazy(p):
                raise RuntimeError(_LAZY.format(type(module).__name__, name))
            self._all.append((name, p))
            if not p.requires_grad:
                self._frozen.append((replaced, name, p))
                if p in self._away:
                    replaced[name] = p.detach().to(self._away[p])
            elif id(p) not in outer:
                replaced[name] = self._stand_in(p)
        self._watched.append(replaced)
        self.swaps.append(Swap(module.__dict__, "_parameters", replaced))
        if isinstance(module, nn.RNNBase):
            self._replace_list_of_weights(module, replaced)

    def _replace_list_of_weights(
        self, module: nn.RNNBase, replaced: Mapping[str, Tensor | None]
    ) -> None:
        """Replace the weights in the list that an LSTM, GRU or RNN keeps of them.

        If this list had other tensors than the layer's parameters, the layer would make the list
        anew in its forward. On a GPU, it would also copy the weights to other memory.
        """
        names: list[str] = module._flat_weights_names
        if not all(name in replaced for name in names):
            return  # a parametrization computes weights from other parameters
        weights = [replaced[name] for name in names]
        references = [None if w is None else weakref.ref(w) for w in weights]
        self.swaps.append(Swap(module.__dict__, "_flat_weights", weights))
        self.swaps.append(Swap(module.__dict__, "_flat_weight_refs", references))

    def _stand_in(self, p: Tensor) -> Tensor:
        if p not in self.by_parameter:
            self.by_parameter[p] = _detached(p, self._away.get(p))
        return self.by_parameter[p]

    def _ids_watched(self) -> list[int]:
        ids: list[int] = []
        for names in self._watched:
            ids += map(id, names.values())
        return ids

    def after_first_pass(self, task: GuardedTask, outputs: object) -> None:
        """Raise `RuntimeError` if a layer has changed a parameter in place in this forward.

        The recomputation would begin with the changed parameter, and compute other outputs.
        """
        if [p._version for _, p in self._all] != self._versions:
            raise RuntimeError(
                f"parameter {self._changed()!r} of partition {self._index} was changed in place by "
                "a layer in forward, so the recomputation of a checkpointed task would use other "
                "values; do not change it there, or use checkpoint='never'"
            )

    def before_recomputation(self, task: GuardedTask) -> None:
        """Raise `RuntimeError` if a parameter was changed in place since the forward.

        With the changed parameter, the recomputation would compute other outputs.
        """
        if [p._version for _, p in self._all] != self._versions:
            raise RuntimeError(
                f"parameter {self._changed()!r} of partition {self._index} was changed in place "
                "between forward and backward, so the recomputation of a checkpointed task would "
                "use other values; call backward() before the optimizer's step, or use "
                "checkpoint='never'"
            )

    def _changed(self) -> str:
        """Return the name of a parameter that was changed in place since the mini-batch began."""
        for (name, p), version in zip(self._all, self._versions, strict=True):
            if p._version != version:
                return name
        return ""

    def after_all_forwards(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added, frozen or hooked a parameter.

        A pipeline does not support this, because tasks use stand-ins (detached parameters).
        """
        alike = self._ids_watched() == self._ids
        for p, x in self.by_parameter.items():
            alike = alike and x.requires_grad and not x._backward_hooks
            alike = alike and (p in self._away or _address(p) == _address(x))
        if not alike:
            raise RuntimeError(
                f"a layer of partition {self._index} replaced, added, froze or hooked a parameter "
                "in its forward, which a pipeline does not support; change parameters between "
                "steps only"
            )
        self._frozen = [(d, name, p) for d, name, p in self._frozen if not p.requires_grad]
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is None or buffer.grad_fn is None or id(buffer) in self.ids:
                    continue
                # Its graph is only for this mini-batch, so the next one needs no stand-in for it.
                setattr(buffer, _OF_A_LAYER, True)

    def begin(self, backward: int) -> bool:
        """Note that a backward begins; return `False` if this backward has already begun.

        Args:
            backward: The number of the backward. Later backwards have greater numbers.

        Raises:
            RuntimeError: If another backward is in progress, or if the backward has reached the
                layers in another way than through the pipeline's outputs.
        """
        if backward == self._backward:
            return False
        here, idle = threading.get_ident(), self._idle
        if backward < self._backward or not (idle or self._thread in (None, here)):
            raise RuntimeError(
                "two backwards go through one mini-batch at the same time; let the first backward "
                "end before the second one begins"
            )
        left = self.take()
        # If not idle, the last backward has failed, or was for inputs only. Drop its gradients.
        if idle:
            _refuse_any(left)
        self._backward, self._thread, self._idle = backward, here, False
        if backward_id() >= 0:
            at_end(self._end)
        # A parameter that was frozen in the first pass stays frozen in the recomputation.
        thawed: dict[Tensor, Tensor] = {}
        for replaced, name, p in self._frozen:
            if p.requires_grad:
                if p not in thawed:
                    thawed[p] = _detached(p, self._away.get(p)).requires_grad_(False)
                replaced[name] = thawed[p]
        return True

    def _end(self) -> None:
        """Record that the backward has ended; autograd calls this method.

        Raises:
            RuntimeError: If a stand-in (a detached parameter) has received a gradient after `take`.
        """
        self._thread = None
        if self._idle:
            _refuse_any([stand_in.grad for stand_in in self.by_parameter.values()])

    def take(self, *, last: bool = False) -> list[Tensor | None]:
        """Return the sum of each parameter's gradients, and delete the sum from the stand-in.

        A stand-in is a detached parameter with which tasks compute. It adds up their gradients.

        Args:
            last: Whether a gradient that reaches a stand-in after this call raises an error.
        """
        sums = []
        for p, stand_in in self.by_parameter.items():
            total = stand_in.grad
            sums.append(total.to(p.device) if total is not None and p in self._away else total)
            stand_in.grad = None
            if last:
                stand_in.register_hook(lambda grad: _refuse_any([grad]))
        self._idle = True
        return sums


def _refuse_any(grads: list[Tensor | None]) -> None:
    if any(grad is not None for grad in grads):
        raise RuntimeError(BY_ANOTHER_WAY)


def _detached(p: Tensor, device: torch.device | None) -> Tensor:
    """Return a stand-in of a parameter: a detached tensor that layers can use in its place.

    Args:
        p: The parameter, or a buffer that requires grad.
        device: If it is not `None`, the stand-in is a copy on this device. Otherwise, the stand-in
            shares the parameter's memory.
    """
    stand_in = p.detach() if device is None else p.detach().to(device)
    if not isinstance(p, nn.Parameter):
        return stand_in.requires_grad_()
    # Layers may look at the type, and at what users have written on a parameter.
    if type(stand_in) is Tensor and type(p) is not nn.Parameter:
        stand_in = stand_in.as_subclass(type(p)).requires_grad_()
    else:
        stand_in = nn.Parameter(stand_in)
    # What a layer or a hook writes on a parameter is for the parameter.
    stand_in.__dict__ = p.__dict__
    if getattr(p, "grad_dtype", None) != getattr(stand_in, "grad_dtype", None):
        stand_in.grad_dtype = p.grad_dtype
    return stand_in


def _address(x: Tensor) -> int:
    # Other kinds of tensors may have no memory of their own.
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided else 0
