"""Tests of the recipes in examples/, which are short training programs.

A recipe must have the losses that its model has without a pipeline. The recipes are run by the
commands in their docstrings. To get the losses without a pipeline, tests run a recipe with
`WithoutPipeline` in the place of `GPipe`.
"""

import ast
import copy
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchgpipe
from reproduce.machine.description import ROOT
from torchgpipe.state.saves import Saves

from ..start import TORCHRUN, python

FOLDER = ROOT / "examples"
OTHERS = {"gpt_model.py", "train.py", "works_with.py"}
RECIPES = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in OTHERS)
LONGEST = 80
"""The largest number of lines of a recipe."""
SAVED = {"gpt.py": "states", "lora.py": "adapters", "data_parallel.py": "state"}
"""The last word of a command: what the recipe saves, and where."""
ROUNDED = 1e-4
"""Losses in float32 differ by less, as sums over micro-batches are rounded in another order."""
ROUNDED_TO_BFLOAT16 = 2e-2
"""Losses in bfloat16 differ by less: it has 8 bits, so each product is rounded by up to 0.4%."""


class WithoutPipeline(nn.Module):
    """A stand-in for `GPipe` that trains its module without a pipeline.

    It has the methods of `GPipe` that the recipes call.
    """

    rank = 0

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self.module = module

    def step(self, criterion: Any, input: Any, target: Any, **options: Any) -> Tensor:
        """Run forward and backward, and return the loss.

        If the input is a dictionary, the model is one of Hugging Face, which computes the loss
        itself.
        """
        if isinstance(input, dict):
            loss = self.module(**input, labels=target).loss
        else:
            loss = criterion(self.module(input), target)
        loss.backward()
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self.parameters(), max_norm)


def commands(recipe: str) -> list[str]:
    """Return the commands in the docstring of a recipe."""
    docstring = ast.get_docstring(ast.parse((FOLDER / recipe).read_text())) or ""
    return re.findall(r"^    ((?:python|torchrun) .*)$", docstring, re.MULTILINE)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\d: loss (\S+)", printed)]


def by_command(recipe: str, number: int, folder: Path) -> list[float]:
    """Run a command from the docstring of a recipe, and return the losses that it prints.

    Args:
        recipe: The name of the recipe's file.
        number: The index of the command in the docstring.
        folder: The folder in which the recipe saves its state.
    """
    program, *arguments = shlex.split(commands(recipe)[number])
    if recipe in SAVED:
        arguments[-1] = str(folder / arguments[-1])
    if program == "torchrun":
        arguments[:0] = TORCHRUN
    # torchrun leaves folders behind, where TMPDIR says.
    process = python(*arguments, errors=subprocess.STDOUT, TMPDIR=str(folder))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return losses(printed)


def in_this_process(recipe: str, folder: Path) -> dict[str, Any]:
    """Run a recipe in this process, and return its global variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.delenv("RANK", raising=False)
        patch.setattr("sys.argv", [recipe, str(folder / SAVED.get(recipe, ""))])
        return runpy.run_path(str(FOLDER / recipe))


def without_pipeline(recipe: str, folder: Path) -> dict[str, Any]:
    """Run a recipe in this process, with `WithoutPipeline` in place of `GPipe`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchgpipe, "GPipe", WithoutPipeline)
        patch.setattr(torchgpipe, "pipeline", WithoutPipeline)
        patch.setattr(torchgpipe, "sequential", lambda module, *args, **options: module)
        patch.setattr("torchgpipe.balance.balance_by_size", lambda *args, **options: [])
        patch.setattr(Saves, "save", lambda *args, **others: None)
        return in_this_process(recipe, folder)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_short_and_in_the_guide(recipe: str) -> None:
    assert (FOLDER / recipe).read_text().count("\n") <= LONGEST
    guide = (ROOT / "docs" / "guide.md").read_text()
    command, *_ = commands(recipe)
    row = rf"^\| \[`{recipe}`\]\(../examples/{recipe}\) \| .* \| `{re.escape(command)}` \|$"
    assert re.search(row, guide, re.MULTILINE)


