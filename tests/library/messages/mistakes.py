"""List common mistakes that users make, with words that the error messages must have."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence

import torchgpipe
from torchgpipe import GPipe, MicroBatches
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.saves import Saves
from torchgpipe.timeline import record

X = torch.zeros(4, 2)
ARRAY = np.zeros((4, 2), dtype="float32")


def layers(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])


def model(balance: Any = (1, 1), **options: Any) -> GPipe:
    return GPipe(layers(), balance, **{"devices": ["cpu", "cpu"], "chunks": 2, **options})


def step(criterion: Any, x: Any = X, target: Any = X, **options: Any) -> object:
    return model().step(criterion, x, target, **options)


def longer(x: Tensor) -> Tensor:
    return x[:, : int(x[0, 0]) + 1]


class Longer(nn.Module):
    """A layer whose output has a different length for each micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return longer(x)


def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def with_logs(output: Tensor, target: Tensor) -> Any:
    return mse_loss(output, target), 3


def unequal_outputs() -> object:
    lengths = torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]])
    cut = GPipe(nn.Sequential(nn.Identity(), Longer()), [1, 1], devices=["cpu"] * 2, chunks=2)
    return cut(lengths)


def jagged() -> object:
    parts = [torch.randn(2, 2), torch.randn(3, 2)]
    return model()(torch.nested.nested_tensor(parts, layout=torch.jagged))


def replaced_layer() -> object:
    pipeline = model()
    pipeline._modules["0"] = nn.Linear(2, 2)
    return pipeline(X)


def recorded_twice() -> None:
    pipeline = model()
    with record(pipeline), record(pipeline):
        pass


def without_gradients() -> object:
    with torch.no_grad():
        return step(mse_loss)


def transformed() -> object:
    pipeline = model()
    return torch.func.grad(lambda x: pipeline(x).sum())(X)


LAYER = nn.Linear(2, 2)
V_BALANCE = "give a balance of 4 partitions"

Mistake = tuple[Callable[[], object], list[str]]
"""What was done, and words that the message must have."""

