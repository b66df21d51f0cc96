"""Records what a list of runs writes, and compares two records bit by bit: for changes that may change nothing.

::

    python tests/support/replay.py record FOLDER [--tree CHECKOUT] [--only NAME ...]
    python tests/support/replay.py compare FOLDER OTHER

``record`` runs every command of ``replay.yaml`` with the code of ``CHECKOUT`` (by default this one). ``compare`` holds
each run's ``metrics.jsonl`` (all keys but times, rates, memory), ``plan.json`` and the tensors of its last checkpoint
to the other record's. Records of two machines, or of two releases of torch, differ in their last bits: make both here.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

HERE = Path(__file__).resolve().parent
ALWAYS = ("metrics=jsonl", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=4", "checkpoint.keep=0")
_KNOWN = yaml.safe_load(HERE.joinpath("replay.yaml").read_text())


def _words(text: str) -> list[str]:
    """The words of a text, with those that a set stands for in its place."""
    return [
        one for word in text.split() for one in (_words(_KNOWN["sets"][word]) if word in _KNOWN["sets"] else [word])
    ]


RUNS = {name: [_words(part) for part in parts] for name, parts in _KNOWN["runs"].items()}
VARIES = ("_s", "_per_s", "time", "memory", "_bytes")  # ends of the names of what a machine decides


def record(folder: Path, tree: Path, names: list[str]) -> None:
    """Runs the commands; each leaves its run directory under its name."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(HERE)])
    for name in names or RUNS:
        for world, *overrides in RUNS[name]:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            command = [sys.executable, *(torchrun if world != "1" else []), str(tree / "launch" / "train.py")]
            command += [*ALWAYS, *overrides, f"hydra.run.dir={folder / name}"]
            print(name, flush=True)
            finished = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=300
            )
            if finished.returncode:
                sys.exit(f"{name} ended with {finished.returncode}:\n{finished.stdout}{finished.stderr}")


def contents(run: Path) -> dict[str, Any]:
    """What a run wrote that has to be the same again."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in one.items() if not key.endswith(VARIES)} for one in records]
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    found: dict[str, Any] = {"metrics": metrics, "plan": json.loads((run / "plan.json").read_text())}
    found["status"] = json.loads((run / "status.json").read_text())
    found["checkpoint"] = newest.name
    for file in sorted(newest.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                tensor = tensors.get_tensor(name)
                found[f"{file.name}: {name}"] = [str(tensor.dtype), list(tensor.shape), _bits(tensor)]
    return found


def _bits(tensor: Any) -> str:
    import torch  # noqa: PLC0415  quick without, where nothing is compared

    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()).hex()


def compare(folder: Path, other: Path) -> list[str]:
    """Where two records differ; empty where they do not."""
    differences = []
    runs, others = ({path.name for path in one.iterdir() if path.is_dir()} for one in (folder, other))
    differences += [f"{name}: in one record only" for name in sorted(runs ^ others)]
    for name in sorted(runs & others):
        found, expected = contents(folder / name), contents(other / name)
        differences += [
            f"{name}: {key} differs: {_short(found.get(key))} and {_short(expected.get(key))}"
            for key in sorted(found.keys() | expected.keys())
            if found.get(key) != expected.get(key)
        ]
    return differences


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 160 else f"{text[:80]} ... {text[-80:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--tree", type=Path, default=HERE.parent.parent)
    recording.add_argument("--only", nargs="*", default=[], choices=RUNS, metavar="NAME")
    comparing = commands.add_parser("compare")
    comparing.add_argument("folder", type=Path)
    comparing.add_argument("other", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.folder.resolve(), given.tree.resolve(), given.only)
        return
    differences = compare(given.folder, given.other)
    print("\n".join(differences) or "nothing differs")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
