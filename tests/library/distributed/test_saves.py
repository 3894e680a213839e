"""Test that ranks can save the state of a training, and go on from it with the same results.

The tests load a state on the same number of ranks, on fewer ranks, and in one process. If one rank
fails to save, all ranks must raise an error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.state.saves import Saves
from torchgpipe.timeline import record

from ...behaviours.compare import differences
from ..state.test_contents import Growing
from .training import adam, assert_goes_on, assert_same, layers, trained

WORLD = 4
pytestmark = pytest.mark.ranks(WORLD)

Model = GPipe | DistributedGPipe
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def shared_folder(folder: Path) -> Path:
    """Return the folder that rank 0 gives, on all ranks. Each rank's `tmp_path` differs."""
    where = [folder]
    dist.broadcast_object_list(where)
    return where[0]


@pytest.mark.parametrize("chunks", [3, 1])
def test_going_on(chunks: int, tmp_path: Path) -> None:
    """Check that equally many ranks continue from a saved state as if never interrupted.

    Dropout must draw the same numbers, too.
    """
    options: dict[str, Any] = {"chunks": chunks, "deferred_batch_norm": True}

    def make(seed: int) -> tuple[DistributedGPipe, torch.optim.Optimizer]:
        model = DistributedGPipe(layers(seed, draws=True), [2, 2, 2, 2], **options)
        return model, adam(model)

    assert_goes_on(shared_folder(tmp_path), make)


def state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer}


def load_by_pytorch(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
    found = state(model, optimizer)
    load(found, checkpoint_id=folder)
    parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=OPTIONS)


# A function that saves a model and an optimizer in a folder, and a function that loads them.
WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "Saves": (
        lambda folder, *both: Saves(folder).save(1, *both),
        lambda folder, *both: Saves(folder).load(*both),
    ),
    "PyTorch": (lambda folder, *both: save(state(*both), checkpoint_id=folder), load_by_pytorch),
}


@pytest.mark.parametrize("write, read", WAYS.values(), ids=WAYS)
def test_on_other_ranks(
    write: Callable[..., object], read: Callable[..., object], tmp_path: Path
) -> None:
    """Check that two ranks and one process can continue from a state that four ranks saved.

    This model has no dropout, because dropout masks depend on the balance.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["pp"]
    model = DistributedGPipe(layers(), [2, 2, 2, 2], chunks=3)
    others: list[Model] = [
        DistributedGPipe(layers(5), [3, 5], mesh=mesh, chunks=3),
        GPipe(layers(6), [1, 6, 1], devices=["cpu"] * 3, chunks=3),
    ]
    folder = shared_folder(tmp_path)
    optimizer = adam(model)
    trained(model, optimizer, 5)
    write(folder, model, optimizer)
    expected = trained(model, optimizer, 6)
    for other in others:
        optimizer = adam(other)
        read(folder, other, optimizer)
        assert_same(trained(other, optimizer, 6), expected, "loss")


def test_failures(tmp_path: Path) -> None:
    """Check that all ranks raise an error if one rank cannot save.

    A rank cannot save if its folder is not that of the other ranks, or if the values to save differ
    between ranks.
    """
    rank = dist.get_rank()
    folder = shared_folder(tmp_path)
    model = DistributedGPipe(layers(), [2, 2, 2, 2])
    optimizer = adam(model)
    trained(model, optimizer, 0)
    error: type[Exception] = RuntimeError if rank == 2 else RankFailed
    seen_folder = folder / "other" if rank == 2 else folder
    told = r"rank 2 does not see .*part-\w+, but rank 0 does: all ranks need one folder"
    with pytest.raises(error, match=told):
        Saves(seen_folder).save(0, model, optimizer)
    model.close()
    assert [*folder.glob("*-step-*")] == []

    saves = Saves(folder)
    saves.save(0, model, optimizer)
    nan = float("nan")
    data = {"here": torch.tensor([rank]), "everywhere": 1}
    values: dict[str, Any] = {"epoch": nan, "losses": [torch.tensor([nan, 1.0])]}
    with pytest.raises((ValueError, RankFailed), match="different values of data to save"):
        saves.save(1, model, optimizer, data=data, **values)
    model.close()
    saves.save(1, model, optimizer)
    assert saves.load(model, optimizer) == {"step": 1}

    other = Saves(shared_folder(tmp_path / "other"))
    trained(model, optimizer, 0)
    for step in (0, 1):
        other.save(step, model, optimizer)
    given = other if rank == 2 else saves
    told = r"rank 2 sees another state in .*000002-step-1 than rank 0: all ranks need one"
    with pytest.raises(error, match=told):
        given.load(model, optimizer)
    model.close()

    linears = [nn.Linear(5, 5) for _ in range(5)]
    another_model = DistributedGPipe(nn.Sequential(*linears), [1, 1, 1, 2])
    # Every rank finds the error. A rank may hear of another rank's error before it raises its own.
    told = r"belongs to another model: it lacks model\.\d\.weight"
    with pytest.raises((ValueError, RankFailed), match=told) as caught:
        Saves(folder).load(another_model, None)
    assert "\n" not in str(caught.value)


def two_optimizers(model: nn.Module, *, exchanged: bool = False) -> list[torch.optim.Optimizer]:
    """Return two optimizers: an SGD for all weights, and an Adam for all biases.

    With `exchanged`, the SGD has the biases and the Adam has the weights.
    """
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    if exchanged:
        weights, biases = biases, weights
    return [torch.optim.SGD(weights, 0.1, momentum=0.9), torch.optim.Adam(biases)]


def growing_layers(seed: int) -> nn.Sequential:
    """Return eight layers with an extra state (`get_extra_state`) that grows with each call."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Growing(4, 4) for _ in range(2 * WORLD)])


