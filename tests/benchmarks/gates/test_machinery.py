"""Machinery: the plain loop computes what the pipeline does, and another version, which takes turns, is a revision."""

from pathlib import Path

import pytest

import torchgpipe
from benchmarks.gates.machinery import WAYS, main, table
from benchmarks.gates.machinery_child import MODES, Subject
from reproduce.records.record import load

from ...behaviours.compare import differences

HERE = f"torchgpipe {torchgpipe.__version__}"
OLD = "from torch import nn\nGPipe = lambda layers, balance, **_: nn.Sequential(*layers)\n"


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("model, n", [("linear", 3), ("AmoebaNet-D", 2)])
def test_the_plain_loop_computes_the_same(model: str, n: int, checkpoint: str) -> None:
    ours, theirs = (Subject(model, n, 2, checkpoint, "cpu", way) for way in ("graph", "plain"))
    outputs = [each.run(each.x) for each in (ours, theirs)]
    for output in outputs:
        output.sum().backward()
    parameters = [[*each.layers.parameters()] for each in (ours, theirs)]
    assert all(p.grad is not None for p in parameters[1])
    assert differences([outputs[0], *parameters[0]], [outputs[1], *parameters[1]]) == []


def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 16 partitions, which AmoebaNet-D has too few layers for, only the plain loop can run."""
    file = tmp_path / "machinery.json"
    what = ["--model=AmoebaNet-D", "--partitions", "1", "16", "--chunks=1", "--checkpoint=always"]
    main([*what, "--rounds=2", "--steps=3", "--against=HEAD", f"--json={file}"])
    kept = load(file)
    cases = {
        n: {
            each.row: each
            for each in kept.results
            if each.experiment == f"AmoebaNet-D n={n} m=1 always"
        }
        for n in (1, 16)
    }
    assert [*cases[1]] == ["plain", "graph", "graph, other"] and set(cases[16]) == {*WAYS} - {
        "other"
    }
    measured = [cases[16].pop("plain"), *cases[1].values()]
    assert [each.values["spread"]["both"][-1] for each in measured] == [2 * 3] * 4
    assert [each.config["version"] for each in cases[1].values()] == [HERE, HERE, "torchgpipe HEAD"]
    assert {each.status for each in cases[16].values()} == {"failed"}
    said = table(kept)
    assert said in capsys.readouterr().out and f"- graph, HEAD: {cases[16]['graph'].reason}" in said


def test_a_version_that_has_little_but_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package := tmp_path / "torchgpipe").mkdir()
    (package / "__init__.py").write_text(OLD)
    (package / "__version__.py").write_text("__version__ = '0.0.1'")
    (package / "trace.py").touch()  # it has none of this library's packages
    options = [
        "--partitions",
        "1",
        "--chunks",
        "1",
        "--checkpoint",
        "never",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    main([*options, "--against", str(tmp_path)])
    assert "0.0.1" in (said := capsys.readouterr().out) and "Error" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--against nowhere",
            "nowhere: no such git revision here; name a commit, a branch or a tag, or a folder with",
        ),
        ("--partitions 0", "0 is not a whole number of at least 1"),
    ],
)
def test_what_it_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert said in capsys.readouterr().err
