"""Run on 2 ranks, FOLDER ENGINE CASE...: spikes in some windows, by :data:`CASES`, ``resumed: `` too, beside fp64."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distaccum import Callback, DistaccumError, RunConfig, Trainer, World
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.data.plan.shuffle import Shuffle
from tests.support.accumulators import Of
from tests.support.answers import give

GLOBAL_SIZE, WINDOWS, FEATURES, RATE, CLIP = 8, 60, 4, 0.02, 1.0
ZSCORE, REMEMBERED, EVERY, UPDATES = 8.0, 16, 5, 30
COUNTS = ("step", "window", "applied", "skipped", "nonfinite", "samples", "tokens", "spikes")
EXACT = (*COUNTS, "loss", "grad_norm", "lr", "loss_scale")
FP16 = {"name": "fp16", "scaler": {"initial_scale_power": 4, "growth_interval": 9}}
CASES: dict[str, dict[str, Any]] = {
    "skip": {"on_spike": "skip", "poisoned": (20, 28)},
    "in a row": {"on_spike": "skip", "poisoned": (20, 21, 22, 23), "max_skips": 3},
    "warn": {"on_spike": "warn", "poisoned": (20, 21, 28)},
    "rollback": {"on_spike": "rollback", "poisoned": (20, 22, 33)},
    "before a checkpoint": {"on_spike": "rollback", "poisoned": (10, 33), "every": 15},
    "again and again": {"on_spike": "rollback", "poisoned": (20, 22, 24, 26)},
    "verified": {"on_spike": "skip", "poisoned": (20, 28), "verify": 1},
    "fp16": {"on_spike": "skip", "poisoned": (20, 28), "precision": FP16, "fused": True},
    "stream": {"on_spike": "rollback", "poisoned": (20, 22, 33), "stream": True},
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))


def samples(poisoned: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """One epoch of them; those of the poisoned windows, counted from 1, have targets that are far off."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(WINDOWS * GLOBAL_SIZE, FEATURES, generator=generator)
    targets = inputs.sum(1).sin() + 3.0
    for window in poisoned:
        targets[ids(window)] = 1e3
    return list(zip(inputs, targets, strict=True))


def ids(window: int) -> np.ndarray[Any, Any]:
    positions = np.arange((window - 1) * GLOBAL_SIZE, window * GLOBAL_SIZE)
    return Shuffle(WINDOWS * GLOBAL_SIZE, seed=0, epoch=0)(positions)


class Stream:
    """This rank's share of every window, in the same order."""

    def __init__(self, poisoned: tuple[int, ...], rank: int) -> None:
        self._pairs, self._rank = samples(poisoned), rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        share = GLOBAL_SIZE // 2
        for window in range(1, WINDOWS + 1):
            for i in ids(window)[self._rank * share : (self._rank + 1) * share]:
                yield self._pairs[i]


def rate(step: int) -> float:
    return 1.0 / (1 + step / 20)


class Oracle:
    """The same run in one process: fp64, whole batches, the rule as the documentation says it."""

    def __init__(self) -> None:
        self.model = make_model().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, foreach=False)
        self.norms: list[float] = []
        self.step = 0
        self.records: list[dict[str, Any]] = []

    def bound(self) -> float:
        last = self.norms[-REMEMBERED:]
        if len(last) < REMEMBERED / 2:
            return float("inf")
        return float(np.mean(last) + ZSCORE * max(np.std(last), 0.01 * np.mean(last)))

    def run(self, on_spike: str, poisoned: tuple[int, ...], *, every: int = EVERY, **_: Any) -> None:
        pairs, saved, window = samples(poisoned), None, 0
        while self.step < UPDATES:
            window += 1
            x, y = (torch.stack(part).double() for part in zip(*(pairs[i] for i in ids(window)), strict=True))
            self.optimizer.zero_grad()
            loss = (self.model(x).squeeze(1) - y).square().mean()
            loss.backward()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.cat([g.flatten() for g in grads]).norm())
            bound = self.bound()
            spike, lr = norm >= bound, RATE * rate(self.step)
            self.norms.append(min(norm, bound))
            applied = on_spike == "warn" or not spike
            if applied:
                for g in grads:
                    g.mul_(min(1.0, CLIP / norm))
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()
                self.step += 1
            at = {"step": self.step, "window": window, "applied": applied, "samples": window * GLOBAL_SIZE, "lr": lr}
            self.records.append({**at, "loss": loss.item(), "grad_norm": norm, "spike": spike})
            if not applied and on_spike == "rollback" and saved is not None:
                weights, moments, self.norms, self.step = deepcopy(saved)
                self.model.load_state_dict(weights)
                self.optimizer.load_state_dict(moments)
            elif applied and self.step % every == 0:
                saved = deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.norms, self.step))


