"""The notebook runs from its first cell to its last, and prints what it is committed with."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.commands import ROOT, environment

NOTEBOOK = ROOT / "docs" / "notebooks" / "promise.ipynb"


def _printed(notebook: nbformat.NotebookNode) -> list[str]:
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
    NotebookClient(fresh, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _printed(fresh) == _printed(committed)
    printed = "".join(_printed(fresh))
    assert printed.count("relative error below 1e-14: True") == 5
    assert float(re.search(r"accumulation_steps: relative error ([\d.]+)", printed)[1]) > 0.1  # type: ignore[index]
    assert NOTEBOOK.stat().st_size < 20_000
