"""A pipeline over processes equals one over threads, to the last bit; and every rank hears of a failure."""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as plain_checkpoint

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed

from ...parts import Fails, Pop, Stash
from .scenes import play

CHECKPOINTS: tuple[Any, ...] = ("always", "except_last", "never")
WORLD = 3
BALANCE = [3, 4, 3]


def layers() -> nn.Sequential:
    """A skip over a rank, dropout, batch norm, and a layer that hands on two tensors."""
    return nn.Sequential(
        nn.Linear(5, 6), Stash(), nn.Dropout(0.3),
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Halves(),
        Joined(), Pop(), nn.Linear(6, 4),
    )  # fmt: skip


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3], x[:, 3:]


class Repeated(nn.Module):
    times = 3_000

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.times)


class Joined(nn.Module):
    def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(halves, 1)


def built(chunks: int, checkpoint: Any, deferred: bool, make: Callable[[], nn.Sequential] = layers) -> Any:
    """Return the pipeline over ranks, and one over threads."""
    options: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    torch.manual_seed(3)
    ours = DistributedGPipe(make(), BALANCE, **options)
    torch.manual_seed(3)
    return ours, GPipe(make(), BALANCE, devices=["cpu"] * WORLD, engine="workers", **options)


def step(model: Any, size: int) -> dict[str, Any]:
    """Train a step; return all that can be seen."""
    torch.manual_seed(size)
    x, target = torch.randn(size, 5), torch.randint(4, (size,))
    model.zero_grad()
    loss = model.loss(nn.functional.cross_entropy, x, target)
    loss.backward()
    norm = model.clip_grad_norm_(0.1)
    return {
        "loss": loss.detach(),
        "norm": norm,
        "generator": torch.get_rng_state(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "state": {name: x.clone() for name, x in model.state_dict().items()},
    }


def assert_part_of(ours: dict[str, Any], whole: dict[str, Any]) -> None:
    for key, value in ours.items():
        for name, x in value.items() if isinstance(value, dict) else [(key, value)]:
            assert torch.equal(x, whole[key][name] if isinstance(value, dict) else whole[key]), (key, name)


def equal_to_threads(rank: int) -> None:
    for chunks, checkpoint, deferred in product((1, 2, 5), CHECKPOINTS, (False, True)):
        ours, threads = built(chunks, checkpoint, deferred)
        for size in (23, 20, 23):
            assert_part_of(step(ours, size), step(threads, size))
        ours.close()


def without_gradients(rank: int) -> None:
    ours, threads = built(3, "always", False)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, expected = ours.eval()(x), threads.eval()(x)
    assert torch.equal(output, expected) if rank == WORLD - 1 else output is None
    ours.close()


def a_state_of_the_model_loads(rank: int) -> None:
    ours, threads = built(2, "never", False)
    with torch.no_grad():
        for p in threads.parameters():
            p.add_(1.0)
    ours.load_state_dict(threads.state_dict())
    assert_part_of({"state": ours.state_dict()}, {"state": threads.state_dict()})
    ours.close()


def layers_on_meta_are_filled(rank: int) -> None:
    def reset(k: int, layer: nn.Module) -> None:
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.BatchNorm1d)):
                module.reset_parameters()

    found = []
    for balance in ([3, 4, 3], [1, 1, 8]):
        torch.manual_seed(5)
        with torch.device("meta"):
            module = layers()
        ours = DistributedGPipe(module, balance, init=reset)
        parts: list[Any] = [None] * WORLD
        dist.all_gather_object(parts, {name: p.detach() for name, p in ours.named_parameters()})
        found.append({name: p for part in parts for name, p in part.items()})
    torch.manual_seed(5)
    with torch.device("meta"):
        module = layers()
    threads = GPipe(module, BALANCE, devices=["cpu"] * WORLD, init=reset)
    for name, p in threads.named_parameters():
        assert torch.equal(p, found[0][name]) and torch.equal(p, found[1][name]), name


def only_what_is_needed_is_sent(rank: int) -> None:
    """Boundary tensors and skips, once each way."""
    ours, _ = built(4, "always", False)
    step(ours, 20)
    before = ours._wires.sent
    step(ours, 20)
    sent = {key: count - before[key] for key, count in ours._wires.sent.items() if key[0] != "control"}
    boundary = 20 * 6 * 4
    expected: list[dict[tuple[str, int], int]] = [
        {("forward", 1): boundary, ("forward skips", 2): boundary},
        {("forward", 2): boundary, ("backward", 0): boundary},
        {("backward", 1): boundary, ("backward skips", 0): boundary},
    ]
    assert sent == expected[rank], sent
    ours.close()


