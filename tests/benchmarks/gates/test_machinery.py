"""Tests of `benchmarks.gates.machinery`, a program that measures how much time a pipeline adds.

It times a plain loop over micro-batches and layers, the engines of this library, and the engines of
another version of the library (a git revision or a folder).
"""

from pathlib import Path

import pytest

import torchgpipe
from benchmarks.gates.machinery import WAYS, main, table
from benchmarks.gates.machinery_child import MODES, Subject, Way
from benchmarks.harness import by_case
from reproduce.records.record import load

from ...behaviours.compare import differences

HERE = f"torchgpipe {torchgpipe.__version__}"
OLD = """
from torch import nn
GPipe = lambda layers, balance, **_: nn.Sequential(*layers)
"""


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("model, n", [("linear", 3), ("AmoebaNet-D", 2)])
def test_the_plain_loop_computes_the_same(model: str, n: int, checkpoint: str) -> None:
    found = {}
    for engine in ("graph", "plain"):
        subject = Subject(Way(model, n, 2, checkpoint, "cpu", engine))
        output = subject.run(subject.x)
        output.sum().backward()
        found[engine] = [output, *subject.layers.parameters()]

    _, *parameters = found["plain"]
    for p in parameters:
        assert p.grad is not None
    assert differences(found["graph"], found["plain"]) == []


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the record and the table that a run of `benchmarks.gates.machinery` makes.

    With 16 partitions, only the plain loop gets results, and the engines fail: this AmoebaNet-D has
    too few layers for 16 partitions.
    """
    file = tmp_path / "machinery.json"
    what = ["--model=AmoebaNet-D", "--partitions", "1", "16", "--chunks=1", "--checkpoint=always"]
    rounds, steps = 1, 2

    main([*what, f"--rounds={rounds}", f"--steps={steps}", "--base=HEAD", f"--out={file}"])

    record = load(file)
    cases = by_case(record)
    one, sixteen = cases["AmoebaNet-D n=1 m=1 always"], cases["AmoebaNet-D n=16 m=1 always"]
    assert list(one) == ["plain", "graph", "graph, other"]
    assert set(sixteen) == set(WAYS) - {"other"}
    for result in (*one.values(), sixteen.pop("plain")):
        *_, count = result.values["spread"]["both"]
        assert count == rounds * steps
    versions = [result.config["version"] for result in one.values()]
    assert versions == [HERE, HERE, "torchgpipe HEAD"]
    assert {result.status for result in sixteen.values()} == {"failed"}
    said = table(record)
    assert said in capsys.readouterr().out
    assert f"- graph, HEAD: {sixteen['graph'].reason}" in said


@pytest.mark.slow  # PyTorch is imported in another process
def test_a_version_that_has_little_but_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "torchgpipe"
    package.mkdir()
    (package / "__init__.py").write_text(OLD)
    (package / "__version__.py").write_text("__version__ = '0.0.1'")
    (package / "trace.py").touch()  # it has none of this library's packages
    options = "--partitions 1 --chunks 1 --checkpoint never --rounds 1 --steps 2"

    main([*options.split(), "--base", str(tmp_path)])

    said = capsys.readouterr().out
    assert "0.0.1" in said
    assert "Error" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--base nowhere",
            "nowhere: no such git revision here; name a commit, a branch or a tag, "
            "or a folder with",
        ),
        ("--partitions 0", "0 is not a whole number of at least 1"),
    ],
)
def test_what_it_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert said in capsys.readouterr().err