def test_several_optimizers_and_extra_state_that_grows(tmp_path: Path) -> None:
    """Check that ranks save two optimizers, and that all trainings from this state are equal.

    The state is loaded on ranks, in one process, and into plain layers. Each training must have the
    same bits as the training that has saved the state. A step has only two micro-batches, so the
    order in which gradients are added does not matter.
    """

    def train(model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        for _ in range(2):
            model.step(nn.functional.mse_loss, x, x.square())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    x = torch.linspace(-1, 1, 16).view(4, 4)
    saves = Saves(shared_folder(tmp_path))
    ours = DistributedGPipe(growing_layers(0), [2] * WORLD, chunks=2)
    optimizers = two_optimizers(ours)
    train(ours, optimizers)
    others = {"sparse": torch.eye(3).to_sparse(), "small": torch.ones(2).to(torch.float8_e4m3fn)}
    saves.save(2, ours, optimizers, **others)
    train(ours, optimizers)

    twice: dict[str, Any] = {"chunks": 2, "schedule": "ZBVZeroBubble"}
    over_ranks = DistributedGPipe(growing_layers(1), [1] * 2 * WORLD, **twice)
    alone = GPipe(growing_layers(1), [2] * 4, devices=["cpu"] * 2, **twice)
    for model in (over_ranks, alone):
        theirs = two_optimizers(model)
        found = saves.load(model, theirs[::-1])
        assert differences(found, {"step": 2, **others}) == []
        train(model, theirs)

    plain = growing_layers(1)
    with pytest.raises(ValueError, match=r"the optimizer Adam for 0\.bias, not with SGD"):
        saves.load(plain, two_optimizers(plain, exchanged=True))
    theirs = two_optimizers(plain)
    assert saves.load(plain, theirs) is not None
    train(GPipe(plain, [2 * WORLD], devices=["cpu"], chunks=2), theirs)
    whole = plain.state_dict()
    for model in (ours, over_ranks, alone):
        part = model.state_dict()
        assert differences(part, {name: whole[name] for name in part}) == []


def test_a_value_that_cannot_be_pickled_is_named_on_all_ranks(tmp_path: Path) -> None:
    model = DistributedGPipe(layers(), [2, 2, 2, 2])
    saves = Saves(shared_folder(tmp_path))
    value = (lambda: 0) if dist.get_rank() == 1 else 0
    dist.barrier()  # fail only after all ranks have made their pipeline
    with pytest.raises((TypeError, RankFailed), match="scheduler cannot be saved, because it"):
        saves.save(0, model, None, scheduler=value)
    model.close()
    assert saves.load(model, None) is None


@pytest.mark.parametrize(
    "name, only, told",
    [
        ("save", 0, r"rank 0 is in save\(\) after mini-batch 3, but rank . is in mini-batch 4: "),
        (
            "clip_grad_norm_",
            1,
            r"rank 0 is in mini-batch 4, but rank 1 is in clip_grad_norm_\(\) after mini-batch 3: ",
        ),
        (
            "record",
            0,
            r"rank 0 is in record\(\) after mini-batch 3, but rank . is in mini-batch 4: ",
        ),
    ],
)
def test_a_call_on_one_rank_only_is_named(name: str, only: int, told: str, tmp_path: Path) -> None:
    model = DistributedGPipe(layers(), [2, 2, 2, 2])
    optimizer = adam(model)
    trained(model, optimizer, 0)
    with pytest.raises(RuntimeError, match=f"{told}every rank has to .* the same holds for clip_"):
        if dist.get_rank() == only and name == "save":
            Saves(tmp_path).save(0, model, optimizer)
        elif dist.get_rank() == only and name == "record":
            with record(model):
                pass
        elif dist.get_rank() == only:
            model.clip_grad_norm_(1.0)
        trained(model, optimizer, 1)
    model.close()


def test_a_group_without_parameters_on_a_rank_gets_its_options(tmp_path: Path) -> None:
    """Check that a learning rate is the same on all ranks after a state was loaded.

    Rank 0 has no bias, and so no parameter of the second group.
    """

    def grouped() -> tuple[DistributedGPipe, torch.optim.Optimizer, Any]:
        made = nn.Sequential(nn.Linear(4, 4, bias=False), *[nn.Linear(4, 4) for _ in range(3)])
        model = DistributedGPipe(made, [1, 1, 1, 1])
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for p in model.parameters():
            (decayed if p.dim() > 1 else others).append(p)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def train() -> None:
        loss = model.step(nn.functional.mse_loss, torch.ones(4, 4), torch.zeros(4, 4))
        assert not loss.isnan()
        optimizer.step()
        scheduler.step()

    saves = Saves(shared_folder(tmp_path))
    model, optimizer, scheduler = grouped()
    train()
    saves.save(0, model, optimizer, scheduler=scheduler.state_dict())
    expected = [group["lr"] for group in optimizer.param_groups]
    model, optimizer, scheduler = grouped()
    found = saves.load(model, optimizer)
    assert found is not None
    scheduler.load_state_dict(found["scheduler"])
    assert [group["lr"] for group in optimizer.param_groups] == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    train()
    saves.save(1, model, optimizer, scheduler=scheduler.state_dict())
