"""`Everywhere`: a pipeline over ranks that looks on each of them as if it were there as a whole.

A test is written for one process, and every rank runs all of it. It passes if it passes on each rank. A rank builds all
layers, but its pipeline holds and runs only those of its own partition. After each forward and each backward, every
rank sends the others its layers' gradients and buffers, and what they wrote down, as well as outputs and errors. So the
test can look at any layer on any rank. On the rank that runs a layer, it looks at that layer itself, and not at a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.layers.names import translate_old_state
from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors._autograd import keeps_graph
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.trace.parts import Slots

from .ranks import Rank, current

WRITTEN_DOWN = ("first", "second")  # by tests/behaviours/parts/draw.py


class Everywhere(nn.Module):
    """A `DistributedGPipe` over the first ranks, one for each device; on ranks that are left over the test ends."""

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
        pipeline = DistributedGPipe(layers, balance, device=devices[rank.index], **options)
        # Past `__setattr__`: the pipeline's layers are this module's own children already.
        self.__dict__.update(
            _rank=rank, rank=rank.index, _pipeline=pipeline, training=pipeline.training
        )
        self._modules.update({**layers._modules, **pipeline._modules})
        self._n, self._placement = len(devices), pipeline.schedule.placement
        owners = [
            rank for rank, count in zip(self._placement, balance, strict=True) for _ in range(count)
        ]
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
        return [*self._modules.values()][k]

    def train(self, mode: bool = True) -> Everywhere:
        super().train(mode)
        self._pipeline.train(mode)
        return self

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        others = nn.Module()
        others.register_load_state_dict_pre_hook(translate_old_state)
        others._modules.update({name: layer for name, layer, here in self._layers() if not here})
        others.load_state_dict(state, strict=False, assign=assign)
        return self._pipeline.load_state_dict(state, strict, assign)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._rank.use(self._pipeline)
        slots = Slots()
        arguments = slots.taken((args, kwargs))
        inputs = [*{id(x): x for x in slots.tensors}.values()]
        given = {id(x): x.detach().requires_grad_(x.requires_grad) for x in inputs}
        args, kwargs = slots.put_back(arguments, [given[id(x)] for x in slots.tensors])
        last = self.rank == self._placement[-1]
        own: Any = None

        def run() -> Any:
            nonlocal own
            own = self._pipeline(*args, **kwargs)
            if last:
                slots = Slots()
                result, own = slots.taken(own), slots.tensors
                return (
                    result,
                    slots.again(),
                    [y.detach() for y in own],
                    [y.requires_grad for y in own],
                )

        result, slots, shown, needs = self.on_all(run)[self._placement[-1]]
        if last:
            shown = [y.detach() for y in own]  # the output's own memory
        if True in needs:
            done = _Done(self, own, [given[id(x)] for x in inputs])
            shown = _Shown.apply(done, needs, shown, TOKEN, *inputs, *done.parameters.values())
        return slots.put_back(result, shown)

    def step(self, criterion: Any, x: Any, target: Any, **options: Any) -> Tensor:
        self._rank.use(self._pipeline)
        first, last = self.rank == self._placement[0], self.rank == self._placement[-1]

        def run() -> Any:
            loss = self._pipeline.step(
                criterion, x if first else None, target if last else None, **options
            )
            return (
                loss,
                getattr(x, "grad", None),
                {name: p.grad for name, p in self._pipeline.named_parameters()},
            )

        found, parameters = self.on_all(run), dict(self.named_parameters())
        for name, grad in [item for _, _, grads in found for item in grads.items()]:
            parameters[name].grad = grad
        if isinstance(x, Tensor):
            x.grad = found[self._placement[0]][1]
        losses = [loss for loss, *_ in found]
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        return losses[self.rank]

    def on_all(self, run: Callable[[], Any]) -> list[Any]:
        """Run something on each rank; return what each returns, or raise what one raises.

        Afterwards other ranks' layers are here as they are there.
        """
        value, error = None, None
        try:
            value = run()
        except BaseException as raised:
            error = raised
        layers = {name: _state(layer) for name, layer, here in self._layers() if here}
        found = self._rank.exchange(self._n, (value, _picklable(error), layers))
        assert all(type(each) is tuple for each in found), (
            "another rank has ended this part of the test"
        )
        mine = {module for _, layer, here in self._layers() if here for module in layer.modules()}
        states = {name: state for _, _, theirs in found for name, state in theirs.items()}
        for name, layer, here in self._layers():
            if not here:
                _show(layer, states[name], mine)
        # An error itself, rather than that another rank has heard of it; this rank's own comes first.
        errors = [e for e in (error, *(theirs for _, theirs, _ in found)) if e is not None]
        for told in sorted(errors, key=lambda e: isinstance(e, RankFailed)):
            raise told
        return [value for value, _, _ in found]

    def _layers(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield names, layers, and whether they are this rank's."""
        for name, layer in self._modules.items():
            assert layer is not None
            yield name, layer, self._owner[name] == self.rank


class _Done:
    """A forward that is done; `own` is what it returned on this rank, and `given` its inputs."""

    def __init__(self, model: Everywhere, own: Any, given: list[Tensor]) -> None:
        self._model, self._own, self._given = model, own, given
        self.parameters = _leaves(model)
        self._here = _leaves(model._pipeline)

    def backward(self, grads: Flat, keep: bool) -> list[Tensor | None]:
        """Run the backward of each rank; return the gradients of the inputs, and of all parameters."""
        # The token, for a rank none of whose parameters takes a gradient.
        wanted = [x for x in (*self._given, *self._here.values(), TOKEN) if x.requires_grad]
        outputs: list[Tensor] = [self._own]
        given: list[Tensor | None] = [None]
        if isinstance(self._own, list):
            kept = [(y, g) for y, g in zip(self._own, grads, strict=True) if g is not None]
            outputs, given = [y for y, _ in kept], [g for _, g in kept]
        options = {
            "retain_graph": keep,
            "create_graph": torch.is_grad_enabled(),
            "allow_unused": True,
        }

        def run() -> Any:
            found = torch.autograd.grad(outputs, wanted, given, **options)
            grad = dict(zip(map(id, wanted), found, strict=True))
            return [grad.get(id(x)) for x in self._given], {
                name: grad.get(id(p)) for name, p in self._here.items()
            }

        found = self._model.on_all(run)
        gradients = {name: grad for _, part in found for name, grad in part.items()}
        pairs = [
            (gradients.get(name), p) for name, p in self.parameters.items()
        ]  # others' layers are on a CPU here
        first = found[self._model._placement[0]][0]
        return [*first, *(g if g is None else g.to(p.device) for g, p in pairs)]


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's gradients may be of: its parameters, and buffers that take some."""
    buffers = {name: x for name, x in model.named_buffers() if x.requires_grad and x.is_leaf}
    return dict(model.named_parameters()) | buffers


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, done: _Done, needs: list[bool], shown: list[Tensor], *_: Tensor) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.done = done
        ctx.mark_non_differentiable(*(y for y, need in zip(shown, needs, strict=True) if not need))
        return tuple(shown)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.done.backward(grads, keeps_graph()))


def _state(layer: nn.Module) -> list[Any]:
    """Return the buffers of each module in a layer, and what it wrote down."""
    return [
        (module._buffers, {name: x for name, x in vars(module).items() if name in WRITTEN_DOWN})
        for module in layer.modules()
    ]


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
                here.detach().copy_(x)  # another module may have it, too


def _picklable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
