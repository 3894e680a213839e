"""Tests of examples/train.py, and of the code in the tutorial and the README.

The code must compute the same losses in one process and over ranks. The example must continue its
training after failures of ranks.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from reproduce.machine.description import ROOT
from reproduce.machine.git import git
from torchgpipe.state.saved_files import read

from .behaviours.compare import differences
from .start import TORCHRUN, python

pytestmark = pytest.mark.slow

TWO = (*TORCHRUN, "--nproc-per-node", "2")

Steps = list[tuple[int, float, float]]
"""The number of each step, the step's loss, and the norm of its gradients."""


def started(*start: str, faults: Any = None, **environment: Any) -> subprocess.Popen[str]:
    """Start examples/train.py in a new process, and cause faults in it if `faults` is given.

    Args:
        start: The arguments of Python: torchrun with its arguments (if any), and the example with
            its arguments.
        faults: The fault to cause in each start by torchrun, as in tests/failures/script.py.
        environment: Additional environment variables.
    """
    arguments = [*start]
    if faults is not None:
        script = ["-m", "tests.failures.script", json.dumps(faults)]
        k = arguments.index("examples/train.py")
        arguments[k:k] = script
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return python(*arguments, errors=subprocess.STDOUT, **environment)


def ended(process: subprocess.Popen[str], code: int = 0) -> Steps:
    """Wait until the example ends. Return the steps, losses and gradient norms that it printed."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed
    steps: Steps = []
    for found in re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", printed):
        step, loss, norm = found
        steps.append((int(step), float(loss), float(norm)))
    return steps


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the state of the model and the optimizer that the example saved after a step."""
    (path,) = folder.glob(f"*-step-{step}")
    content = FileSystemReader(path).read_metadata()
    kinds = ("model.", "optimizer.")
    keys = [key for key in content.state_dict_metadata if key.startswith(kinds)]
    return read(path, content, keys)


# The transformer is trained in `test_fewer_ranks_and_restarts`.
@pytest.mark.parametrize("model", ["amoebanetd", "resnet18"])
def test_the_example(model: str) -> None:
    if model == "resnet18":
        pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
    example = ("examples/train.py", model, "--steps", "2", "--batch", "6", "--chunks", "3")
    alone, ranks = ended(started(*example)), ended(started(*TWO, *example))
    assert len(alone) == 2
    # Convolutions can differ in their last bits from one start of Python to the next.
    for one, other in zip(alone, ranks, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


BEFORE_THE_RANKS = """
from pathlib import Path
import torch
import torch.distributed as dist
from torchgpipe import sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.saves import Saves
top = Path({folder!r})
folder, states, trained = top / "pretrained", top / "states", top / "trained"
"""
STARTED = "dist.init_process_group('gloo')\n"
AFTER_THE_RANKS = """
x = torch.arange(128).view(8, 16) % 64
def criterion(output, labels):
    return module.loss_function(output["logits"], labels, module.config.vocab_size)
loss = model.step(criterion, {"input_ids": x}, x)
print(f"loss: {loss.item()}\\non meta: {any(p.is_meta for p in module.parameters())}")
Saves(states).save(0, model, None)
dist.destroy_process_group()
"""


def code_of(page: Path) -> list[str]:
    """Return the texts of all Python code blocks of a Markdown page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def printed_by(code: str, folder: Path, *start: str) -> str:
    """Run code as a script, and return what it prints.

    Args:
        code: The code.
        folder: The folder in which the script is written.
        start: The arguments of torchrun, if it starts the script.
    """
    script = folder / "script.py"
    script.write_text(code)
    # torchrun leaves folders behind, where TMPDIR says.
    process = python(*start, str(script), errors=subprocess.STDOUT, TMPDIR=str(folder))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return printed


def test_the_tutorial(tmp_path: Path) -> None:
    *alone, ranks = code_of(ROOT / "docs" / "tutorial.md")
    everything = printed_by("".join(alone), tmp_path) + printed_by(ranks, tmp_path, *TWO)
    # The outputs of two ranks can be on one line.
    losses = [float(loss) for loss in re.findall(r": (\d+\.\d+)", everything)]
    assert len(losses) == 5, everything
    assert losses == pytest.approx(losses[:1] * 5, rel=1e-4)


def test_the_readme_trains_the_same_model_in_one_process_and_in_two(tmp_path: Path) -> None:
    alone, ranks, _ = code_of(ROOT / "README.md")
    seeded = f"import torch\ntorch.manual_seed(0)\n{alone}"
    expected = re.findall(r"step \d: loss (\d+\.\d+)", printed_by(seeded, tmp_path))
    printed = printed_by(ranks, tmp_path, *TWO)
    assert len(expected) == 5
    for step, loss in enumerate(expected):
        found = re.findall(rf"step {step}: loss (\d+\.\d+)", printed)
        assert [float(each) for each in found] == pytest.approx([float(loss)] * 2, rel=1e-3)


def test_a_pretrained_model_is_filled_from_its_files(tmp_path: Path) -> None:
    """Check the code in the docs that fills a Hugging Face model from files and saves the model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True
    )
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path / "pretrained", max_shard_size="20KB")
    x = torch.arange(128).view(8, 16) % 64
    expected = plain(input_ids=x, labels=x).loss.item()
    pretrained = [c for c in code_of(ROOT / "docs/processes.md") if "AutoModelForCausalLM" in c]
    ranks, alone = [code.replace('"states"', "states") for code in pretrained]
    begin = BEFORE_THE_RANKS.format(folder=str(tmp_path))

    printed = printed_by(f"{begin}{STARTED}{ranks}{AFTER_THE_RANKS}", tmp_path, *TWO)
    losses = [float(loss) for loss in re.findall(r": (\d+\.\d+)", printed)]
    assert losses == pytest.approx([expected] * 2, rel=1e-5)
    assert "on meta: True" in printed

    alone = alone.replace('"trained"', "trained")
    change = "module.requires_grad_(False).lm_head.weight.zero_()\nSaves"
    imports = "from transformers import AutoModelForCausalLM\n"
    printed_by(begin + imports + alone.replace("Saves", change, 1), tmp_path)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for name, parameter in plain.state_dict().items():
        assert torch.equal(trained.state_dict()[name], parameter)


