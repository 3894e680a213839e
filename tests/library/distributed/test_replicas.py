"""Test that ranks refuse a kind of data parallelism which would not average their gradients."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.works_with import WithLoss
from torchgpipe.distributed import DistributedGPipe

from .test_calls import TARGET, WORLD, X, gradients, linears, loss_of, small
from .training import assert_same

pytestmark = pytest.mark.ranks(WORLD)


def test_averaging_layers_by_themselves_is_refused() -> None:
    rank = dist.get_rank()
    own = dist.new_group([rank], use_local_synchronization=True)
    average = partial(DistributedDataParallel, process_group=own)
    with pytest.raises(TypeError, match="a partition runs once for each micro-batch"):
        DistributedGPipe(linears(wrap=average), [1] * WORLD)

    def put_into_a_layer(model: Any) -> None:
        model.partition[0].inner = average(nn.Linear(2, 2))

    def replace_the_partition(model: Any) -> None:
        model.partition = nn.Linear(2, 2)

    def shard_all(model: Any) -> None:
        mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "pp"))
        fully_shard(model, mesh=mesh["dp"])

    changes: list[tuple[Callable[[Any], object], str]] = [
        (average, r"does not notice calls of a pipeline's loss\(\)"),
        (lambda model: average(model.partition), "runs once for each"),
        (put_into_a_layer, "runs once for each micro-batch"),
        (
            lambda model: replicate(model.partition, process_group=own),
            "not average gradients once",
        ),
        (replace_the_partition, "was replaced after"),
        (shard_all, r"shard the partition instead: fully_shard\(model.partition"),
    ]
    for change, message in changes:
        ours, _ = small()
        with pytest.raises((TypeError, RuntimeError), match=message):
            change(ours)
            loss_of(ours)
        ours.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
# torch.jit.trace reads all properties, also the old name of one.
@pytest.mark.filterwarnings("ignore:DistributedGPipe. silence is now called timeout")
def test_tracing_does_not_read_what_only_ddp_reads() -> None:
    ours, _ = small()
    with pytest.raises(RuntimeError, match="cannot be traced or exported; load the states of all"):
        torch.jit.trace(ours, X)
    traced = torch.jit.trace(ours.partition, X)
    assert torch.equal(traced(X), ours.partition(X))
    ours.close()


def test_a_step_that_replicas_do_not_see_is_refused_while_they_are_to_average_gradients() -> None:
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    given = nn.functional.mse_loss, X, TARGET
    for model in small():
        replicas = DistributedDataParallel(WithLoss(model), process_group=own)
        with pytest.raises(RuntimeError, match=r"does not see step\(\), .* model.loss.* replicate"):
            model.step(*given)
        for parameter in model.parameters():
            assert parameter.grad is None
        replicas(X, TARGET).backward()
        found = gradients(model)
        model.zero_grad()
        loss_of(model).backward()
        assert_same(found, gradients(model))
        model.evaluate(*given)
        with replicas.no_sync():
            model.step(*given)
        del replicas
        gc.collect()
        model.step(*given)
