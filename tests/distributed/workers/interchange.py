"""Run by torchrun: trains on each engine, saves half-way, and goes on from every checkpoint there is.

``interchange.py save|resume FOLDER RESULT PRECISION [ENGINE ...]``. ``save`` writes a checkpoint of step 3 into
``FOLDER/ENGINE-WORLD``, and the losses of an uninterrupted run; ``resume`` goes on from each of those with each engine.
Both write JSON: losses, what each rank's generator gave, and bytes of the final weights, by name.
"""

import json
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, engine_config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.engines.state import whole_state
from distaccum.losses.cross_entropy import cross_entropy
from distaccum.models.gpt import GPT

ENGINES = ("ddp", "zero1", "fsdp2")  # and "deepspeed STAGE"
BEFORE, ALL = 3, 7  # windows: the epoch's end lies between
VOCABULARY, LENGTH = 23, 8


def samples() -> list[tuple[Tensor, Tensor]]:
    """Of 20: windows of 6, the last one ragged."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCABULARY, (20, LENGTH + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in rows]


class Run:
    """A model in training."""

    def __init__(self, engine: EngineConfig, precision: str, world: World, seed: int) -> None:
        torch.manual_seed(seed)
        model = GPT(vocab_size=VOCABULARY, seq_len=LENGTH, n_layer=2, n_head=2, n_embd=16)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups: Any = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True)
        scaler = ScalerConfig(initial_scale_power=10, growth_interval=2)
        self.acc = Accumulator(
            model,
            optimizer,
            global_batch_size=6,
            micro_batch_size=2,
            count=lambda batch: batch[1].numel(),
            engine=engine,
            precision=PrecisionConfig(name=precision, scaler=scaler),
            clip_norm=1.0,
            world=world,
            schedule=lambda step: 0.9**step,
            verify="never",
        )
        torch.manual_seed(10 * seed + world.rank)
        self.own: dict[str, Any] = {"losses": []}
        self.drawn: list[float] = []

    def train(self, windows: int) -> None:
        while self.acc.progress.window < windows:
            for window in self.acc.windows(DATA):
                for micro in window:
                    with self.acc.accumulate():
                        inputs, labels = micro.batch
                        self.acc.backward(cross_entropy(self.acc.model(inputs), labels)[0])
                self.own["losses"].append(self.acc.mean_loss())
                self.drawn.append(torch.rand(()).item())
                if self.acc.progress.window >= windows:
                    break

    def result(self) -> dict[str, Any]:
        """Losses, loss scale, and a digest of weights and optimizer state."""
        state = whole_state(self.acc.engine, self.acc.world)
        digest = sha256()
        for part in (state.model, state.optimizer):
            for name in sorted(part):
                digest.update(name.encode() + part[name].detach().cpu().contiguous().numpy().tobytes())
        progress = asdict(self.acc.progress)
        return {
            "losses": self.own["losses"],
            "drawn": self.acc.world.all_gather_object(self.drawn[-(ALL - BEFORE) :]),
            "digest": digest.hexdigest(),
            "scaler": dict(state.scaler),
            "clocks": progress,
            "names": sorted(state.optimizer),
        }


def main() -> None:
    mode, root, result, precision = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    world = World.join()
    found = {}
    for name in sys.argv[5:] or ENGINES:
        kind, _, stage = name.partition(" ")
        engine = DeepSpeedConfig(stage=int(stage)) if stage else engine_config(kind)
        if mode == "save":
            run = Run(engine, precision, world, seed=1)
            run.train(BEFORE)
            run.acc.save(root / f"{name}-{world.size}", state=run.own)
            run.train(ALL)
            found[name] = run.result()
            continue
        for saved in sorted(root.iterdir()):
            run = Run(engine, precision, world, seed=2)  # other weights: those of the checkpoint have to come
            assert run.acc.resume(saved, state=run.own) == BEFORE
            run.train(ALL)
            found[f"{saved.name} -> {name}"] = run.result()
    everyone = world.all_gather_object({name: one["digest"] for name, one in found.items()})
    assert all(digests == everyone[0] for digests in everyone), "ranks differ"
    if world.is_main:
        result.write_text(json.dumps(found))


DATA: Any = samples()

if __name__ == "__main__":
    main()