def test_the_readme_compares_two_versions_of_a_package(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    *_, cases = code_of(readme)
    (command,) = re.findall(r"^reproduce (regression .*)$", readme.read_text(), re.MULTILINE)
    package = tmp_path / "mypackage" / "__init__.py"
    package.parent.mkdir()
    package.write_text("parse = str.split\n")
    (tmp_path / "cases.py").write_text(cases)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "-m", "first")
    quick = ["--restarts", "8", "--rounds", "1", "--format", "json"]
    words = [sys.executable, "-m", "reproduce", *command.split(), *quick]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # The verdict depends on the machine. This test shows that the case runs with both versions.
    assert done.returncode in (0, 1), done
    sides = [each["side"] for each in json.loads(done.stdout)["numbers"]]
    assert set(sides) == {"A", "B"}


def training(steps: int, folder: Path) -> tuple[str, ...]:
    return ("examples/train.py", "transformer", "--steps", str(steps), "--save", str(folder))


def test_fewer_ranks_and_restarts(tmp_path: Path) -> None:
    """Check that failures of ranks do not change the losses and the final state of a training.

    1. The training starts on two nodes with two ranks each.
    2. One node is killed. The other node continues with another balance.
    3. A rank is killed while it saves.
    4. A rank raises an error.
    5. When the training has ended, the test starts two ranks anew, which train some more steps.

    The model has no dropout, because dropout masks depend on the balance.
    """
    alone = started(*training(6, tmp_path / "alone"), "--partitions", "4", faults=[None])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = (*TWO, "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf")
    four = training(4, tmp_path / "ranks")
    later = [[0, "dies while it saves", 6], [1, "raises", 1], None]
    host, guest = "last_call_timeout=5,is_host=1", "last_call_timeout=5,is_host=0"
    one = started(*node, *where, host, *four, faults=[None, *later])
    other = started(*node, *where, guest, *four, faults=[[1, "node", 3], *later])
    expected = ended(alone)
    steps = [*ended(one), *ended(other, -signal.SIGKILL)]
    steps += ended(started(*TWO, "--standalone", *training(6, tmp_path / "ranks"), faults=[None]))
    assert {*steps} == {*expected}
    assert differences(saved(tmp_path / "ranks", 5), saved(tmp_path / "alone", 5)) == []