class Dies(Callback):
    """Fails after an attempt."""

    def __init__(self, window: int) -> None:
        self.window = window

    def on_update(self, run: Any, outcome: Any) -> None:
        if run.progress.window == self.window:
            raise RuntimeError("killed here")


def make_rate(total_steps: int) -> Callable[[int], float]:
    return rate


def fit(
    folder: Path, engine: Any, case: dict[str, Any], *, callbacks: Any = (), resume: str = "never", steps: int = UPDATES
) -> str:
    """Trains; returns what the run says in the end."""
    model = make_model()
    config = {
        "engine": engine,
        "precision": case.get("precision", "fp32"),
        "batch": {"global_size": GLOBAL_SIZE, "micro_size": 2},
        "optim": {"clip_norm": CLIP},
        "schedule": {"_target_": "tests.distributed.workers.spikes.make_rate"},
        "trainer": {
            "on_spike": case["on_spike"],
            "spike_zscore": ZSCORE,
            "spike_window": REMEMBERED,
            "max_skips": case.get("max_skips", 10),
            "verify": case.get("verify", "first"),
            "log_every": 1,
        },
        "checkpoint": {"every": case.get("every", EVERY)},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    trainer = Trainer(
        model,
        Of(
            lambda model, batch: (model(batch[0]).squeeze(1).float() - batch[1]).square().sum(),
            lambda batch: len(batch[0]),
        ),
        Stream(case["poisoned"], int(os.environ["RANK"])) if "stream" in case else samples(case["poisoned"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE, fused=case.get("fused")),
        callbacks=list(callbacks),
        run_dir=folder,
        max_steps=steps,
        resume=resume,
        config=RunConfig.from_dict(config),
    )
    try:
        trainer.fit()
    except (DistaccumError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in EXACT} for line in lines]


def weights(folder: Path, step: int = UPDATES) -> dict[str, Tensor]:
    files = TensorFiles(folder / "checkpoints" / f"step-{step}", "model")
    return {name: files[name] for name in files}


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / f"step-{UPDATES}" / "state.json").read_text())
    return {name: found[name] for name in ("clocks", "spikes", "scaler", "optimizer_values")}


def compared(folder: Path, engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    said, oracle = fit(folder, engine, case), Oracle()
    found: dict[str, Any] = {"said": said, "run": records(folder), "saved": saved(folder)}
    if not said:
        oracle.run(**case)
        own = oracle.model.state_dict()
        found["off"] = max(float((weights(folder)[name] - own[name]).abs().max()) for name in own)
        found["oracle"] = oracle.records
    return found


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def stopped(folder: Path, engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """A run with rollbacks, and one that fails right after each of the first two, or is ended, and is resumed."""
    whole = folder / "whole"
    undisturbed = compared(whole, engine, case)
    said = [
        fit(folder / "parts", engine, case, callbacks=[Dies(21)]),
        fit(folder / "parts", engine, case, callbacks=[Dies(25)], resume="auto"),
        fit(folder / "parts", engine, case, resume="auto", steps=18),
        fit(folder / "parts", engine, case, resume="auto"),
    ]
    ours, theirs = weights(folder / "parts"), weights(whole)
    return {
        "undisturbed": undisturbed,
        "said": said,
        "records": records(folder / "parts") == records(whole),
        "weights": all(torch.equal(ours[name], theirs[name]) for name in theirs),
        "state": state(folder / "parts") == state(whole),
        "history": json.loads((folder / "parts" / "history.json").read_text())["rolled_back"],
    }


def main(_: World) -> dict[str, Any]:
    folder, engine, *names = sys.argv[2:]
    found: dict[str, Any] = {}
    for name in names:
        kind, _, case = name.rpartition(": ")
        run = stopped if kind else compared
        found[name] = run(Path(folder) / name.replace(" ", "-"), json.loads(engine), CASES[case])
    return found


if __name__ == "__main__":
    give(main)
