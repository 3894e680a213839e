"""A pipeline over processes equals one over threads bitwise, sends no more than necessary, and leaves nothing behind.

What other ranks see when one fails is tested in test_cuda.py and in failures.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.connections import KINDS
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.sender import Sender
from torchgpipe.schedules import Action, Schedule, make
from torchgpipe.schedules.action import LETTERS
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES

from ...parts import Fails
from ..layers import Lambda, Pop, Stash, partitions
from ..ledger import assert_eventually
from ..state.test_saved_files import forked
from . import training
from .test_calls import WORLD, loss_of, small
from .training import adam, assert_same, trained

BALANCE = [4, 3, 3]
pytestmark = pytest.mark.ranks(WORLD)


def layers(times: int = 1) -> nn.Sequential:
    """Return layers with a skip over a rank, dropout, batch norm and a pair of tensors; `times` scales the width.

    They are on device `meta`.
    """
    torch.manual_seed(3)
    width = 6 * times
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(5, 6),
            Lambda(lambda x: x.repeat(1, times)),
            Stash(torch.sin),
            nn.Dropout(0.3),
            nn.BatchNorm1d(width),
            nn.PReLU(),
            Lambda(lambda x: (x[:, : width // 2], x[:, width // 2 :])),
            Lambda(lambda halves: torch.cat(halves, 1)),
            Pop(),
            nn.Linear(width, 4),
        )


def reset(k: int, layer: nn.Module) -> None:
    getattr(layer, "reset_parameters", int)()


def seen(model: Any, *sizes: int) -> dict[str, Any]:
    """Train on mini-batches of these sizes; return all visible results."""
    torch.manual_seed(3)
    return trained(model, adam(model), 5, sizes) | {"generator": torch.get_rng_state()}


def drawing(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(nn.functional.dropout(y), target)


def stepped(model: Any, first: bool = True, last: bool = True) -> dict[str, Any]:
    """Evaluate, step, and call `loss`, all with a criterion that draws; return all visible results."""
    more: dict[str, Any] = {}

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        k, given = len(x), (x.requires_grad_() if first else None, target if last else None)
        more[f"losses {k}"] = model.evaluate(drawing, *given, reduction="none")
        loss: Tensor = model.step(drawing, *given)
        again = model.loss(drawing, x, target)
        again.backward()
        more[f"again {k}"], more[f"generator {k}"] = again.detach(), torch.get_rng_state()
        more.update({f"of the input {k}": x.grad} if first else {})
        return loss

    torch.manual_seed(3)
    return trained(model, adam(model), 5, (23, 23, 20), loss_of) | more


def test_equal_to_threads() -> None:
    # Some tensors are so large that they are sent separately from their description, into the memory of earlier ones.
    cases = [*product((1, 2, 5), MODES, (False, True), [1], ["GPipe"])]
    cases += product([4], MODES, [False], [3_000], ["GPipe"])
    cases += [
        (m, mode, False, 1, name)
        for m in (5, 1)
        for name, mode in zip(NAMED, 2 * MODES, strict=True)
    ]
    for chunks, checkpoint, deferred, times, name in cases:
        options: dict[str, Any] = {
            "chunks": chunks,
            "checkpoint": checkpoint,
            "schedule": name,
            "init": reset,
        }
        options["deferred_batch_norm"] = deferred
        balance = BALANCE if len(make(name, 1, 1).placement) == 1 else [1, 4, 1, 1, 1, 2]
        ours = DistributedGPipe(layers(times), balance, **options)
        threads = GPipe(
            layers(times), balance, devices=["cpu"] * WORLD, engine="workers", **options
        )
        first, last = (ours.schedule.placement[k] == dist.get_rank() for k in (0, -1))
        assert_same(stepped(ours, first, last), stepped(threads))
        with torch.no_grad():
            output = ours.eval()(torch.ones(7, 5))
        assert (output is None) == (not last)
        ours.close()


@pytest.mark.ranks(2)
def test_skips_may_be_fetched_in_another_order_than_they_are_left() -> None:
    rows = ["0F0 0F1 1F1 1F0 1B1 1B0 0B0 0B1", "2F1 2F0 2B1 2B0"]
    lists = [[Action(LETTERS[x[1]], int(x[2]), int(x[0])) for x in row.split()] for row in rows]
    found: list[dict[str, Any]] = []
    for pipeline in (DistributedGPipe, partial(GPipe, devices=["cpu"] * 2)):
        torch.manual_seed(0)
        given = partitions([nn.Linear(4, 4) for _ in range(3)], [(0, 2)], torch.sin)
        model = pipeline(*given, chunks=2, schedule=Schedule("mine", [0, 0, 1], lists))
        x = torch.arange(12.0).view(3, 4).cos()
        losses = [
            model.step(nn.functional.mse_loss, x, x),
            model.loss(nn.functional.mse_loss, x, x),
        ]
        losses[1].backward()
        found.append(
            {name: p.grad for name, p in model.named_parameters()}
            | {"loss": torch.stack(losses).detach()}
        )
    assert_same(found[0], found[1])


def test_only_what_is_needed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundary tensors and skips are sent once in each direction; only new shapes are described."""
    give, counted = Sender.give, Counter[tuple[str, int]]()

    def noted(sender: Sender, message: Message) -> None:
        counted[KINDS[sender._tag % len(KINDS)], sender.rank] += sum(
            x.nbytes for x in message.tensors if x is not None
        )
        give(sender, message)

    monkeypatch.setattr(Sender, "give", noted)
    ours = DistributedGPipe(layers(), BALANCE, init=reset, chunks=4, checkpoint="always")
    described, sent = [], []
    for size in (20, 20, 15, 20, 15):
        seen(ours, size)
        connections: Any = ours._connections
        described.append(sum(len(sender._numbers) for sender in connections._senders()))
        sent.append(
            Counter(
                {
                    key: n
                    for key, n in counted.items()
                    if key[0] not in ("control", "liveness", "loss")
                }
            )
        )
    first, again, others, *later = described
    assert first == again < others == later[0] == later[1], described
    boundary = 20 * 6 * 4
    expected: list[dict[tuple[str, int], int]] = [
        {("forward", 1): boundary, ("forward skips", 2): boundary},
        {("forward", 2): boundary, ("backward", 0): boundary},
        {("backward", 1): boundary, ("backward skips", 0): boundary},
    ]
    assert sent[1] - sent[0] == expected[dist.get_rank()], sent


