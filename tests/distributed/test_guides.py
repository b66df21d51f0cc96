"""docs/index.md, bring-your-own.md, models.md's nanoGPT, walked as a reader does: each command where the last ended."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import ROOT, metrics, run, status
from tests.support.optional import Library
from tests.test_docs import Block, _tiny, _training, blocks, blocks_of, text_of

sklearn_datasets = Library("sklearn.datasets")
EXAMPLE = ROOT / "launch" / "examples" / "nanogpt"


def _shape(line: str) -> str:
    """A printed line without its numbers, units of bytes, columns and paths."""
    numbered = re.sub(r"[\d,.]*\d[\d,.e+-]*", "#", line)
    return " ".join(re.sub(r"# [KM]?i?B\b", "# B", re.sub(r"\S*runs/\S+", "PATH", numbered)).split())


def _walk(page: str, folder: Path, section: str | None = None) -> list[tuple[Block, str]]:
    """Runs each command and each block marked ``guide``, in order; what is printed, after each of them."""
    printed = []
    for block in blocks(page) if section is None else blocks_of(page, section):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            printed += [(block, _run(line, folder))]
        if block.language == "python" and block.mark == "guide":
            named = re.search(r"`(\w+\.py)`:\n\n<!-- guide -->\n```python\n" + re.escape(block.text), text_of(page))
            script = folder / (named[1] if named else "block.py")
            script.write_text(block.text)
            finished = run(script=script, cwd=folder, PYTHONPATH=f"{folder}")
            assert finished.returncode == 0, finished.stderr
            assert "depends on the micro-batch size" not in finished.stderr
            printed.append((block, finished.stdout))
    return printed


def _small(arguments: list[str]) -> list[str]:
    """A model of milliseconds, for as many updates as the command says; for one of the reader's own, nothing."""
    if "model=line" in arguments:
        return ["metrics=jsonl"]
    return [
        override.replace("n_layer=1", "n_layer=4")
        for override in _tiny(arguments)
        if not override.startswith("trainer.max_steps")
    ]


def _run(command: str, folder: Path) -> str:
    found = _training(command)
    if found is not None:
        world, arguments = found
        arguments = [word.replace("README.md", str(ROOT / "README.md")) for word in arguments]
        small = _small_nanogpt() if "nanogpt" in command else _small(arguments)
        finished = run(*arguments, *small, world=world, cwd=folder, PYTHONPATH=str(folder))
    else:
        words = shlex.split(command)
        if words[0] == "cd":
            return ""
        if words[0] == "distaccum":
            (folder / "command.py").write_text("from distaccum.program import main\nmain()\n")
            words = ["python", "command.py", *words[1:]]
        assert words[0] == "python", command
        words = [word.replace("step-2000", f"step-{NANOGPT_STEPS}") for word in words]
        script = next(path for path in (folder / words[1], ROOT / words[1]) if path.exists())
        finished = run(*words[2:], script=script, cwd=folder, PYTHONPATH=str(folder))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_the_commands_of_the_start_print_what_the_page_says(tmp_path: Path) -> None:
    """Each line of a block is printed by the command before it, up to its numbers; those of the plan to the digit."""
    page = "docs/index.md"
    printed = _walk(page, tmp_path)
    outputs = {block.number: text for block, text in printed}
    shown = [block for block in blocks(page) if not block.language]
    assert len(shown) == 3
    for block in shown:
        lines = outputs[block.number - 1].splitlines()
        shapes = {_shape(line) for line in lines}
        for line in block.text.splitlines():
            assert _shape(line) in shapes, line
            assert not line.startswith(("plan ", "world ")) or line in lines, line
    first, alone = (metrics(tmp_path / "runs" / name) for name in ("first", "alone"))
    assert [record["loss"] for record in alone] == pytest.approx([r["loss"] for r in first[: len(alone)]], rel=1e-5)
    assert status(tmp_path / "runs" / "first")["step"] == 60
    for report in ("runs/first/report.html", "compared.html"):
        assert "</html>" in (tmp_path / report).read_text()
    (curve,) = (text for block, text in printed if block.mark == "guide")
    rows = [line.split() for line in curve.splitlines()]  # printed before the run was resumed
    assert [(int(step), float(loss)) for step, loss, _ in rows] == [(r["step"], round(r["loss"], 3)) for r in first[:4]]


NANOGPT_STEPS = 80


def _small_nanogpt() -> list[str]:
    sizes = ["model.config.n_layer=1", "model.config.n_embd=64", "optim.lr=3e-3", "schedule.warmup_steps=5"]
    return [*sizes, f"trainer.max_steps={NANOGPT_STEPS}", "trainer.eval_every=20", "metrics=jsonl"]


@pytest.mark.heavy
def test_nanogpt_from_a_text_to_a_sample(tmp_path: Path) -> None:
    folder = tmp_path / "nanogpt"
    shutil.copytree(EXAMPLE, folder)
    printed = [text for _, text in _walk("docs/models.md", folder, "nanoGPT, end to end")]
    assert (folder / "train.bin").stat().st_size == 2 * int(re.findall(r"[\d,]+", printed[1])[0].replace(",", ""))
    assert "AdamW (dims 0 1, weight_decay 0.0): 192" in printed[2]  # three norms of 64
    one, two = (metrics(folder / "runs" / name) for name in ("nanogpt", "two"))
    assert [record["loss"] for record in two] == pytest.approx([record["loss"] for record in one], rel=1e-4)
    held_out = [record["eval_loss"] for record in one if "eval_loss" in record]
    seen, unseen = (np.bincount(np.fromfile(folder / f"{name}.bin", "<u2"), minlength=256) for name in ("train", "val"))
    by_frequency = -(unseen * np.log((seen + 1) / (seen + 1).sum())).sum() / unseen.sum()
    assert held_out[-1] < by_frequency - 0.1  # it knows more than how often each byte comes
    assert printed[4].startswith("The ")
    assert len(printed[4]) > 150


RECIPES = {"Your own loop": "my_loop.py", "Images": "images.py"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_ends_in_a_file_of_predictions(recipe: str, world: int, tmp_path: Path) -> None:
    """Its program as it stands, and once more, which goes on where it ended; most rows are right."""
    (program,) = [block.text for block in blocks_of("docs/recipes.md", recipe) if block.language == "python"]
    script = tmp_path / RECIPES[recipe]
    script.write_text(program)
    for _ in range(2):
        finished = run(script=script, world=world, cwd=tmp_path)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "resuming" in finished.stdout or not finished.stdout  # the loop has no epoch left
    (file,) = tmp_path.glob("*.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    truth = sklearn_datasets.load_digits().target[-len(rows) :]
    assert [int(row[0]) for row in rows] == [*range(len(truth))]
    assert sum(int(found) == true for (_, found), true in zip(rows, truth, strict=True)) > 0.9 * len(truth)


@pytest.mark.slow
def test_pieces_of_your_own_run_in_python_and_by_name(tmp_path: Path) -> None:
    page = "docs/bring-your-own.md"
    files = re.findall(r"^\| `(conf/\S+)` \| `(.+)` \|$", text_of(page), re.MULTILINE)
    assert len(files) == 6
    for name, content in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    module, in_python, by_name, shards, tokens, balanced = (text for _, text in _walk(page, tmp_path))
    assert module == shards == ""
    assert float(in_python.splitlines()[-1]) < 0.2
    assert "points of a line" in by_name
    assert "eval_loss is below 0.02" in by_name
    assert "10 steps, " in tokens
    first, *_, last = map(float, balanced.splitlines())
    assert last < first
    held = sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.bin"))
    assert held > 100_000