def large_tensors_of_changing_sizes(rank: int) -> None:
    """So large that they travel apart from their description, and are expected where the mini-batch before had them."""

    def wide() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(5, 6), Repeated(), Stash(),
            nn.Tanh(), nn.Dropout(0.3), nn.Tanh(), Halves(),
            Joined(), Pop(), nn.Linear(6 * Repeated.times, 4),
        )  # fmt: skip

    for checkpoint in CHECKPOINTS:
        ours, threads = built(4, checkpoint, False, wide)
        for size in (13, 13, 8, 13):
            assert_part_of(step(ours, size), step(threads, size))
        ours.close()


def shapes_are_described_once(rank: int) -> None:
    ours, _ = built(4, "always", False)
    counts = []
    for size in (20, 20, 15, 20, 15):
        step(ours, size)
        counts.append(ours._wires.described)
    first, again, others, *later = counts
    assert first == again < others == later[0] == later[1], counts
    ours.close()


def a_failure_is_heard_by_all(rank: int) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(9, 4), torch.randn(9, 4)
    model = DistributedGPipe(
        nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Fails()))),
        [2] * WORLD, chunks=3, checkpoint="always",
    )  # fmt: skip
    fails = model.partition[1]
    assert isinstance(fails, Fails)
    for phase, victim in product(("forward", "recompute", "backward"), range(WORLD)):
        if rank == victim:
            fails.fail(phase, ValueError("on purpose"), calls_before=1)
        try:
            model.loss(nn.functional.mse_loss, x, target).backward()
            # The last rank may have ended its backward by then.
            model.loss(nn.functional.mse_loss, x, target)
        except (RankFailed, ValueError) as error:
            said = str(error)
        doing = f"{'recomputation' if phase == 'recompute' else phase} of micro-batch 1"
        assert said == ("on purpose" if rank == victim else f"rank {victim} failed in {doing}: ValueError: on purpose")
        if phase == "forward":  # all ranks are in the same mini-batch
            model.loss(nn.functional.mse_loss, x, target).backward()
        model.close()
        model.loss(nn.functional.mse_loss, x, target).backward()  # it works again
    model.close()


def small(**options: Any) -> Any:
    """Return a pipeline over ranks, one over threads, and a step of either, whose gradients it returns."""
    pair = []
    for make in (DistributedGPipe, partial(GPipe, devices=["cpu"] * WORLD, engine="workers")):
        torch.manual_seed(6)
        pair.append(make(nn.Sequential(*(nn.Linear(4, 4) for _ in range(WORLD))), [1] * WORLD, chunks=3, **options))
    return pair


X, TARGET = torch.arange(36.0).view(9, 4).sin(), torch.arange(36.0).view(9, 4).cos()


def loss_of(model: Any, x: Tensor = X) -> Tensor:
    loss: Tensor = model.loss(nn.functional.mse_loss, x, TARGET)
    return loss


def assert_same_gradients(ours: Any, threads: Any) -> None:
    expected = {name: p.grad for name, p in threads.named_parameters()}
    for name, p in ours.named_parameters():
        assert torch.equal(p.grad, expected[name]), name
    ours.zero_grad()
    threads.zero_grad()


def calls_in_any_order(rank: int) -> None:
    """Two pipelines at once, evaluation and losses that nobody uses in between, and a backward that comes twice."""
    ours, threads = small()
    others = small()
    for first, second in ((ours, others[0]), (threads, others[1])):
        one, two = loss_of(first), loss_of(second, X + 1)
        loss_of(first)
        with torch.no_grad():
            loss_of(first.eval())
        first.train()
        one.backward(retain_graph=True)
        two.backward()
        one.backward()
    assert_same_gradients(ours, threads)
    assert_same_gradients(*others)
    ours.close()
    others[0].close()


