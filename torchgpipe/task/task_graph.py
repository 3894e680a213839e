"""The graph of one task: its piece of the autograd graph, cut off from the rest at both ends.

    inputs ─▶ entrance ─▶ layers ─▶ edges of the outputs
                            ▲
    stand-ins for the parameters

Backward through it starts at the edges, with the outputs' gradients. It ends at the entrance, where the inputs'
gradients are taken off, and at the stand-ins, where the parameters' gradients add up over all tasks of a mini-batch.
Between forward and backward, inputs and outputs are kept only if a layer has saved them for its backward.

A checkpointed task keeps its inputs instead, and builds its graph only in the recomputation (GPipe paper, section 2.3).
That is a step of its own, so that it can start before the gradient arrives (torchgpipe paper, section 3.2.3).

A first pass without a graph does not say which outputs take a gradient. So the first task of a kind makes a graph, and
drops it. If all outputs that can take a gradient do, later tasks of that kind claim it; if not, each of them finds out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from torchgpipe.task.ambient import WITHOUT_FAST_ATTENTION, Ambient
from torchgpipe.task.parameters import BY_ANOTHER_WAY, READS_GRADIENT, TOKEN
from torchgpipe.task.randomness import Randomness
from torchgpipe.task.snapshot import Held, LayerSnapshot
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import edge_of, packs_saved_tensors, run_backward
from torchgpipe.tensors.checkpoint import Passing
from torchgpipe.tensors.item import Shared, versions
from torchgpipe.tensors.microbatch import Flat, Form, carrying
from torchgpipe.tensors.observe import NOTHING, Kind, Observer, observed


@dataclass(slots=True, eq=False)
class TaskGraph:
    """Forward, recomputation and backward of micro-batch `i` on `stage`, whose layers hold `snapshot`."""

    stage: Stage
    snapshot: LayerSnapshot
    ambient: Ambient
    randomness: Randomness
    i: int
    observer: Observer | None
    checkpoint: bool
    _needs: tuple[bool, ...] = ()  # which inputs take a gradient
    _claimed: list[bool] = field(default_factory=list)  # which outputs
    _kept: tuple[Flat, Form] | None = None
    _versions: list[int | None] = field(default_factory=list)
    _shown: Flat = ()  # what the first pass has computed, if a mode may have changed that
    _held: Held = field(init=False)
    _edges: list[GradientEdge | None] | None = None
    # A list of its own: the entrance node holds it. If the node held this object, both would keep each other alive.
    _input_grads: list[Tensor | None] = field(default_factory=list)
    _later: Callable[[], None] | None = None  # the second half of a backward, after the first

    def forward(self, inputs: Flat, form: Form, shared: Shared) -> tuple[Flat, Form]:
        """Run the layers; return outputs that have no graph. By `requires_grad` they say which take a gradient."""
        self._needs = tuple([x is not None and x.requires_grad for x in inputs])
        self.checkpoint = self.checkpoint and (True in self._needs or bool(self.snapshot.stand_ins.by_parameter))
        with observed(self.observer, "forward", self.i, self.stage.index):
            if self.checkpoint:
                return self._first_pass(inputs, form, shared)
            with torch.enable_grad(), self.randomness.first(), self.snapshot.lock:
                outputs, form = self._build(self._entered(inputs), form, shared)
        return leaves(outputs, self._taken()), form

    def recompute(self, *, keep: bool = False) -> None:
        """Build the graph of a checkpointed task by running its layers a second time, unless it is there.

        Without `keep` it is the last time, and inputs are let go of that the layers have not saved. Raise
        `RuntimeError` if the layers would not meet what they met in the first pass.
        """
        if self._kept is not None and self._edges is None:
            with observed(self.observer, "recompute", self.i, self.stage.index):
                # A copy, as other threads may recompute at the same time.
                self.ambient.context.copy().run(self._recompute, *self._kept, keep)

    def _recompute(self, inputs: Flat, form: Form, keep: bool) -> None:
        if versions(inputs) != self._versions:
            raise RuntimeError(
                f"an input of partition {self.stage.index} was changed in place after its forward, so a recomputation "
                "would start from other values; do not change inputs before backward(), and make a layer that does "
                "so out-of-place (inplace=False), or use checkpoint='never'"
            )
        with (
            self.snapshot.lock,
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING,
            torch.enable_grad(),
            self.ambient.again(),
            Passing(recomputing=True),
            self.snapshot.second_pass(self._held),
            self.randomness.again(),
        ):
            outputs, _ = self._build(self._entered(self._spared(inputs, form)), form)
        if self._shown:
            self.ambient.check_same(self.stage.index, self._shown, outputs)
        if self._claimed != self._taken():
            self.snapshot.claims[self._needs] = False  # a layer does otherwise than when its kind was found out
        if not keep:
            self._kept = None

    def check_unspent(self) -> None:
        """Raise `RuntimeError` if a backward has freed the graph."""
        if self._edges is None and self._kept is None:
            raise RuntimeError(
                "the pipeline was already gone through backward and its activations are freed; "
                "pass retain_graph=True to the first backward to go through it twice"
            )

    def backward(self, grads: Flat, *, keep: bool = False, kind: Kind = "backward") -> Flat:
        """Add the parameters' gradients to the stand-ins; return those of the inputs, `None` where there is none.

        With `keep`, the task can go backward again. The first half of it alone has the kind `"backward_inputs"`;
        `stage.halves` says what is left for the second.
        """
        self.check_unspent()
        if self._input_grads:
            raise RuntimeError(BY_ANOTHER_WAY)
        if self._edges is None and not all_none(grads):
            self.recompute(keep=keep)
        with observed(self.observer, kind, self.i, self.stage.index):
            # Without gradients, a checkpointed task may have no edges.
            pairs = [(e, g) for e, g in zip(self._edges or (), grads, strict=False) if e is not None and g is not None]
            if pairs:
                run = self.stage.halves.run_inputs if kind == "backward_inputs" else run_backward
                keep_graph = keep and not self.checkpoint
                self._later = self._go_backward(partial(run, *zip(*pairs, strict=True), keep_graph=keep_graph))
            input_grads = tuple(self._input_grads) or (None,) * len(self._needs)
            self._input_grads.clear()
            if self.checkpoint or not keep:
                self._edges = None
            if not keep:
                self._kept = None
        return input_grads

    def backward_weights(self) -> None:
        """Do the second half of `backward`, if the first has left something: add that to the stand-ins."""
        with observed(self.observer, "backward_weights", self.i, self.stage.index):
            later, self._later = self._later, None
            if later is not None:
                self._go_backward(later)

    def _go_backward(self, run: Callable[[], Any]) -> Any:
        # With the stand-ins in place: a layer may run again in backward, by torch.utils.checkpoint.
        snapshot = self.snapshot
        with snapshot.lock, snapshot.in_place(), snapshot.backward(), self.randomness.backward():
            try:
                return run()
            except BaseException as error:
                # The graph is half freed. A checkpointed task can build it again.
                self._edges = None if self.checkpoint else self._edges
                if "through the graph a second time" not in str(error):
                    raise
                raise RuntimeError(
                    f"layers of partition {self.stage.index} use a tensor in several micro-batches that has one graph "
                    "for all, as it was made outside of them; make it a buffer, or in the layer's forward"
                ) from error

    def _first_pass(self, inputs: Flat, form: Form, shared: Shared) -> tuple[Flat, Form]:
        self._versions = versions(inputs)
        spared = self._spared(inputs, form)
        # Without the caller's graph: a layer may put hooks on its input, or ask whether it takes a gradient.
        given = leaves(spared, self._needs)
        known = self.snapshot.claims.get(self._needs, False)
        first = self._needs not in self.snapshot.claims  # of its kind
        asks = _Asks(self.snapshot.stand_ins.ids) if first else NOTHING
        with self.snapshot.lock:
            self._held = held = self.snapshot.before_first_pass()
            with (
                torch.set_grad_enabled(not known) if torch.is_grad_enabled() == known else NOTHING,
                self.ambient.for_first_pass(),
                # Or what is around the pipeline, such as torch.utils.checkpoint, would count what this graph saves.
                saved_tensors_hooks(Tensor.detach, lambda x: x) if not known and packs_saved_tensors(True) else NOTHING,
                WITHOUT_FAST_ATTENTION if self.stage.attends else NOTHING,
                Passing(checkpointing=True),
                self.randomness.first(),
            ):
                if known:
                    outputs, out_form = self.stage.run(given, form, shared)
                else:
                    given = self._entered(given)
                    outputs, out_form = self._build(given, form, shared, asks)
                self.snapshot.after_first_pass(held)
                self.randomness.ended()
        if versions(inputs) != self._versions:
            raise RuntimeError(
                f"partition {self.stage.index} changed its input in place, so recomputing it from that input would "
                "give something else; make its first layer out-of-place (inplace=False) or use checkpoint='never'"
            )
        self._kept = (inputs, form)
        if self.ambient.watched:
            self._shown = tuple([None if y is None else y.detach().clone() for y in outputs])
        # An output that is an input takes a gradient exactly if that input did; but not one that is changed in place.
        unchanged = {id(x): need for x, need in [*zip(given, self._needs, strict=True)][spared is not inputs :]}
        able = [unchanged.get(id(y), y is not None and (y.is_floating_point() or y.is_complex())) for y in outputs]
        self._claimed = able if known else self._taken()
        if not known:
            self.snapshot.claims.setdefault(self._needs, self._claimed == able and not getattr(asks, "asked", False))
        self._edges = None
        return leaves(outputs, self._claimed), out_form

    def _taken(self) -> list[bool]:
        """Return which outputs take a gradient, once there is a graph."""
        return [edge is not None for edge in self._edges or ()]

    def _entered(self, inputs: Flat) -> Flat:
        if True not in self._needs:
            return leaves(inputs, self._needs)
        entered: Flat = _Entrance.apply(self._input_grads, self._needs, inputs, TOKEN)
        return entered

    def _spared(self, inputs: Flat, form: Form) -> Flat:
        """Return the inputs, with a copy of the micro-batch if the first layer says that it changes it in place."""
        x = inputs[0] if form is Tensor and self.snapshot.begins_in_place else None
        return inputs if x is None else (carrying(x.detach().clone(), x), *inputs[1:])

    def _build(self, inputs: Flat, form: Form, shared: Shared = (), asks: Any = NOTHING) -> tuple[Flat, Form]:
        with self.snapshot.in_place(), asks:
            outputs, out_form = self.stage.run(inputs, form, shared)
        for name, value in [pair for y in outputs if y is not None and y.__dict__ for pair in y.__dict__.items()]:
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"attribute {name!r} of an output of partition {self.stage.index} is a tensor that takes a "
                    "gradient, which is lost between partitions; return it as an output of its own, or detach() it"
                )
        self._edges = [None if y is None or not y.requires_grad else edge_of(y) for y in outputs]
        return outputs, out_form


class _Asks(TorchFunctionMode):
    """Note whether layers ask which tensors take gradients, or for gradients: without a graph, none would.

    Raise `RuntimeError` if they read the gradient of a parameter, one of `ids`.
    """

    only_watches = True
    asked, properties = False, {getattr(Tensor, x).__get__ for x in ("requires_grad", "is_leaf", "grad_fn", "grad")}
    # By name: torch.compile, which runs this, too, cannot look a function up in a set.
    functions = ("grad", "register_hook", "retain_grad", "numpy", "__deepcopy__", "__repr__")

    def __init__(self, ids: set[int]) -> None:
        super().__init__()
        self._ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ_GRADIENT and id(args[0]) in self._ids:
            raise RuntimeError(READS_GRADIENT)
        self.asked |= func in self.properties or getattr(func, "__name__", "") in self.functions
        return func(*args, **(kwargs or {}))


_READ_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_grads: list[Tensor | None], needs: tuple[bool, ...], inputs: Flat, token: Tensor
    ) -> Flat:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        outputs = leaves(inputs, needs)
        mark(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.input_grads[:] = grads
        return None, None, None, None


def refuse_create_graph() -> None:
    """Raise `RuntimeError` if the backward in progress shall be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the pipeline's backward cannot be differentiated again (create_graph=True), as its tasks have graphs of "
            "their own; use the layers without a pipeline for that"
        )


def mark(ctx: Any, outputs: Iterable[Tensor | None]) -> None:
    """Let those outputs of a node take a gradient that say so by `requires_grad`."""
    if others := [y for y in outputs if y is not None and not y.requires_grad]:
        ctx.mark_non_differentiable(*others)


def leaves(tensors: Flat, needs: Iterable[bool]) -> Flat:
    """Return the same data without its graph; let those take a gradient that `needs` says."""
    found = [None if x is None else x.detach() for x in tensors]
    for x, leaf, n in zip(tensors, found, needs, strict=True):
        if x is not None and leaf is not None:
            if n:
                leaf.requires_grad_()
            if x.__dict__:
                carrying(leaf, x)
    return tuple(found)


def all_none(grads: Flat) -> bool:
    """Return whether there is no gradient."""
    return not [g for g in grads if g is not None]
