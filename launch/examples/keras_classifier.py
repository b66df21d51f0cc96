"""Train a Keras 3 model on the torch backend, on any number of processes::

    python launch/examples/keras_classifier.py
    torchrun --standalone --nproc-per-node=2 launch/examples/keras_classifier.py

The samples are made up: points, each in the class of its largest coordinate. Needs ``pip install 'distaccum[keras]'``.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import torch

from distaccum import DataSpec, RunConfig, Trainer
from distaccum.losses.keras import KerasLoss
from distaccum.models.keras import KerasModel

CLASSES, WIDTH = 4, 16

parser = argparse.ArgumentParser(description="Train a Keras model.")
parser.add_argument("--global-size", type=int, default=32, help="samples per optimizer step, over all processes")
parser.add_argument("--micro-size", type=int, default=8, help="the most samples of one forward on one process")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--engine", default="ddp", choices=("ddp", "zero1"))
parser.add_argument("--run-dir", help="default: a new folder below runs/")


def samples(number: int, seed: int) -> torch.utils.data.TensorDataset:
    """Points and their classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(1))


def main() -> None:
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((WIDTH,)),
        keras.layers.Dense(64, activation="gelu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(CLASSES),
    ]
    Trainer(
        KerasModel(keras.Sequential(layers)),
        KerasLoss(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        DataSpec(train=samples(1000, seed=1), eval_dataset=samples(200, seed=2)),
        global_batch_size=args.global_size,
        micro_batch_size=args.micro_size,
        max_steps=args.steps,
        engine=args.engine,
        run_dir=args.run_dir,
        config=RunConfig.from_dict(
            {
                "optim": {"lr": 1e-2},
                "schedule": {"warmup_steps": 5},
                "trainer": {"eval_every": 20},
                "metrics": {"wandb": {"mode": "disabled"}},
            }
        ),
    ).fit()


if __name__ == "__main__":
    main()
