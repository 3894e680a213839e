"""List the operators of a layer, each with its class, its floating-point operations and its bytes.

The floating-point operations come from PyTorch's own formulas (`torch.utils.flop_counter`). An
operator without a formula counts as one that only moves bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.caught import caught
from torchgpipe.plan.count.attention import attention_operator
from torchgpipe.plan.count.convolution import convolution
from torchgpipe.plan.count.footprint import LayerCount
from torchgpipe.plan.count.loss import LossLayer
from torchgpipe.plan.hardware.operators import Operator, OperatorClass, bytes_of, dtype_of, flops_of
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.tensors.microbatch import like, tensors_of
from torchgpipe.trace.parts import tensors_in

ADVICE = (
    "check the sample's shape and dtype; layers are counted on device 'meta', where tensors have "
    "no values, so a layer that needs values cannot be counted: find the balance with "
    "torchgpipe.balance, which runs the layers"
)
ADVICE_OF_LOSS = (
    "check the target; the criterion is counted on device 'meta', where tensors have no values: if "
    "it uses tensors of its own, such as class weights, make it an nn.Module that has them as "
    "buffers; if it needs values, plan without a criterion"
)

# For operators without a formula for floating-point operations: maps a part of the operator's name
# to its class. An operator whose name has none of these parts is elementwise.
KINDS: dict[str, OperatorClass] = {
    "batch_norm": "norm",
    "instance_norm": "norm",
    "group_norm": "norm",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "softmax": "norm",
    "pool": "pool",
    "upsample": "pool",
}
# Operators that read only as many bytes of their first tensor as they write.
LOOKUPS = ("embedding", "index_select", "gather", "index")
# Operators that overwrite their first tensor without reading it.
WRITE_ONLY = ("fill_", "zero_", "copy_")
BIAS_FIRST = ("addmm", "addmv", "addbmm", "baddbmm")
"""Products whose first argument is added to the product of the next two."""
# How the names of operators begin that compute nothing.
VIEWS = (
    "aten._unsafe_view.default",
    "aten.detach.default",
    "aten.empty",
    "aten.new_empty",
    "aten._reshape_alias",
)


class Counter(TorchDispatchMode):
    """Within this context, list this thread's operators, but not operators that make views.

    Args:
        weights: The parameters that get gradients.
        constants: The other parameters, and the buffers.

    Attributes:
        operators: The operators.
        products: Those of the operators that are convolutions or matrix products in which a weight,
            or what was computed from weights and constants alone, is a factor.
    """

    def __init__(self, weights: Iterable[Tensor] = (), constants: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.products: list[Operator] = []
        # The keys are the storages of weights, and of what was computed from weights and constants
        # alone, such as casts. The values keep these storages alive, so that no other storage gets
        # a key.
        self._weights = {x.untyped_storage()._cdata: x for x in weights}
        self._constants = {x.untyped_storage()._cdata for x in constants}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = len(self.operators)
        with without_torch_function():
            result = self._run(func, args, kwargs)
        self._note_weights(func, args, result, self.operators[before:])
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and list it; return its result."""
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution.default:
            self.operators += convolution(args, [result])
        elif func is torch.ops.aten.convolution_backward.default:
            self.operators += convolution(args, result)
        elif (fused := attention_operator(func, args, kwargs, result)) is not None:
            self.operators.append(fused)
        else:
            self.operators += _operators(func, args, kwargs, result)
        return result

    def _note_weights(self, func: Any, args: Any, result: Any, made: Sequence[Operator]) -> None:
        """Note products with weights, and results that were computed from weights and constants.

        Args:
            func: The operator that has run.
            args: Its arguments.
            result: Its result.
            made: What was listed for it.
        """
        if not self._weights:
            return
        tensors = list(tensors_in(args))
        of_weights = [self._is_weight(x) for x in tensors]
        if not any(of_weights):
            return
        others = [x for x, is_weight in zip(tensors, of_weights, strict=True) if not is_weight]
        if all(x.untyped_storage()._cdata in self._constants for x in others):
            self._weights |= {x.untyped_storage()._cdata: x for x in tensors_in(result)}
            return
        # A product of other tensors may still have a weight as its bias.
        with_bias = func.__name__.partition(".")[0] in BIAS_FIRST
        factors = args[1:3] if with_bias else args[:2]
        if any(map(self._is_weight, tensors_in(factors))):
            self.products += [each for each in made if each.flops and "attention" not in each.kind]

    def _is_weight(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._weights


def _operators(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Operator]:
    outputs = list(tensors_in(result))
    if not outputs or _makes_views(func):
        return []
    full_name = str(func)
    name = func.__name__.partition(".")[0]
    flops = flops_of(func, args, kwargs, result)
    dtype = dtype_of(outputs[0])
    kind: OperatorClass = "elementwise"
    if flops:
        kind = "matmul"
        if dtype == "float32" and accelerator.KERNELS.matmul.fp32_precision == "tf32":
            dtype = "tf32"
    else:
        for part, named in KINDS.items():
            if part in full_name:
                kind = named
                break
    written = sum(map(bytes_of, outputs))
    read = list(map(bytes_of, tensors_in((args, kwargs))))
    moved = written
    if kind == "norm":
        # The largest input is read once for the statistics, and once more to apply them.
        again = 2 if "backward" in full_name else 1
        moved += max(read, default=0) * again
    if name in WRITE_ONLY:
        read[0] = 0
    elif name in LOOKUPS:
        read[0] = min(read[0], written)
    moved += sum(read)
    return [Operator(kind, dtype, flops, float(moved))]


def _makes_views(func: Any) -> bool:
    """Return whether an operator computes nothing: it returns views or uninitialized tensors."""
    return getattr(func, "is_view", False) or str(func).startswith(VIEWS)


def count_layer(names: Sequence[str], rehearsal: Rehearsal) -> LayerCount:
    """Run one layer on `meta`, and return its operators and the bytes of its tensors.

    Args:
        names: The names of all layers.
        rehearsal: The layer and its input.

    Raises:
        ValueError: If the layer raises an exception. The message is one line and names the layer.
    """
    name = names[rehearsal.index]
    layer = rehearsal.layer
    value = rehearsal.prepare()
    reached: set[int] = set()
    given = tuple([_Entry.apply(reached, i, x) for i, x in enumerate(tensors_of(value))])
    for key, skip in rehearsal.scope.items():
        if skip is not None:
            rehearsal.scope[key] = _Entry.apply(reached, -1, skip)
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    constants = [x for x in layer.parameters() if not x.requires_grad]
    forward, backward = Counter(weights, [*constants, *layer.buffers()]), Counter()
    try:
        with forward:
            rehearsal.forward(like(value, given))
        roots = [x for x in rehearsal.results() if x.requires_grad]
        gradients = [torch.empty_like(x) for x in roots]
        with backward:
            torch.autograd.backward(roots, gradients)
    except Exception as error:
        which = f"layer {rehearsal.index} ({name!r}, {type(rehearsal.original).__name__})"
        advice = ADVICE
        if isinstance(rehearsal.original, LossLayer):
            which, advice = name, ADVICE_OF_LOSS
        inputs = ", ".join([f"{tuple(x.shape)} {dtype_of(x)}" for x in tensors_of(value)])
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{which} fails on {inputs}: {first.rstrip('.')}; {advice}"
        raise ValueError(message) from caught(error)
    sizes = []
    accumulate = []
    frozen = sum([buffer.nbytes for buffer in layer.buffers()])
    for parameter in layer.parameters():
        nbytes = parameter.nbytes
        if parameter.requires_grad:
            sizes.append(nbytes)
            dtype = dtype_of(parameter)
            accumulate.append(Operator("elementwise", dtype, 0.0, 3.0 * nbytes))
        else:
            frozen += nbytes
    return LayerCount(
        name=name,
        forward=tuple(forward.operators),
        products=tuple(forward.products),
        backward=tuple(backward.operators),
        accumulate=tuple(accumulate),
        output=float(sum([x.nbytes for x in tensors_of(rehearsal.output)])),
        parameters=sum(sizes),
        parameter_sizes=tuple(sizes),
        frozen=frozen,
        gives=tuple([i in reached for i in range(len(given))]),
    )


class _Entry(torch.autograd.Function):
    """An autograd node in front of a layer. It notes that a gradient reaches the layer's input.

    Without this node, the input would be a leaf of the autograd graph. If a layer's backward passes
    the output's gradient on to a leaf unchanged, PyTorch copies it for `.grad`. A pipeline does not
    make this copy, so the copy must not be counted.
    """

    @staticmethod
    def forward(ctx: Any, reached: set[int], number: int, x: Tensor) -> Tensor:
        ctx.reached, ctx.number = reached, number
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.reached.add(ctx.number)
        return None, None, None