def copies_train(rank: int) -> None:
    ours, threads = small()
    loss_of(ours)
    for copied in (deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        loss_of(copied).backward()
        loss_of(threads).backward()
        assert_same_gradients(copied, threads)
        copied.close()
    ours.close()
    ours.rank = (rank + 1) % WORLD  # as of a part that was saved on another rank
    with pytest.raises(RuntimeError, match=f"this is the part of rank {ours.rank}, and runs on that rank only"):
        loss_of(ours)


def a_loss_outlives_its_pipeline(rank: int) -> None:
    ours, threads = small()
    loss_of(threads).backward()
    parameters = dict(ours.named_parameters())
    loss = loss_of(ours)
    del ours
    gc.collect()
    loss.backward()
    for name, p in threads.named_parameters():
        assert name not in parameters or torch.equal(parameters[name].grad, p.grad)


def errors_between_calls(rank: int) -> None:
    """What is wrong is said at once, and the same on all ranks."""
    ours, threads = small()
    loss = loss_of(ours)
    ours.close()
    with pytest.raises(RuntimeError, match=r"connections were closed by close\(\) since this mini-batch"):
        loss.backward()

    loss = loss_of(ours)
    loss.backward()
    ours.zero_grad()
    with pytest.raises(RuntimeError, match="the pipeline was already gone through backward"):
        if rank == 1:
            loss.backward()
        loss_of(ours)
    ours.close()

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("of the criterion")

    with pytest.raises((KeyError, RankFailed)) as caught:
        ours.loss(criterion, X, TARGET)
    last = rank == WORLD - 1
    assert str(caught.value) == ("" if last else "rank 2 failed in the criterion: KeyError: ") + "'of the criterion'"

    # One rank has begun a mini-batch more than the others.
    ours._serial += rank == 1
    with pytest.raises(RuntimeError, match="ranks are in different mini-batches"):
        loss_of(ours)
    with pytest.raises(RuntimeError, match="ranks are in different mini-batches"):
        loss_of(ours)
    ours.close()
    loss_of(ours).backward()
    loss_of(threads).backward()
    assert_same_gradients(ours, threads)

    with pytest.raises(RuntimeError, match="a pipeline over ranks cannot run within a backward"):
        plain_checkpoint.checkpoint(ours, X, use_reentrant=False).sum().backward()
    ours.close()

    # As if rank 1 had been killed.
    if rank == 1:
        ours._connected().close()
    else:
        with pytest.raises(RankFailed, match="rank 1 has closed its connections and given no reason"):
            loss_of(ours)
    ours.close()

    wrong: dict[str, tuple[str, Any]] = {
        "chunks must be a whole number of at least 1, but got 0": ("chunks", 0),
        "every rank has to call the pipeline alike, but chunks is 3 on rank 0 and 2 on rank 1": ("chunks", 2),
        r"but the balance is \(1, 1, 1\) on rank 0 and \(2, 0, 1\) on rank 1": ("balance", [2, 0, 1]),
        "but training is True on rank 0 and False on rank 1": ("training", False),
        "but silence is 300.0 on rank 0 and None on rank 1": ("silence", None),
    }
    for message, (name, value) in wrong.items():
        before = getattr(ours, name)
        if rank == 1:
            setattr(ours, name, value)
        with pytest.raises((ValueError, RankFailed), match=message):
            loss_of(ours)
        setattr(ours, name, before)
    ours.close()


def wrong_arguments(rank: int) -> None:
    wrong: dict[str, dict[str, Any]] = {
        r"the balance \[5\] has 1 partitions, but there are 3 ranks; give each rank a number": {"balance": [5]},
        r"mesh must be one dimension of a DeviceMesh, such as mesh\['pp'\], but got 3": {"mesh": 3},
        r"device must be this rank's device, but got \['cpu'\]": {"device": ["cpu"]},
        "silence must be a positive number of seconds, or None, but got 0": {"silence": 0},
    }
    for message, options in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            DistributedGPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), **({"balance": [1, 2, 2]} | options))


def averaging_layers_by_themselves_is_refused(rank: int) -> None:
    own = dist.new_group([rank], use_local_synchronization=True)
    average = partial(DistributedDataParallel, process_group=own)
    with pytest.raises(TypeError, match="a partition runs once for each micro-batch"):
        small_of(average)
    changes: dict[str, Callable[[Any], object]] = {
        r"would miss the calls of a pipeline's loss\(\)": average,
        "runs once for each": lambda model: average(model.partition),
        "runs once for each micro-batch": lambda model: setattr(model.partition[0], "inner", average(nn.Linear(2, 2))),
        "not average gradients once": lambda model: replicate(model.partition, process_group=own),
        "was replaced after": lambda model: setattr(model, "partition", nn.Linear(2, 2)),
        r"use it on the partition: fully_shard\(model.partition": lambda model: fully_shard(
            model, mesh=init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "pp"))["dp"]
        ),
    }
    for message, change in changes.items():
        ours, _ = small()
        with pytest.raises((TypeError, RuntimeError), match=message):
            change(ours)
            loss_of(ours)
        ours.close()


def small_of(layer: Callable[[nn.Module], nn.Module]) -> DistributedGPipe:
    return DistributedGPipe(nn.Sequential(*(layer(nn.Linear(4, 4)) for _ in range(WORLD))), [1] * WORLD)


class Late(torch.autograd.Function):
    """Let the first backward begin when all other ranks have closed their connections."""

    waits = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Late.waits:
            Late.waits = False
            dist.barrier()
        return grad


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Late.apply(super().forward(x))
        return y


