"""Records what a list of runs writes, and compares two records bit by bit: for changes that may change nothing.

::

    python tests/support/replay.py record FOLDER [--tree CHECKOUT] [--only NAME ...]
    python tests/support/replay.py compare FOLDER OTHER

``record`` runs every command of ``RUNS`` with the code of ``CHECKOUT`` (this one by default). ``compare`` holds each
run's ``metrics.jsonl`` (all keys but times, rates and memory), ``plan.json`` and the tensors of its last checkpoint to
the other record's. Records of two machines, or of two releases of torch, differ in their last bits: record both here.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

HERE = Path(__file__).resolve().parent
GPT = ("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "schedule.warmup_steps=2")
DOCS = ("data.seq_len=16", *GPT)
LINES = ("data=lines", "data.seq_len=48", *GPT)
ALWAYS = ("metrics=jsonl", "trainer.log_every=1", "trainer.eval_every=4", "checkpoint.every=4", "checkpoint.keep=0")
UNEVEN = ("batch.global_size=10", "batch.micro_size=2")
OWN = (
    "~data",
    "~model",
    "~loss",
    "+model={_target_:torch.nn.Linear,in_features:3,out_features:2}",
    "+loss={_target_:replay_data.Squares}",
    "batch.global_size=8",
    "batch.micro_size=2",
    "trainer.eval_every=0",
)
OVERFLOW = (
    "precision.scaler.initial_scale_power=60",
    "precision.scaler.max_scale=1.2e18",
    "trainer.max_skips=60",
    "precision.scaler.growth_interval=3",
    "precision.scaler.backoff_factor=0.001",
)

# By name: processes and overrides of each part; a part goes on in the run directory of the one before.
RUNS: dict[str, list[tuple[int, tuple[str, ...]]]] = {
    "ddp-1": [(1, (*DOCS, "trainer.max_steps=8"))],
    "ddp-2-uneven-dropout": [(2, (*LINES, *UNEVEN, "model.dropout=0.1", "trainer.max_steps=8"))],
    "ddp-3": [(3, (*DOCS, *UNEVEN, "trainer.max_steps=8"))],
    "ddp-2-bf16": [(2, (*LINES, *UNEVEN, "precision=bf16", "precision.reduce_dtype=bf16", "trainer.max_steps=8"))],
    "ddp-2-fp16-skips": [(2, (*LINES, *UNEVEN, "precision=fp16", *OVERFLOW, "trainer.max_steps=8"))],
    "ddp-2-clip-value": [
        (
            2,
            (
                *DOCS,
                *UNEVEN,
                "optim.clip_norm=null",
                "optim.clip_value=0.01",
                "optim.fused=false",
                "trainer.max_steps=6",
            ),
        )
    ],
    "ddp-2-digits": [
        (
            2,
            (
                "data=digits",
                "model=cnn",
                "model.channels=4",
                "optim=sgd",
                "batch.global_size=48",
                "trainer.max_epochs=1",
                "trainer.max_steps=20",
            ),
        )
    ],
    "ddp-2-tokens": [(2, (*LINES, "batch=tokens", "batch.tokens=300", "batch.micro_size=4", "trainer.max_steps=8"))],
    "ddp-2-grouped": [(2, (*LINES, "batch.group_by_length=true", "trainer.num_workers=1", "trainer.max_steps=8"))],
    "ddp-2-compute": [(2, (*DOCS, "precision=bf16", "precision.keep_fp32=[norm]", "trainer.max_steps=5"))],
    "ddp-2-nan": [
        (
            2,
            (
                *OWN,
                "+data={_target_:replay_data.Numbers,size:41,broken:20}",
                "trainer.nonfinite=skip",
                "trainer.max_epochs=2",
                "trainer.max_steps=100",
            ),
        )
    ],
    "ddp-2-stream": [(2, (*OWN, "+data={_target_:replay_data.Stream,sizes:[21,13]}", "trainer.max_steps=9"))],
    "ddp-2-resumed": [
        (2, (*LINES, *UNEVEN, "model.dropout=0.1", "trainer.max_steps=5", "resume=auto")),
        (2, (*LINES, *UNEVEN, "model.dropout=0.1", "trainer.max_steps=10", "resume=auto")),
    ],
    "zero1-2": [(2, (*LINES, *UNEVEN, "engine=zero1", "trainer.max_steps=8"))],
    "zero1-3-fp16": [(3, (*DOCS, *UNEVEN, "engine=zero1", "precision=fp16", *OVERFLOW, "trainer.max_steps=6"))],
    "fsdp2-1": [(1, (*DOCS, "engine=fsdp2", "trainer.max_steps=5"))],
    "fsdp2-2-uneven": [(2, (*LINES, *UNEVEN, "engine=fsdp2", "model.dropout=0.1", "trainer.max_steps=8"))],
    "fsdp2-2-bf16-every": [
        (
            2,
            (
                *LINES,
                *UNEVEN,
                "engine=fsdp2",
                "engine.sync=every",
                "precision=bf16",
                "engine.activation_checkpoint=blocks",
                "trainer.max_steps=6",
            ),
        )
    ],
    "fsdp2-3-fp16-meta": [
        (
            3,
            (
                *DOCS,
                *UNEVEN,
                "engine=fsdp2",
                "engine.meta_init=true",
                "precision=fp16",
                "precision.reduce_dtype=fp16",
                "trainer.max_steps=6",
            ),
        )
    ],
    "moved-ddp-2-fsdp2-3-zero1-1": [
        (2, (*LINES, *UNEVEN, "trainer.max_steps=4", "resume=auto")),
        (3, (*LINES, *UNEVEN, "trainer.max_steps=8", "resume=auto", "engine=fsdp2")),
        (1, (*LINES, *UNEVEN, "trainer.max_steps=12", "resume=auto", "engine=zero1")),
    ],
    "deepspeed-2-stage-0": [(2, (*LINES, *UNEVEN, "engine=deepspeed", "engine.stage=0", "trainer.max_steps=5"))],
    "deepspeed-2-stage-1": [(2, (*LINES, *UNEVEN, "engine=deepspeed", "engine.stage=1", "trainer.max_steps=5"))],
    "deepspeed-2-stage-2-bf16": [
        (2, (*LINES, *UNEVEN, "engine=deepspeed", "engine.stage=2", "precision=bf16", "trainer.max_steps=5"))
    ],
    "deepspeed-2-stage-3-resumed": [
        (2, (*LINES, *UNEVEN, "engine=deepspeed", "engine.stage=3", "trainer.max_steps=4", "resume=auto")),
        (2, (*LINES, *UNEVEN, "engine=deepspeed", "engine.stage=3", "trainer.max_steps=8", "resume=auto")),
    ],
}
VARIES = ("_s", "_per_s", "time", "memory", "_bytes")  # ends of the names of what a machine decides


def record(folder: Path, tree: Path, names: list[str]) -> None:
    """Runs the commands; each leaves its run directory under its name."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(HERE)])
    for name in names or RUNS:
        for world, overrides in RUNS[name]:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            command = [sys.executable, *(torchrun if world > 1 else []), str(tree / "launch" / "train.py")]
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
