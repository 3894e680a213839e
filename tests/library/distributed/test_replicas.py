"""Test replicas of a pipeline over ranks: how they train and are saved, and what is refused.

Ranks refuse a kind of data parallelism which would not average their gradients.
"""

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing import assert_close

from examples.works_with import WithLoss
from reproduce.machine.description import ROOT
from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.state.saves import Saves

from ..trace.test_names import Language
from .test_calls import TARGET, WORLD, X, gradients, linears, loss_of, small
from .test_saves import shared_folder
from .test_tied import adam, gpt, words
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
        (average, r"would not notice its step\(\) and loss\(\); use replicate\(model"),
        (lambda model: average(model.partition), "runs once for each"),
        (put_into_a_layer, "runs once for each micro-batch"),
        (
            lambda model: replicate(model.partition, process_group=own),
            r"not average gradients once; use replicate\(model, .* no two partitions share",
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


def of_tied(schedule: str) -> tuple[DistributedGPipe, Any]:
    """Return a replica of a pipeline whose first and last layer share a weight, and its mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    balance = [1, 1, 1, 1] if schedule == "ZBVZeroBubble" else [2, 2]
    model = DistributedGPipe(gpt(), balance, mesh=mesh["pp"], chunks=2, schedule=schedule)
    # Wait until all ranks have made their pipeline. Otherwise, if a rank failed in its first call,
    # another rank could raise this error while it still makes its pipeline.
    dist.barrier()
    return model, mesh["dp"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("way", ["replicate", "fully_shard", "sharded optimizer"])
def test_replicas_with_a_tied_weight(way: str, schedule: str) -> None:
    """Check replicas with a shared weight, in both ways that error messages and docs name.

    With "sharded optimizer", each replica updates only some of a partition's parameters.
    """
    plain, (model, mesh) = gpt(), of_tied(schedule)
    if way != "fully_shard":
        replicate(model, device_mesh=mesh)
    for layer in model.children():
        if way == "fully_shard" and isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    optimizers: list[torch.optim.Optimizer] = [SGD(plain.parameters(), lr=0.5)]
    if way == "sharded optimizer":
        group = mesh.get_group()
        sharded = ZeroRedundancyOptimizer(model.parameters(), SGD, process_group=group, lr=0.5)
        optimizers.append(sharded)
    else:
        optimizers.append(SGD(model.parameters(), lr=0.5))
    for seed in range(3):
        x, target = words(seed)
        cross_entropy(plain(x), target).backward()
        part = slice(mesh.get_local_rank(), None, 2)
        model.step(cross_entropy, x[part], target[part])
        for p in model.parameters() if way == "fully_shard" else ():
            if not isinstance(p, DTensor):
                assert p.grad is not None
                dist.all_reduce(p.grad, group=mesh.get_group())
                p.grad /= mesh.size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = plain.state_dict()
    for name, found in model.state_dict().items():
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, expected[name])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("partitions", [[0, 1], [0]])
def test_sharding_that_makes_two_parameters_of_one_is_refused(partitions: list[int]) -> None:
    model, mesh = of_tied("ZBVZeroBubble")
    for j in partitions:
        fully_shard(model.partitions[j], mesh=mesh)
    message = "'0.weight' and '3.weight' were one parameter .* use replicate.model, device_mesh"
    with pytest.raises((TypeError, RankFailed), match=message):
        model.step(cross_entropy, *words())


@pytest.mark.filterwarnings("ignore:rank . has no parameters")
@pytest.mark.ranks(4)
def test_layers_within_a_partition_share_a_weight_that_is_sharded() -> None:
    """Check that a partition whose layers share a weight can be sharded as a whole by FSDP."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = DistributedGPipe(nn.Sequential(first, last, nn.Tanh()), [2, 1], mesh=mesh["pp"])
    fully_shard(model.partition, mesh=mesh["dp"])
    for _ in range(2):
        model.step(nn.functional.mse_loss, X, X)


def of_traced(way: str, seed: int) -> DistributedGPipe | GPipe:
    """Return a pipeline of a traced module.

    Args:
        way: The kind of pipeline. With "replicate" or "fully_shard", it is a replica, and this
            function averages the gradients. With "alone", it is over all ranks. With "one process",
            it is a `GPipe`.
        seed: The random seed of the module's parameters.
    """
    layers = sequential(Language(seed), words()[0])
    assert len(layers) == 5
    if way == "one process":
        return GPipe(layers, [1, 4], devices=["cpu"] * 2, chunks=2)
    if way == "alone":
        return DistributedGPipe(layers, [2, 1, 1, 1], chunks=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = DistributedGPipe(layers, [2, 3], mesh=mesh["pp"], chunks=2)
    if way == "replicate":
        replicate(model, device_mesh=mesh["dp"])
    for part in model.modules():
        # The embedding is not sharded, because the last partition shares its weight.
        if way == "fully_shard" and isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh["dp"])
    return model


def losses(model: Any, optimizer: torch.optim.Optimizer, *seeds: int) -> list[float]:
    """Train on one mini-batch for each seed, equal in all replicas, and return the losses."""
    found = []
    for seed in seeds:
        found.append(model.step(cross_entropy, *words(seed)).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("way", ["alone", "replicate", "fully_shard"])
def test_going_on(way: str, *, cpu_offload: bool, tmp_path: Path) -> None:
    """Check that a saved training continues alike on equally many ranks and in one process."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=cpu_offload)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": moments}

    folder = shared_folder(tmp_path)
    model = of_traced(way, 0)
    optimizer = adam(model)
    losses(model, optimizer, 0, 1)
    save(state(model, optimizer), checkpoint_id=folder)
    expected = losses(model, optimizer, 2, 3)
    for other_way in (way, "one process"):
        other = of_traced(other_way, 1)
        optimizer = adam(other)
        found = state(other, optimizer)
        load(found, checkpoint_id=folder)
        both: Any = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(other, optimizer, **both, options=options)
        went_on = losses(other, optimizer, 2, 3)
        if other_way == way:
            assert went_on == expected
        assert_close(went_on, expected)


@pytest.mark.ranks(4)
def test_one_replica_is_saved_and_all_replicas_load_it(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = of_traced("replicate", 0)
    optimizer = adam(model)
    losses(model, optimizer, 0, 1)
    first = dist.get_rank() < 2
    if first:
        Saves(folder).save(1, model, optimizer)
    expected = losses(model, optimizer, 2, 3)
    other = of_traced("replicate", 1)
    optimizer = adam(other)
    found = Saves(folder).load(other, optimizer)
    assert found == {"step": 1}
    assert losses(other, optimizer, 2, 3) == expected


@pytest.mark.ranks(4)
def test_a_second_replica_cannot_be_saved_into_the_same_folder(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = of_traced("replicate", 0)
    optimizer = adam(model)
    losses(model, optimizer, 0)
    saves = Saves(folder)
    first = dist.get_rank() < 2
    if first:
        saves.save(0, model, optimizer)
    dist.barrier()
    if not first:
        with pytest.raises(RuntimeError, match=r"another job saves .* one of several replicas"):
            saves.save(0, model, optimizer)
    dist.barrier()


@pytest.mark.ranks(4)
def test_a_replica_that_has_only_parts_of_parameters_is_neither_saved_nor_loaded(
    tmp_path: Path,
) -> None:
    folder = shared_folder(tmp_path)
    whole = of_traced("replicate", 0)
    if dist.get_rank() < 2:
        Saves(folder).save(0, whole, adam(whole))
    dist.barrier()
    model = of_traced("fully_shard", 0)
    assert Saves(folder).load(model, None) == {"step": 0}
    refusal = "is a DTensor, as made by fully_shard, .* cannot save or load it alone"
    with pytest.raises((ValueError, RankFailed), match=refusal):
        Saves(folder).load(model, adam(model))
    model = of_traced("fully_shard", 0)
    with pytest.raises((ValueError, RankFailed), match=refusal):
        Saves(shared_folder(tmp_path / "other")).save(0, model, adam(model))


@pytest.mark.ranks(4)
def test_replicas_with_different_numbers_of_targets_can_take_the_mean_over_all_targets() -> None:
    """Check that the code for replicas in docs/processes.md gives a plain model's gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50))
    plain = copy.deepcopy(layers)
    texts = torch.randint(50, (16, 8))
    targets = texts.clone()
    targets[:8, 3:] = -100
    targets[8:, 7:] = -100
    cross_entropy(plain(texts).transpose(1, 2), targets).backward()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = DistributedGPipe(layers, [2, 2], mesh=mesh["pp"], chunks=4, schedule="1F1B")
    replicate(model, device_mesh=mesh["dp"])
    first = 8 * mesh["dp"].get_local_rank()
    names: dict[str, Any] = {"dist": dist, "mesh": mesh, "model": model}
    names |= {"cross_entropy": cross_entropy, "x": texts[first : first + 8]}
    names["target"] = targets[first : first + 8]
    page = (ROOT / "docs" / "processes.md").read_text()
    _, _, after = page.partition("**Replicas with different numbers of targets.**")
    _, code, _ = after.split("```", 2)
    exec(code.removeprefix("python"), names)

    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name].grad)
    model.close()