def test_the_last_ranks_end_first() -> None:
    """The last ranks need nothing from earlier ones, which go on. Closed connections leave nothing behind."""
    rank = dist.get_rank()
    layer = Fails()
    each = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))
    ours = DistributedGPipe(each, [2, 1, 1], chunks=2, checkpoint="never")
    layer.at("backward", dist.barrier)  # wait until all other ranks have closed their connections
    loss_of(ours).backward()
    connections: weakref.ref[Any] = weakref.ref(ours._connections)
    if rank:
        ours.close()
        dist.barrier()
    ours.close()
    assert all(p.grad is not None for p in ours.parameters())
    loss_of(ours).backward()
    assert_eventually(
        lambda: gc.collect() >= 0 and connections() is None, lambda: "connections are kept", 10
    )


def test_a_process_forks_after_connections_were_closed() -> None:
    gc.collect()  # free process groups of other tests: PyTorch cannot destroy them in a fork
    pipelines = [small()[0]]
    for _ in range(2):
        loss_of(pipelines[0]).backward()
        pipelines[0].close()
    assert forked(lambda: pipelines.pop() and gc.collect()) == 0


def test_a_fork_leaves_connections_to_the_process_that_has_them() -> None:
    """A worker of a data loader may close the pipeline that it was forked with."""
    gc.collect()
    model, _ = small()
    with torch.no_grad():
        expected = loss_of(model)
        assert forked(model.close) == 0
        assert torch.equal(loss_of(model), expected)
    model.close()


# Functions of the model, its layers on this rank, and the mesh.
SPREAD: dict[str, Callable[[nn.Module, nn.Module, DeviceMesh], object]] = {
    "sharded": lambda model, layers, mesh: fully_shard(layers, mesh=mesh),
    "replicated": lambda model, layers, mesh: replicate(model, device_mesh=mesh),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", SPREAD)
def test_over_a_mesh_it_equals_plain_layers_that_are_spread_alike(how: str) -> None:
    """Over 2 x 2 ranks. Plain layers run forward on each micro-batch, and backward in the opposite order.

    FSDP adds up replicas' gradients after the backward of each micro-batch, and so the plain backward is one for each.
    `replicate` does it once in the end, and so the plain backward is one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    plain, spread = training.layers(), SPREAD[how]
    spread(plain, plain, mesh["dp"])

    def plainly(x: Tensor, target: Tensor) -> Tensor:
        outputs = [plain(part) for part in x.chunk(3)]
        ends = outputs if how == "replicated" else [y.detach().requires_grad_() for y in outputs]
        loss = nn.functional.cross_entropy(torch.cat(ends), target)
        loss.backward()
        if how == "sharded":
            for y, end in reversed([*zip(outputs, ends, strict=True)]):
                y.backward(end.grad)
        return loss

    expected = trained(plain, adam(plain), replica, loss_of=plainly)
    for checkpoint in MODES:
        model = DistributedGPipe(
            training.layers(), [3, 5], mesh=mesh["pp"], chunks=3, checkpoint=checkpoint
        )
        spread(model, model.partition, mesh["dp"])
        assert_same(trained(model, adam(model), replica), expected)
        model.close()
    # A step, up to rounding: the schedule adds micro-batches up in its own order.
    model = DistributedGPipe(
        training.layers(), [1, 2, 2, 3], mesh=mesh["pp"], chunks=3, schedule="ZBVZeroBubble"
    )
    for partition in model.partitions if how == "sharded" else [model.partitions]:
        spread(model, partition, mesh["dp"])
    found = trained(
        model, adam(model), replica, loss_of=partial(model.step, nn.functional.cross_entropy)
    )
    kept = {name: x for name, x in found.items() if name.startswith(("gradient 0", "loss 0"))}
    torch.testing.assert_close(kept, {name: expected[name] for name in kept})
    assert len(kept) > 1
    model.close()
