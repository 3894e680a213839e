"""Calls of a pipeline over processes: any order works that is the same on all ranks; errors are one line."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as plain_checkpoint

from examples.works_with import WithLoss
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed

from .training import assert_same

WORLD = 3
pytestmark = pytest.mark.ranks(WORLD)
X, TARGET = torch.arange(36.0).view(9, 4).sin(), torch.arange(36.0).view(9, 4).cos()


def linears(
    count: int = WORLD, wrap: Callable[..., nn.Module] = lambda layer: layer
) -> nn.Sequential:
    return nn.Sequential(*(wrap(nn.Linear(4, 4)) for _ in range(count)))


def small(**options: Any) -> Any:
    """Return a pipeline over ranks, one over threads, and a function that runs a step and returns gradients."""
    pair = []
    for make in (DistributedGPipe, partial(GPipe, devices=["cpu"] * WORLD, engine="workers")):
        torch.manual_seed(6)
        pair.append(make(linears(), [1] * WORLD, chunks=3, **options))
    return pair


def loss_of(model: Any, x: Tensor = X) -> Tensor:
    loss: Tensor = model.loss(nn.functional.mse_loss, x, TARGET)
    return loss


def assert_same_gradients(ours: Any, threads: Any) -> None:
    found, expected = (
        {name: p.grad for name, p in each.named_parameters()} for each in (ours, threads)
    )
    assert_same(found, expected)
    ours.zero_grad()
    threads.zero_grad()


def test_calls_in_any_order() -> None:
    """Two pipelines at once, with evaluation and unused losses in between, and two backwards of one loss."""
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


def test_a_parameter_hook_that_raises_is_told_to_all_ranks() -> None:
    """Gradients are handed on in the end of a step, when other ranks may have ended theirs."""
    model, _ = small(schedule="1F1B")

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("no such luck")

    if model.rank == 1:
        model.partition[0].weight.register_hook(fail)
    with pytest.raises((ArithmeticError, RankFailed), match="no such luck"):
        for _ in range(2):
            model.step(nn.functional.mse_loss, X, TARGET)
    model.close()


def test_a_loss_without_the_output_and_one_that_outlives_its_pipeline() -> None:
    ours, threads = small()
    scale = torch.ones(4, requires_grad=True)
    for model in (ours, threads):
        for part in (lambda y: y.detach(), lambda y: y):
            model.loss(lambda y, target, part=part: (part(y) * scale).sum(), X, TARGET).backward()
    assert_same_gradients(ours, threads)
    ours.requires_grad_(False)
    ours.loss(lambda y, target: (y * scale).sum(), X, TARGET).backward()
    model = small()[0]
    loss, parameters = loss_of(model), [*model.parameters()]
    del model
    gc.collect()
    loss.backward()
    assert any(p.grad is not None for p in parameters)


def test_errors_between_calls() -> None:
    """An error is raised at once, the same on all ranks."""
    rank = dist.get_rank()
    ours, threads = small()
    loss = loss_of(ours)
    ours.close()
    with pytest.raises(
        RuntimeError, match=r"connections were closed by close\(\) since this mini-batch"
    ):
        loss.backward()
    ended = ours._connections.liveness
    ended.fail("what breaks once a rank has closed its connections is no failure")
    assert not ended.stopped

    loss = loss_of(ours)
    loss.backward()
    ours.zero_grad()
    dist.barrier()  # the next failure must not happen before another rank's backward has ended
    with pytest.raises(RuntimeError, match="the pipeline was already gone through backward"):
        if rank == 1:
            loss.backward()
        loss_of(ours)
    ours.close()

    with pytest.raises((KeyError, RankFailed)) as caught:
        ours.loss(Mock(side_effect=KeyError("of the criterion")), X, TARGET)
    last = rank == WORLD - 1
    assert (
        str(caught.value)
        == ("" if last else "rank 2 failed in the criterion: KeyError: ") + "'of the criterion'"
    )

    # One rank has begun one more mini-batch than the others.
    ours._serial += rank == 1
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"rank \d is in mini-batch \d, and rank \d in \d: every rank has to"
        ):
            loss_of(ours)
    ours.close()
    loss_of(ours).backward()
    loss_of(threads).backward()
    assert_same_gradients(ours, threads)

    for name, given in (("max_norm", (2.0, 2.0)), ("norm_type", (1.0, 1.0))):
        with pytest.raises(
            (ValueError, RankFailed),
            match=f"clip_grad_norm_ alike, but {name} is ..0 on rank . and",
        ):
            ours.clip_grad_norm_(*(given if rank == 1 else (1.0, 2.0)))
        ours.close()
    loss_of(ours).backward()
    ours.clip_grad_norm_(float("nan"))
    ours.zero_grad()

    ours.timeout = 7
    with pytest.raises(
        RuntimeError, match=r"timeout was changed from 300.0 to 7 .* call close\(\)"
    ):
        loss_of(ours)
    ours.timeout = 300.0

    with pytest.raises(RuntimeError, match="a pipeline over ranks cannot run within a backward"):
        plain_checkpoint.checkpoint(ours, X, use_reentrant=False).sum().backward()
    ours.close()
    ours.rank = (rank + 1) % WORLD  # as if this part had been saved on another rank
    with pytest.raises(
        RuntimeError, match=f"this is the part of rank {ours.rank}, and runs on that rank only"
    ):
        loss_of(ours)
    ours.rank = rank

    wrong: dict[str, tuple[str, Any]] = {
        "chunks must be a whole number of at least 1, but got 0": ("chunks", 0),
        "every rank has to call the pipeline alike, but chunks is 3 on rank 0 and 2 on rank 1": (
            "chunks",
            2,
        ),
        r"but the balance is \(1, 1, 1\) on rank 0 and \(2, 0, 1\) on rank 1": (
            "balance",
            [2, 0, 1],
        ),
        "but training is True on rank 0 and False on rank 1": ("training", False),
        "but timeout is 300.0 on rank 0 and None on rank 1": ("timeout", None),
    }
    for message, (name, value) in wrong.items():
        before = getattr(ours, name)
        if rank == 1:
            setattr(ours, name, value)
        with pytest.raises((ValueError, RankFailed), match=message):
            loss_of(ours)
        setattr(ours, name, before)
    with pytest.raises(
        (TypeError, RankFailed), match=r"takes one input, .* but got 1 by place, mask"
    ):
        ours(X, mask=X)


def test_wrong_arguments() -> None:
    other, nested = dist.get_rank() == 1, linears(5, nn.Sequential)
    wrong: dict[str, dict[str, Any]] = {
        r"the balance \[5\] has 1 partitions, but there are 3 ranks; give each rank a number": {
            "balance": [5]
        },
        r"mesh must be one dimension of a DeviceMesh, such as mesh\['pp'\], but got 3": {"mesh": 3},
        r"device must be this rank's device, but got \['cpu'\]": {"device": ["cpu"]},
        "timeout must be a positive number of seconds, or None, but got 0": {"timeout": 0},
        "the kind of device is 'cpu' on rank 0 and 'meta' on rank 1": {
            "device": "meta" if other else "cpu"
        },
        "the schedule is '1f1b' on rank 0 and 'gpipe' on rank 1": {
            "schedule": "GPipe" if other else "1F1B"
        },
        "there are 4 partitions for 3 devices; give a balance of 6": {
            "schedule": "Interleaved1F1B",
            "balance": [1, 1, 1, 2],
        },
        "the checksum of its parameters' names and shapes is .* on rank 0": {
            "module": nested if other else linears(5)
        },
    }
    for message, options in wrong.items():
        with pytest.raises((TypeError, ValueError, RankFailed), match=message):
            loss_of(DistributedGPipe(**{"module": linears(5), "balance": [1, 2, 2], **options}))
    with pytest.raises(ValueError, match=r"rank \d holds 2 partitions: see model.partitions"):
        DistributedGPipe(linears(6), [1] * 6, schedule="ZBVZeroBubble").partition  # noqa: B018


def test_the_old_name_of_the_timeout() -> None:
    with pytest.warns(
        DeprecationWarning, match="silence is called timeout now, and the old name will go"
    ) as warned:
        model = DistributedGPipe(linears(), [1] * WORLD, silence=7)
        assert model.timeout == 7
        model.silence = 9
        assert model.silence == 9
    assert [each.filename for each in warned] == [__file__] * 3
    state = model.__getstate__()  # as if the pipeline had been pickled under the old name
    state["silence"] = state.pop("timeout")
    model.__setstate__(state)
    assert model.timeout == 9 and "silence" not in vars(model)


def test_averaging_layers_by_themselves_is_refused() -> None:
    rank = dist.get_rank()
    own = dist.new_group([rank], use_local_synchronization=True)
    average = partial(DistributedDataParallel, process_group=own)
    with pytest.raises(TypeError, match="a partition runs once for each micro-batch"):
        DistributedGPipe(linears(wrap=average), [1] * WORLD)
    changes: dict[str, Callable[[Any], object]] = {
        r"would miss the calls of a pipeline's loss\(\)": average,
        "runs once for each": lambda model: average(model.partition),
        "runs once for each micro-batch": lambda model: setattr(
            model.partition[0], "inner", average(nn.Linear(2, 2))
        ),
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


def test_a_step_that_replicas_do_not_see_is_refused_while_they_are_to_average_gradients() -> None:
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    given = nn.functional.mse_loss, X, TARGET
    for model in small():
        replicas = DistributedDataParallel(WithLoss(model), process_group=own)
        with pytest.raises(RuntimeError, match=r"does not see step\(\), .* model.loss.* replicate"):
            model.step(*given)
        assert all(p.grad is None for p in model.parameters())
        replicas(X, TARGET).backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        loss_of(model).backward()
        assert_same(found, {name: p.grad for name, p in model.named_parameters()})
        model.evaluate(*given)
        with replicas.no_sync():
            model.step(*given)
        del replicas
        gc.collect()
        model.step(*given)


def test_a_connection_that_fails_is_told_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, threads = small()
    ours.close()

    said = (
        "failed with [pair.cc:561] Connection closed by peer [::1]:7. This is typically caused by"
    )
    with monkeypatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", Mock(side_effect=RuntimeError(said)))
        told = (
            rf"rank {dist.get_rank()} connected to others \(Connection closed by peer \[::1\]:7\)"
        )
        with pytest.raises(RankFailed, match=f"an unknown rank ended while {told}"):
            loss_of(ours)
    loss_of(ours).backward()
    loss_of(threads).backward()
    assert_same_gradients(ours, threads)