def assert_as_without_pipeline(
    recipe: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Assert that a recipe has the losses of its model without a pipeline.

    The recipe runs twice: in one process, and over ranks.

    Returns:
        The global variables of the recipe after the run in one process.
    """
    without_pipeline(recipe, folder / "without")
    expected = losses(capsys.readouterr().out)
    assert expected[-1] < 0.9 * expected[0]
    tolerance = ROUNDED_TO_BFLOAT16 if recipe == "gpt.py" else ROUNDED
    variables = in_this_process(recipe, folder / "alone")
    alone = losses(capsys.readouterr().out)
    assert alone == pytest.approx(expected, rel=tolerance)
    ranks = by_command(recipe, 1, folder)
    # Only the last bits of convolutions differ from one process to the next.
    assert ranks == pytest.approx(alone, rel=ROUNDED)
    return variables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder in which recipes save, with subfolders for the runs in this process."""
    (tmp_path / "without").mkdir()
    (tmp_path / "alone").mkdir()
    return tmp_path


@pytest.mark.slow
def test_the_gpt_goes_on_from_a_saved_state(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that one process can continue the training of a GPT that two ranks have saved.

    The loss must be that of an uninterrupted training.
    """
    variables = assert_as_without_pipeline("gpt.py", folder, capsys)
    assert variables["cosine"].get_last_lr() == pytest.approx([0.0], abs=1e-9)
    expected = variables["loss"].item() * variables["ACCUMULATE"]
    newest = max((folder / "states").glob("*-step-3"))
    shutil.rmtree(newest)
    in_this_process("gpt.py", folder)
    (loss,) = losses(capsys.readouterr().out)
    assert loss == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.slow
def test_a_model_of_hugging_face(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a recipe has the losses that its Hugging Face model computes from labels."""
    pytest.importorskip("transformers", reason="pip install '.[huggingface]' installs transformers")
    assert_as_without_pipeline("hugging_face.py", folder, capsys)


@pytest.mark.slow
def test_lora_trains_and_saves_adapters_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = assert_as_without_pipeline("lora.py", folder, capsys)
    trained = variables["module"].state_dict()
    # Each rank has saved the adapters of its own layers.
    saved: dict[str, Tensor] = {}
    for rank in range(2):
        saved |= torch.load(folder / f"adapters-{rank}")
    assert {*saved} == {name for name in trained if ".down." in name or ".up." in name}
    for name, adapter in saved.items():
        assert torch.allclose(adapter, trained[name], atol=1e-5)
    # Everything else is as it was.
    torch.manual_seed(0)
    module = variables["GPT"](words=50, length=16)
    variables["add_adapters"](module)
    for name, parameter in module.state_dict().items():
        assert name in saved or torch.equal(parameter, trained[name])


@pytest.mark.slow
def test_the_unet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = assert_as_without_pipeline("unet.py", folder, capsys)
    assert len(variables["model"].balance) == 2


def train_data_parallel() -> tuple[nn.Module, list[float]]:
    """Train the model of data_parallel.py without a pipeline.

    A step uses the mini-batches of all replicas.

    Returns:
        The trained model, and the loss of the last step of each epoch.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, 16, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    printed = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), target)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        printed.append(loss.item())
    return model, printed


@pytest.mark.slow
# PyTorch warns that a single process loads what several processes have saved.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_data_parallel(folder: Path) -> None:
    trained, expected = train_data_parallel()
    assert by_command("data_parallel.py", 0, folder) == pytest.approx(expected, rel=ROUNDED)
    layers = copy.deepcopy(trained)
    for parameter in layers.parameters():
        nn.init.zeros_(parameter)
    state = layers.state_dict()
    load({"model": state}, checkpoint_id=folder / "state")
    for name, parameter in trained.state_dict().items():
        assert torch.allclose(state[name], parameter, atol=1e-5)
