"""Breaks of the package that the tests have to notice: ``*.diff`` here.

A line ``= NAME`` begins a mutant; ``@ WHERE`` says where that and those after it are noticed. An edit is a file of the
package, what is there once (``-``; of its first and last line also a part), and what stands there then (``+``).
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, run

WORKERS = ROOT / "tests" / "distributed" / "workers"
_EDIT = re.compile(r"^(\w+/.*\.py)\n((?:-.*\n)+)((?:\+.*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """Edits ``(file, old, new)`` of the package's files; each ``old`` must occur once in its file."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    where: str = ""


def read(name: str) -> tuple[Mutant, ...]:
    """The mutants of a file, in its order."""
    found, where = [], ""
    for part in re.split(r"^= ", (Path(__file__).parent / f"{name}.diff").read_text(), flags=re.MULTILINE)[1:]:
        title, body = part.split("\n", 1)
        edits = []
        for file, *parts in _EDIT.findall(body):
            old, new = (re.sub("^.", "", lines.removesuffix("\n"), flags=re.MULTILINE) for lines in parts)
            edits.append((file, old if parts[1] else f"{old}\n", new))  # what becomes nothing takes its line along
        where = body.splitlines()[0].removeprefix("@ ") if body.startswith("@ ") else where
        found.append(Mutant(title, tuple(edits), where))
    return tuple(found)


@contextmanager
def package(mutants: Sequence[Mutant | None]) -> Iterator[Path]:
    """A folder to import from: the package with all edits of ``mutants``, its configuration and the tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "distaccum"
        shutil.copytree(ROOT / "distaccum", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "conf").symlink_to(ROOT / "conf")
        (folder / "tests").symlink_to(ROOT / "tests")
        for mutant in mutants:
            for file, old, new in mutant.edits if mutant else ():
                text = (copy / file).read_text()
                assert text.count(old) == 1, f"{file} no longer says {old!r} once: bring the mutant up to date"
                (copy / file).write_text(text.replace(old, new))
        yield folder


def answered(mutants: Sequence[Mutant | None], worker: str, asked: Any) -> Any:
    """What two ranks of a worker answer with these mutants on their path; a text where they fail."""
    with package(mutants) as folder:
        question, answer = folder / "asked.json", folder / "answer.json"
        question.write_text(json.dumps(asked))
        script = WORKERS / f"{worker}.py"
        finished = run(answer, question, world=2, script=script, warm="torch", PYTHONPATH=str(folder), timeout=120)
        if finished.returncode:
            return f"exit code {finished.returncode}: {finished.stderr[-3000:]}"
        return json.loads(answer.read_text())
