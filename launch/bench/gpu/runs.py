"""The runs that are measured: experiments of ``conf/`` on random tokens, without a file, logs or checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from distaccum.config.checks import Node
from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig, conf_dir, plain
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.train.callbacks import Callback
from distaccum.train.components import TrainingComponents, build_components, build_data
from launch.bench.gpu.figures import Options
from launch.bench.gpu.random_tokens import random_tokens

MODELS = ("124m", "350m", "774m", "1.5b")
UNLIMITED = 1_000_000  # windows: no run reaches its end, or a window that is logged
EPOCH = 32  # windows: an epoch begins with a read of the loader's seed
TINY = ("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "data.seq_len=32", "data.vocab_size=256")
_MEASURED = (
    "data.path=memory",
    f"trainer.max_steps={UNLIMITED}",
    f"trainer.log_every={UNLIMITED}",
    "trainer.eval_every=0",
    "trainer.verify=never",  # the first window's proof is no part of a plain window
    "checkpoint.every=0",
    "metrics=jsonl",
)
# Of what is compiled, the graphs are made, and run as they are: inductor takes a minute.
_SMALL = (*TINY, "compile.backend=eager")
_SMALL_MICRO_SIZE, _SMALL_ACCUMULATION = 8, 2


def composed(*overrides: str) -> Node:
    """The main job's configuration with these overrides, within one of Hydra's programs and outside of one."""
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return plain(compose("config", list(overrides)))


def run_config(options: Options, model: str, *overrides: str, micro_size: int, accumulation: int) -> RunConfig:
    """The experiment of one of :data:`MODELS`, with windows of ``accumulation`` full micro-batches on one rank."""
    if options.small:
        micro_size, accumulation = min(micro_size, _SMALL_MICRO_SIZE), min(accumulation, _SMALL_ACCUMULATION)
    sizes = (f"batch.micro_size={micro_size}", f"batch.global_size={micro_size * accumulation}")
    small = _SMALL if options.small else ()
    values = composed(f"experiment=gpt2-{model}-openwebtext", *_MEASURED, *sizes, *overrides, *small)
    known = {key: values["data"][key] for key in ("seq_len", "vocab_size")}
    data = {"_target_": f"{random_tokens.__module__}.random_tokens", "samples": EPOCH * micro_size * accumulation}
    return RunConfig.from_dict(values | {"data": data | known})


def tokens_of_window(config: RunConfig) -> int:
    """The tokens of one optimizer step."""
    assert config.batch.global_size is not None
    return config.batch.global_size * int(config.data["seq_len"])


@contextmanager
def alone(options: Options) -> Iterator[World]:
    """A world of this process."""
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), options.device) as world:
        yield world


def components_of(
    config: RunConfig, world: World, callbacks: Sequence[Callback] = (), *, epoch: int = EPOCH
) -> TrainingComponents:
    """The components of such a run, new with each call, with epochs of so many windows.

    The model's weights are made on the device.
    """
    assert config.batch.global_size is not None
    data = build_data({**config.data, "samples": epoch * config.batch.global_size})
    torch.manual_seed(config.seed)
    with world.device:
        model = build("model", config.model)
    return build_components(
        config, data, model, build("loss", config.loss), world_size=world.size, device=world.device, callbacks=callbacks
    )