MISTAKES: dict[str, Mistake] = {
    # The input.
    "an array as input": (
        lambda: model()(ARRAY),
        ["input must be a tensor", "got ndarray", "torch.from_numpy()"],
    ),
    "an array as input of a step": (
        lambda: step(mse_loss, ARRAY),
        ["input must be a tensor", "torch.from_numpy()"],
    ),
    "a list as input": (
        lambda: model()([X, X]),
        [
            "a tensor or a tuple of tensors",
            "got list; make a tuple of it; or, if its items",
        ],
    ),
    "a list as a micro-batch": (
        lambda: step(mse_loss, MicroBatches([[X, X]])),
        ["a micro-batch must be", "got list; make a tuple of it"],
    ),
    "a dictionary without tensors": (lambda: model()({"x": 1}), ["must have tensors", "got dict"]),
    "None as input": (lambda: model()(None), ["input must be a tensor", "got NoneType"]),
    "a list in a tuple": (
        lambda: model()((X, [X])),
        ["element 1 of input is a list, which can have an entry for each sample; make a tensor"],
    ),
    "a block mask in a micro-batch": (
        lambda: step(mse_loss, MicroBatches([(X, create_block_mask(causal, 1, 1, 4, 4, "cpu"))])),
        [
            "some are in another object",
            "a layer that needs another object has to make it of tensors",
        ],
    ),
    "an empty tuple": (lambda: model()(()), ["got an empty tuple"]),
    "a scalar": (lambda: model()(torch.ones(())), ["needs a batch dimension", "tensor 0"]),
    "two batch sizes": (lambda: model()((X, X[:3])), ["the same batch size", "[4, 3]"]),
    "two arguments": (lambda: model()(X, X), ["takes one input", "2 by place", "as one tuple"]),
    "no argument": (lambda: model()(), ["takes one input", "0 by place"]),
    "an argument too many, by name": (
        lambda: model()(X, mask=X),
        ["takes one input", "1 by place, mask"],
    ),
    "an argument by another name": (lambda: model()(x=X), ["takes one input", "0 by place, x"]),
    "no micro-batch": (lambda: MicroBatches([]), ["at least one micro-batch"]),
    "micro-batches in a dictionary": (
        lambda: model()({"x": MicroBatches([X])}),
        ["'x' of input is MicroBatches", "give MicroBatches of whole inputs"],
    ),
    "a packed sequence": (
        lambda: model()(pack_padded_sequence(X[None], [4], batch_first=True)),
        ["element 2 is NoneType of a PackedSequence", "padded sequences", "in one layer"],
    ),
    "rows as micro-batches": (
        lambda: MicroBatches(X),  # type: ignore[arg-type]
        ["takes a list of micro-batches", "got Tensor"],
    ),
    "micro-batches of micro-batches": (
        lambda: MicroBatches([MicroBatches([X]), X]),
        ["takes micro-batches", "one of them is MicroBatches"],
    ),
    # The arguments of a step.
    "no criterion": (
        lambda: step(None),
        ["criterion must be a function", "NoneType", "step(criterion, input, target)"],
    ),
    "the input first": (
        lambda: step(X, X, mse_loss),
        ["criterion must be a function", "got Tensor", "step(criterion, input, target)"],
    ),
    "the input alone": (
        lambda: model().step(X),  # type: ignore[arg-type]
        ["criterion must be a function", "got Tensor", "step(criterion, input, target)"],
    ),
    "the input alone, to evaluate": (
        lambda: model().evaluate(X),  # type: ignore[arg-type]
        ["criterion must be a function", "got Tensor", "evaluate(criterion, input, target)"],
    ),
    "the criterion alone": (lambda: model().step(mse_loss), ["input must be", "got NoneType"]),
    "the input and the target alone": (
        lambda: model().step(X, X),  # type: ignore[arg-type]
        ["criterion must be a function", "got Tensor", "step(criterion, input, target)"],
    ),
    "the criterion second": (
        lambda: step(X, mse_loss, X),
        ["criterion must be a function", "got Tensor", "step(criterion, input, target)"],
    ),
    "the class of a criterion": (
        lambda: step(nn.MSELoss),
        ["got the class MSELoss", "give an object of this class: MSELoss()"],
    ),
    "a loss for each sample": (
        lambda: step(nn.MSELoss(reduction="none")),
        ["must return a scalar tensor", "one of shape (2, 2)"],
    ),
    "a loss that is a number": (
        lambda: step(lambda y, t: mse_loss(y, t).item()),
        ["must return a scalar tensor", "returned float"],
    ),
    "logs beside the loss of loss()": (
        lambda: model().loss(with_logs, X, X),
        ["must return a scalar tensor, but returned tuple", "call step(", "takes (loss, logs)"],
    ),
    "no loss": (lambda: step(lambda y, t: None), ["scalar tensor", "returned NoneType"]),
    "a loss without a graph": (
        lambda: step(lambda y, t: mse_loss(y.detach(), t)),
        ["a loss without a graph", "uses detach() or no_grad()"],
    ),
    "a target of another batch size": (
        lambda: step(mse_loss, X, X[:3]),
        ["needs the batch size, 4,", "the shape (3, 2)"],
    ),
    "an unknown reduction": (
        lambda: step(mse_loss, reduction="average"),
        ["'mean', 'sum' or 'none'", "got 'average'"],
    ),
    "a weight for a sum": (
        lambda: step(mse_loss, reduction="sum", weight=len),
        ["only 'mean'", "'sum' with a weight"],
    ),
    "a number as weight": (
        lambda: step(mse_loss, weight=0.5),
        ["weight must be a function", "got 0.5"],
    ),
    "a step without gradients": (without_gradients, ["gradients are disabled", "evaluate()"]),
    "fewer targets than micro-batches": (
        lambda: step(mse_loss, MicroBatches([X, X]), MicroBatches([X])),
        ["the input has 2 micro-batches, but the target has 1"],
    ),
    "a backward after a step": (
        lambda: model().step(mse_loss, X, X).backward(),
        ["step() has run the backward already", "remove loss.backward()", "model.loss(criterion"],
    ),
    "outputs of unequal lengths": (unequal_outputs, ["differ in other dimensions", "step("]),
    "a jagged tensor": (jagged, ["differ in other dimensions", "step("]),
    # The arguments of GPipe.
    "no balance": (lambda: model(None), ["balance is required", "balance_by_time(2, layers"]),
    "a balance of floats": (lambda: model([1.0, 1.0]), ["such as [2, 3]", "got [1.0, 1.0]"]),
    "a balance in a tensor": (
        lambda: model(torch.tensor([1, 1])),
        ["such as [2, 3]", "got tensor([1, 1])"],
    ),
    "a balance in a text": (lambda: model("11"), ["such as [2, 3]", "got '11'"]),
    "a number as balance": (lambda: model(2), ["such as [2, 3]", "got 2;"]),
    "an empty partition": (lambda: model([2, 0]), ["needs one layer or more", "[2, 0]"]),
    "a balance for other layers": (
        lambda: model([1, 2]),
        ["sums up to 3 layers", "the module has 2"],
    ),
    "chunks of zero": (lambda: model(chunks=0), ["at least 1, but got 0"]),
    "chunks in a text": (lambda: model(chunks="2"), ["a whole number", "but got '2'"]),
    "checkpoint as a truth value": (
        lambda: model(checkpoint=True),
        ["'always', 'except_last', 'never'", "got True"],
    ),
    "an unknown schedule": (
        lambda: model(schedule="1F2B"),
        ["no schedule is called '1F2B'", "1F1B", "a Schedule that you have made"],
    ),
    "an unknown engine": (lambda: model(engine="threads"), ["'auto', 'graph', 'workers'"]),
    "a device in place of devices": (lambda: model(devices="cpu"), ["a list of devices", "'cpu'"]),
    "a number of devices": (lambda: model(devices=2), ["must be a list of devices", "got 2"]),
    "a number of devices for a plan": (
        lambda: torchgpipe.pipeline(LAYER, X, devices=2, batch_size=8),  # type: ignore[arg-type]
        ["must be a list of devices", "such as ['cuda:0', 'cuda:1']", "got 2"],
    ),
    "too few devices": (
        lambda: model(devices=["cpu"]),
        ["too few devices: 2 partitions, but 1 device;", "at most 1 partition,"],
    ),
    "too few partitions for a V": (
        lambda: model(schedule="ZBVZeroBubble"),
        ["ZBVZeroBubble needs", "at least 2, on each device", V_BALANCE],
    ),
    "one partition on each device, interleaved": (
        lambda: model(schedule="Interleaved1F1B"),
        ["Interleaved1F1B needs", "at least 2, on each device", V_BALANCE],
    ),
    "a module that is no sequence": (
        lambda: GPipe(nn.Linear(2, 2), [1]),  # type: ignore[arg-type]
        ["wraps an nn.Sequential", "got Linear", "torchgpipe.sequential(module, sample)"],
    ),
    "a layer twice": (
        lambda: GPipe(nn.Sequential(LAYER, LAYER), [1, 1]),
        ["layers '0' and '1' are the same module", "a separate layer for each place"],
    ),
    "layers without values": (
        lambda: GPipe(layers().to("meta"), [1, 1], devices=["cpu", "cpu"]),
        ["'0.weight' is on device 'meta'", "give init=..."],
    ),
    "no process group": (
        lambda: DistributedGPipe(layers(), [1, 1]),
        ["there is no process group", "init_process_group()", "torchrun"],
    ),
    # What is done with a pipeline.
    "moving a pipeline": (lambda: model().to("meta"), ["cannot be moved", "devices=[…]"]),
    "another balance": (
        lambda: setattr(model(), "balance", [2]),
        ["keeps the balance that it was made with, [1, 1]", "to use [2], make a new pipeline"],
    ),
    "a layer that was replaced": (replaced_layer, ["was replaced", "change the layers first"]),
    "tracing a pipeline": (
        lambda: torch.jit.trace(model(), X),
        ["cannot be traced", "model[:]"],
    ),
    "a pipeline inside a torch.func transform": (
        transformed,
        ["torch.func transforms"],
    ),
    "saving a function": (
        lambda: Saves("never-made").save(0, model(), None, schedule=lambda: 0),
        ["schedule cannot be saved", "cannot be pickled", "state_dict()"],
    ),
    "saving by a text": (
        lambda: Saves("never-made").save("0", model(), None),  # type: ignore[arg-type]
        ["step must be a whole number", "got '0'"],
    ),
    "keeping no state": (lambda: Saves("never-made", keep=0), ["at least 1", "got 0"]),
    "recording what is recorded": (
        recorded_twice,
        ["model.observer", "set it to None first"],
    ),
}
