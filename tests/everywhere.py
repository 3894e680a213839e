"""`Everywhere`, a pipeline over ranks that tests use like a pipeline in one process.

Every rank runs the whole test, which is written for one process, and must pass on each rank. Each
rank builds all layers, but its pipeline runs only the layers of its own partition.

After each forward and each backward, the ranks exchange outputs, errors, and the gradients and
buffers of their layers. With these values, each rank updates its copies of the other ranks' layers.
So a test can check any layer on any rank.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.layers.names import translate_old_state
from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors._autograd import keeps_graph
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.trace.parts import Slots

from .ranks import Rank, current

WRITTEN_DOWN = ("first", "second")
"""The attributes in which layers of tests/behaviours/parts/draw.py record their random numbers."""


class Everywhere(nn.Module):
    """A `DistributedGPipe` over as many ranks as there are devices, starting at rank 0.

    If there are more ranks than devices, the constructor ends the test on each further rank.
    """

    _rank: Rank
    rank: int
    _pipeline: DistributedGPipe

    def __init__(
        self,
        layers: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[str],
        *,
        portals: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        assert portals, "skips go straight from rank to rank"
        rank = current()
        rank.join(len(devices))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"rank \d has no parameters")
            pipeline = DistributedGPipe(layers, balance, device=devices[rank.index], **options)
        # Wait until all ranks have built their pipeline. Without this wait, a fast rank could fail
        # in its first forward. Then slower ranks would raise its error here, and never reach the
        # exchange in which the fast rank waits for them.
        dist.barrier()
        # Do not register the pipeline as a submodule. Its layers are submodules already.
        self.__dict__.update(
            _rank=rank, rank=rank.index, _pipeline=pipeline, training=pipeline.training
        )
        self._modules.update({**layers._modules, **pipeline._modules})
        self._n, self._placement = len(devices), pipeline.schedule.placement
        owners: list[int] = []
        for owner, count in zip(self._placement, balance, strict=True):
            owners += [owner] * count
        self._owner = dict(zip(self._modules, owners, strict=True))

    @property
    def schedule(self) -> Any:
        return self._pipeline.schedule

    @property
    def observer(self) -> Any:
        return self._pipeline.observer

    @observer.setter
    def observer(self, observer: Any) -> None:
        self._pipeline.observer = observer

    def __getitem__(self, k: int) -> Any:
        layers = [*self._modules.values()]
        return layers[k]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._pipeline.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> Everywhere:
        super().train(mode)
        self._pipeline.train(mode)
        return self

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        others = nn.Module()
        others.register_load_state_dict_pre_hook(translate_old_state)
        for name, layer, here in self._layers():
            if not here:
                others._modules[name] = layer
        others.load_state_dict(state, strict=False, assign=assign)
        return self._pipeline.load_state_dict(state, strict, assign)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._rank.use(self._pipeline)
        slots = Slots()
        arguments = slots.taken((args, kwargs))
        inputs = [*{id(x): x for x in slots.tensors}.values()]
        copies: dict[int, Tensor] = {}
        for x in inputs:
            copies[id(x)] = x.detach().requires_grad_(x.requires_grad)
        args, kwargs = slots.put_back(arguments, [copies[id(x)] for x in slots.tensors])
        last = self._placement[-1]
        own: Any = None

        def run() -> _Outputs | None:
            nonlocal own
            own = self._pipeline(*args, **kwargs)
            if self.rank != last:
                return None
            slots = Slots()
            result, own = slots.taken(own), slots.tensors
            return _Outputs(result, slots.again(), own)

        outputs: _Outputs = self.on_all(run)[last]
        # On the last rank, use the output itself, with its own memory, and not a copy.
        shown = [y.detach() for y in (own if self.rank == last else outputs.tensors)]
        if True in outputs.needs:
            done = _Done(self, own, [*copies.values()])
            parameters = done.parameters.values()
            shown = _Shown.apply(done, outputs.needs, shown, TOKEN, *inputs, *parameters)
        return outputs.slots.put_back(outputs.result, shown)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which gets the target and the criterion's logs."""
        return self.rank == self._placement[-1]

    @property
    def logs(self) -> list[Any]:
        return self._pipeline.logs

    def _of_this_rank(self, x: Any, target: Any) -> tuple[Any, Any]:
        first = self.rank == self._placement[0]
        return x if first else None, target if self.is_last else None

    def step(self, criterion: Any, x: Any, target: Any, **options: Any) -> Tensor:
        self._rank.use(self._pipeline)
        given = self._of_this_rank(x, target)

        def run() -> Any:
            loss = self._pipeline.step(criterion, *given, **options)
            grads = {name: p.grad for name, p in self._pipeline.named_parameters()}
            return loss, getattr(x, "grad", None), grads

        found = self.on_all(run)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for _, _, grads in found:
            for name, grad in grads.items():
                parameters[name].grad = grad
        if isinstance(x, Tensor):
            _, x.grad, _ = found[self._placement[0]]
        own: Tensor = found[self.rank][0]
        for loss, _, _ in found:
            assert torch.equal(loss, own)
        return own

    def evaluate(self, criterion: Any, x: Any, target: Any, **options: Any) -> Tensor:
        self._rank.use(self._pipeline)
        given = self._of_this_rank(x, target)
        losses = self.on_all(lambda: self._pipeline.evaluate(criterion, *given, **options))
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        own: Tensor = losses[self.rank]
        return own

    def predict(self, x: Any) -> Any:
        self._rank.use(self._pipeline)
        outputs = self.on_all(lambda: self._pipeline.predict(x))
        return outputs[self._placement[-1]]

    def on_all(self, run: Callable[[], Any]) -> list[Any]:
        """Run a function on each rank. Return the results of all ranks, or raise a rank's error.

        Afterwards, each rank's copies of other ranks' layers have the state of the originals.
        """
        value, error = None, None
        try:
            value = run()
        except BaseException as raised:
            error = raised
        mine: dict[str, Any] = {}
        for name, layer, here in self._layers():
            if here:
                mine[name] = _state(layer)
        found = self._rank.exchange(self._n, (value, _picklable(error), mine))
        values: list[Any] = []
        errors: list[BaseException | None] = [error]
        states: dict[str, Any] = {}
        for each in found:
            assert type(each) is tuple, "another rank has ended this part of the test"
            value, theirs, layers = each
            values.append(value)
            errors.append(theirs)
            states |= layers
        self._show_others(states)
        _raise(errors)
        return values

    def _show_others(self, states: dict[str, Any]) -> None:
        """Copy the states of other ranks' layers into this process's copies of these layers."""
        mine: set[nn.Module] = set()
        for _, layer, here in self._layers():
            if here:
                mine.update(layer.modules())
        for name, layer, here in self._layers():
            if not here:
                _show(layer, states[name], mine)

    def _layers(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield the name of each layer, the layer, and whether this rank runs it."""
        for name, layer in self._modules.items():
            assert layer is not None
            yield name, layer, self._owner[name] == self.rank


class _Outputs:
    """The last rank's output: how its tensors are nested, and the tensors without their graph."""

    def __init__(self, result: Any, slots: Slots, tensors: list[Tensor]) -> None:
        self.result, self.slots = result, slots
        self.tensors: list[Tensor] = []
        self.needs: list[bool] = []
        for y in tensors:
            self.tensors.append(y.detach())
            self.needs.append(y.requires_grad)


class _Done:
    """What a backward needs from its forward: the model, this rank's output, and the inputs.

    Attributes:
        parameters: Maps names to the tensors of the whole model that can have gradients.
    """

    def __init__(self, model: Everywhere, own: Any, given: list[Tensor]) -> None:
        self._model, self._own, self._given = model, own, given
        self.parameters = _leaves(model)
        self._here = _leaves(model._pipeline)

    def backward(self, grads: Flat, keep: bool) -> list[Tensor | None]:
        """Run backward on each rank. Return the gradients of the inputs and of all parameters."""
        # `autograd.grad` needs the token on a rank that has no parameters that require grad.
        wanted = [x for x in (*self._given, *self._here.values(), TOKEN) if x.requires_grad]
        outputs: list[Tensor] = [self._own]
        given: list[Tensor | None] = [None]
        if isinstance(self._own, list):
            outputs, given = [], []
            for y, grad in zip(self._own, grads, strict=True):
                if grad is not None:
                    outputs.append(y)
                    given.append(grad)
        create = torch.is_grad_enabled()
        options = {"retain_graph": keep, "create_graph": create, "allow_unused": True}

        def run() -> Any:
            found = torch.autograd.grad(outputs, wanted, given, **options)
            grad_of = dict(zip(map(id, wanted), found, strict=True))
            of_parameters = {}
            for name, p in self._here.items():
                of_parameters[name] = grad_of.get(id(p))
            return [grad_of.get(id(x)) for x in self._given], of_parameters

        found = self._model.on_all(run)
        gradients: dict[str, Tensor | None] = {}
        for _, part in found:
            gradients |= part
        result, _ = found[self._model._placement[0]]
        for name, p in self.parameters.items():
            gradient = gradients.get(name)
            # In this process, copies of other ranks' layers are on the CPU.
            result.append(None if gradient is None else gradient.to(p.device))
        return [*result]


def _raise(errors: list[BaseException | None]) -> None:
    """Raise the error of one of the ranks, if there is any.

    A `RankFailed` only says that another rank has failed. So it is raised only if there is no other
    error.
    """
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailed)):
        if error is not None:
            raise error


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that can have gradients: parameters, and buffers that require grad."""
    buffers = {name: x for name, x in model.named_buffers() if x.requires_grad and x.is_leaf}
    return dict(model.named_parameters()) | buffers


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, done: _Done, needs: list[bool], shown: list[Tensor], *_: Tensor) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.done = done
        without = [y for y, need in zip(shown, needs, strict=True) if not need]
        ctx.mark_non_differentiable(*without)
        return tuple(shown)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.done.backward(grads, keeps_graph()))


def _state(layer: nn.Module) -> list[Any]:
    """Return for each module in a layer a pair: its buffers, and random numbers it has recorded."""
    state = []
    for module in layer.modules():
        written_down = {name: x for name, x in vars(module).items() if name in WRITTEN_DOWN}
        # A scripted module has its buffers in an object that cannot be pickled.
        buffers = dict(module._buffers.items())
        state.append((buffers, written_down))
    return state


def _show(layer: nn.Module, state: list[Any], mine: set[nn.Module]) -> None:
    for module, (buffers, written_down) in zip(layer.modules(), state, strict=True):
        if module in mine:
            continue
        vars(module).update(written_down)
        for name, x in buffers.items():
            here = module._buffers.get(name)
            if x is None or here is None or x.shape != here.shape or here.is_inference():
                module._buffers[name] = x
            else:
                here.detach().copy_(x)  # another module can have this buffer, too


def _picklable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