def the_last_ranks_end_first(rank: int) -> None:
    """They need nothing from those before them, which go on. Nothing is left of connections that were closed."""
    layers = nn.Sequential(Slow(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    ours = DistributedGPipe(layers, [1] * WORLD, chunks=2, checkpoint="never")
    loss_of(ours).backward()
    wires = weakref.ref(ours._wires)
    if rank:
        ours.close()
        dist.barrier()
    ours.close()
    assert all(p.grad is not None for p in ours.parameters())
    ours.zero_grad()
    loss_of(ours).backward()
    gc.collect()
    assert wires() is None
    ours.close()


class Held(nn.Linear):
    """In its first call after `hold`, wait until the others have failed; after `fail`, raise in the third."""

    what, calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if (self.what, self.calls) == ("hold", 1):
            dist.send(torch.zeros(1), dist.get_rank() - 1)
            dist.barrier()
        if (self.what, self.calls) == ("fail", 3):
            dist.recv(torch.zeros(1), dist.get_rank() + 1)
            raise ArithmeticError("it failed")
        return super().forward(x)


def a_failure_leaves_nothing(rank: int) -> None:
    """No error is kept: its frames would hold an earlier loss, whose graph holds all that was sent and expected."""
    ours = DistributedGPipe(nn.Sequential(*(Held(4, 4) for _ in range(WORLD))), [1] * WORLD, chunks=4)
    layer: Any = ours.partition[0]

    def loss_of_held() -> Tensor:
        return ours.loss(nn.functional.mse_loss, torch.ones(4, 4), torch.zeros(4, 4))

    def fail() -> weakref.ref[Any]:
        loss = loss_of_held()
        loss.backward()
        layer.what, layer.calls = {held: "hold", held - 1: "fail"}.get(rank, ""), 0
        with pytest.raises(ArithmeticError if rank == held - 1 else RankFailed, match="it failed"):
            loss_of_held()
        return weakref.ref(ours._wires)

    for held in (1, 2):
        wires = fail()
        layer.what = ""
        if rank != held:
            dist.barrier()
        ours.close()
        loss_of_held().backward()
        for _ in range(100):
            gc.collect()
            if wires() is None:
                break
            time.sleep(0.1)  # a thread may still be about to end
        assert wires() is None, f"rank {held} was held"
    ours.close()


def a_loss_without_the_output(rank: int) -> None:
    ours, threads = small()
    scale = torch.ones(4, requires_grad=True)
    for model in (ours, threads):
        for part in (lambda y: y.detach(), lambda y: y):
            model.loss(lambda y, target, part=part: (part(y) * scale).sum(), X, TARGET).backward()
    assert_same_gradients(ours, threads)
    ours.requires_grad_(False)
    ours.loss(lambda y, target: (y * scale).sum(), X, TARGET).backward()
    ours.close()


def one_rank_is_enough(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "pp"))
    for checkpoint in CHECKPOINTS:
        results = []
        for make in (partial(DistributedGPipe, mesh=mesh["pp"]), partial(GPipe, devices=["cpu"], engine="workers")):
            torch.manual_seed(3)
            results.append(step(make(layers(), [10], chunks=2, checkpoint=checkpoint), 6))
        assert_part_of(*results)


def silence_is_of_a_connection(rank: int) -> None:
    model, _ = small()
    model.silence = 7
    with pytest.raises(RuntimeError, match=r"silence was changed from 300.0 to 7 .* call close\(\)"):
        loss_of(model)
    model.close()
    loss_of(model).backward()
    model.close()


def a_process_forks_after_connections_were_closed(rank: int) -> None:
    model, _ = small()
    for _ in range(2):
        loss_of(model).backward()
        model.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: this one has none that matter
        child = os.fork()
    if not child:
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


SCENES = (
    equal_to_threads,
    without_gradients,
    a_state_of_the_model_loads,
    layers_on_meta_are_filled,
    only_what_is_needed_is_sent,
    large_tensors_of_changing_sizes,
    shapes_are_described_once,
    the_last_ranks_end_first,
    a_failure_leaves_nothing,
    a_loss_without_the_output,
    a_failure_is_heard_by_all,
    calls_in_any_order,
    copies_train,
    a_loss_outlives_its_pipeline,
    errors_between_calls,
    wrong_arguments,
    averaging_layers_by_themselves_is_refused,
    silence_is_of_a_connection,
    a_process_forks_after_connections_were_closed,
    one_rank_is_enough,
)


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    return play(SCENES, WORLD)


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_over_processes(scene: str, said: dict[str, list[str]]) -> None:
    assert said[scene] == [""] * WORLD, "\n".join(said[scene])
