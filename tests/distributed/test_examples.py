"""The examples and the notebook of the docs, run as they say; three levels train to the same weights, bitwise."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, environment, succeed
from tests.support.optional import Library

nbformat, nbclient = Library("nbformat"), Library("nbclient")
PAGE = "".join((ROOT / "docs" / page).read_text() for page in ("own-loop.md", "models.md", "reinforcement.md"))
LEVELS = ("loop", "accumulate", "trainer")


def _run(example: str, world: int, cwd: Path) -> str:
    """What the page's command prints on so many processes; run elsewhere, so that it leaves nothing here."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"python launch/examples/{example}.py")]
    script, *arguments = shlex.split(line.replace("launch/examples/", f"{ROOT}/launch/examples/"))[1:]
    return succeed(*arguments, script=Path(script), world=world, timeout=120, cwd=cwd).stdout


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), pytest.param(2, marks=pytest.mark.slow)])
def test_three_levels_give_bitwise_the_same_weights(tmp_path: Path, world: int) -> None:
    printed = [_run(level, world, tmp_path) for level in LEVELS]
    weights = [re.search(r"^weights ([0-9a-f]{64})$", text, re.MULTILINE) for text in printed]
    assert len({found[1] for found in weights if found}) == 1


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), pytest.param(2, marks=pytest.mark.slow)])
def test_the_text_classifier_learns(tmp_path: Path, world: int) -> None:
    printed = _run("text_classifier", world, tmp_path)
    accuracy = re.search(r"^  accuracy +([\d.]+)$", printed, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8
    assert re.search(r"^pad +[\d.]+% of the tokens of a micro-batch are padding", printed, re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.parametrize("world", [1, 2])
def test_the_language_model_learns(tmp_path: Path, world: int) -> None:
    printed = _run("causal_lm", world, tmp_path)
    losses = [float(found) for found in re.findall(r"^step .* loss ([\d.]+)  grad", printed, re.MULTILINE)]
    assert losses[-1] < 6.2 < losses[0]
    assert "global batch 2,048 tokens" in printed


@pytest.mark.slow
def test_the_policy_learns_alike_on_1_and_2_processes(tmp_path: Path) -> None:
    printed = [_run("grpo", world, tmp_path) for world in (1, 2)]
    losses, rewards = (
        [[float(found) for found in re.findall(rf"{name} ([^ ,]+)", text)] for text in printed]
        for name in ("loss", "reward")
    )
    assert len(rewards[0]) == len(rewards[1]) > 5
    assert losses[0][:5] == pytest.approx(losses[1][:5], abs=1e-6)
    assert rewards[0][:5] == rewards[1][:5]  # later a rounding may draw another token
    for reward in rewards:
        assert reward[0] < 0.15
        assert reward[-1] > 0.6


@pytest.mark.heavy
@pytest.mark.parametrize("world", [1, 2])
def test_the_encoder_decoder_learns(tmp_path: Path, world: int) -> None:
    """150 updates of 2,048 tokens: more than half of what is held out is right token by token, of 13 characters."""
    printed = _run("seq2seq", world, tmp_path)
    accuracy = re.findall(r"^  accuracy +([\d.]+)$", printed, re.MULTILINE)
    assert float(accuracy[-1]) > 0.7
    assert "global batch 2,048 tokens" in printed


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_the_keras_classifier_learns(tmp_path: Path, world: int) -> None:
    if find_spec("keras") is None:  # an import would want the backend that the example sets
        pytest.skip("keras is not installed")
    printed = _run("keras_classifier", world, tmp_path)
    loss = re.search(r"^  loss +([\d.]+)$", printed, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) < 0.4  # a guess: 1.39


NOTEBOOK = ROOT / "docs" / "notebooks" / "promise.ipynb"


def _printed(notebook: Any) -> list[str]:
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of jupyter_client and its event loop
def test_the_notebook_prints_what_it_is_committed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    committed = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(fresh, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _printed(fresh) == _printed(committed)
    printed = "".join(_printed(fresh))
    assert printed.count("relative error below 1e-14: True") == 5
    assert float(re.search(r"accumulation_steps: relative error ([\d.]+)", printed)[1]) > 0.1  # type: ignore[index]
    assert NOTEBOOK.stat().st_size < 20_000
