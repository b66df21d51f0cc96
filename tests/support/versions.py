"""Runs a covering set on other versions of torch and DeepSpeed, each in an environment of its own: docs/engines.md.

::

    python -m tests.support.versions --torch 2.8.0 2.15.0
    python -m tests.support.versions --torch 2.8.0 --deepspeed 0.16.0 0.19.1

For each torch an environment is made in a temporary folder from requirements.lock with that torch, given each DeepSpeed
in turn, and deleted at the end; it takes up to 8 GB. The table of the document keeps the rows that were not asked for.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from tests.support.commands import ROOT, captured

WORKER = ROOT / "tests" / "distributed" / "workers" / "versions.py"
DOCUMENT = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"
CELLS = ("even", "uneven", "resume", "fp16")
ENGINES = ("ddp", "zero1", "fsdp2 boundary", "fsdp2 every")
STAGES = tuple(f"deepspeed {stage}" for stage in range(4))
TIMEOUT_S = 300
NEEDED_BY_DEEPSPEED = ("setuptools", "wheel", "ninja", "einops", "hjson", "msgpack", "psutil", "py-cpuinfo")

Row = tuple[str, ...]


def install(folder: Path, torch: str) -> Path:
    """An environment with what the main job needs; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    others = folder / "requirements.txt"
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    others.write_text("\n".join(line for line in locked if not line.startswith("torch==")))
    _pip(python, f"torch=={torch}", "-r", str(others))
    return python


def install_deepspeed(python: Path, version: str) -> None:
    _pip(python, *NEEDED_BY_DEEPSPEED)
    _pip(python, "--no-build-isolation", f"deepspeed=={version}", DS_BUILD_OPS="0")


def _pip(python: Path, *arguments: str, **extra: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *arguments]
    subprocess.run(command, check=True, env=os.environ | extra)


def run(python: Path, engine: str, folder: Path) -> list[str]:
    """What each cell did, in a word or a message; two ranks."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER, answer, engine]
    said = "hung"
    try:
        done = captured(command, timeout=TIMEOUT_S, PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu")
        said = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "no answer"
    except subprocess.TimeoutExpired:
        pass
    found: dict[str, str] = json.loads(answer.read_text()) if answer.exists() else {}
    return [found.get(cell, f"failed: {said}") for cell in CELLS]


def in_table(cell: str) -> str:
    """One line; a refusal's message is printed instead."""
    return "refused" if cell.startswith("refused: ") else cell.replace("|", "/").split("\n")[0]


def rows_of(text: str) -> dict[Row, Row]:
    """The table's, by torch, DeepSpeed and engine; a row of the table is that of several of each."""
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    return {key: row[3:] for row in cells[2:] for key in product(*(names.split(", ") for names in row[:3]))}


def written(text: str, rows: dict[Row, Row]) -> str:
    """The document with this table, by versions; engines and torches of which the same is true have a row together."""
    engines: dict[tuple[str, str, Row], list[str]] = {}
    for key in sorted(rows, key=_by_version):
        engines.setdefault((*key[:2], rows[key]), []).append(key[2])
    torches: dict[Row, list[str]] = {}
    for (torch, deepspeed, cells), alike in engines.items():
        torches.setdefault((deepspeed, ", ".join(alike), *cells), []).append(torch)
    head = ["| torch | DeepSpeed | engine | even | uneven | resume | fp16 |", "|---|---|---|---|---|---|---|"]
    body = ["| " + " | ".join((", ".join(alike), *row)) + " |" for row, alike in torches.items()]
    return text[: text.index(BEGIN)] + "\n".join([BEGIN, *head, *body, END]) + text[text.index(END) + len(END) :]


def _by_version(key: Row) -> tuple[object, ...]:
    torch, deepspeed, engine = key
    return [int(part) for part in torch.split(".")], deepspeed, engine


def main() -> None:
    """Installs, runs, and writes the table after each version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION")
    parser.add_argument("--deepspeed", nargs="*", default=[], metavar="VERSION", help="each with every torch")
    chosen = parser.parse_args()
    for torch in chosen.torch:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            python = install(Path(folder), torch)
            size = sum(file.lstat().st_size for file in Path(folder).rglob("*")) / 1e9
            print(f"torch {torch} was installed in {time.monotonic() - began:.0f} s: {size:.1f} GB")
            cover(python, torch, "", ENGINES)
            for deepspeed in chosen.deepspeed:
                install_deepspeed(python, deepspeed)
                cover(python, torch, deepspeed, STAGES)


def cover(python: Path, torch: str, deepspeed: str, engines: tuple[str, ...]) -> None:
    """Runs these engines, and writes their rows."""
    found: dict[Row, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines:
            cells = run(python, engine, Path(folder))
            found[torch, deepspeed, engine] = tuple(map(in_table, cells))
            print(torch, deepspeed, engine, *cells, sep=" | ")
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(written(text, rows_of(text) | found))


if __name__ == "__main__":
    main()
