"""Two ranks on one GPU where there is one: run by torchrun, ``two_ranks.py FILE small gloo`` (or ``full``, ``nccl``).

``ddp``, ``zero1`` and ``fsdp2`` take the window of ``window.py``, in which one rank has a micro-batch less, and agree
in every bit of the weights. Then fp16's loss scale: a window that overflows on one rank alone is skipped by both. The
figures are written to FILE.

NCCL refuses two ranks on one GPU of one host, and takes ranks that tell different ``NCCL_HOSTID`` for those of several:
they talk through sockets then, slowly, by NCCL's own code all the same.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DataSpec, PrecisionConfig, World
from distaccum.config.engine import EngineConfig
from distaccum.config.precision import ScalerConfig
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import die_with_parent
from distaccum.distributed.world import open_world
from distaccum.engines.state import gathered
from launch.bench.gpu import window
from launch.bench.gpu.correct import OURS, PlainLoops, precisions, tried
from launch.bench.gpu.figures import Figure, Options

TIMEOUT = timedelta(seconds=60)  # ranks that wait for each other fail
SIZE, WIDTH = 8, 16  # samples of a window, features of each
OVERFLOWS = 1  # the window, and the second half of it, that is too large for fp16 on the second rank
REPLICATED = ("ddp", "zero1")  # the others hold each weight once
SCALE = 2.0**window.SCALE_POWER


def take_hosts_apart() -> None:
    """Has NCCL, before it begins, take each rank for one of a host of its own."""
    os.environ |= {"NCCL_HOSTID": f"rank-{os.environ.get('RANK', '0')}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}


def overflowing() -> list[tuple[Tensor, Tensor]]:
    """Three windows; in the second one the last sample, which is the second rank's, is beyond fp16."""
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(WIDTH, generator=generator), torch.randn(1, generator=generator)) for _ in range(3 * SIZE)]
    samples[(OVERFLOWS + 1) * SIZE - 1][0].fill_(1e6)
    return samples


def skipping(engine: EngineConfig, world: World) -> tuple[str, bool]:
    """What this rank did in each window, in words, and whether it is what both have to do; a collective."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        global_batch_size=SIZE,
        micro_batch_size=2,
        count=lambda batch: len(batch[0]),
        engine=engine,
        precision=PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=window.SCALE_POWER)),
        world=world,
    )
    weights, did = [], []
    try:
        for opened in acc.windows(DataSpec(train=overflowing(), description="random numbers", shuffle=False)):
            for micro in opened:
                with acc.accumulate():
                    inputs, targets = micro.batch
                    acc.backward((acc.model(inputs).float() - targets).square().sum())
            assert acc.last is not None
            did.append((acc.last.applied, acc.last.loss_scale))
            weights.append(window.digest(gathered(acc.engine.state().model, world)))
    finally:
        acc.close()
    everyone = world.all_gather_object((did, weights))
    agreed = all(one == everyone[0] for one in everyone)
    expected = [(True, SCALE), (False, SCALE), (True, SCALE / 2)]
    kept = weights[0] == weights[1] != weights[2]
    text = "skipped by both" if agreed and kept and did == expected else f"{everyone}, weights kept: {kept}"
    return text, agreed and kept and did == expected


def agreeing(weights: window.Weights, world: World) -> tuple[str, bool]:
    """Whether all ranks' weights are the same in every bit; a collective."""
    found = world.all_gather_object(window.digest(weights))
    return ("yes" if len(set(found)) == 1 else "no"), len(set(found)) == 1


def through(name: str, precision: str, loops: PlainLoops, world: World) -> list[Figure]:
    """The figures of one engine in one precision; a collective."""
    of, kept = f"{name}, 2 ranks over {world.backend}", list[window.Weights]()

    def weights() -> window.Weights:
        kept.append(loops.window.ours(OURS[name], precision, world))
        return kept[-1]

    figures = [loops.beside(of, precision, weights)]
    if kept and name in REPLICATED:
        agree = partial(agreeing, kept[-1], world)
        figures.append(tried(f"{of}, {precision}", "ranks have the same bits", "yes", agree))
    return figures


def measure(world: World, *, small: bool) -> list[Figure]:
    """The same figures on every rank; a collective."""
    loops, figures = PlainLoops(Options(device=world.device, small=small), world.size), []
    for precision in precisions(world.device):
        figures.append(loops.figure(precision))
        for name in OURS:
            figures += through(name, precision, loops, world)
    for name, engine in OURS.items():
        of = f"{name}, 2 ranks over {world.backend}, fp16"
        skip = partial(skipping, engine, world)
        figures.append(tried(of, "a window that overflows on one rank", "skipped by both", skip))
    return figures


def main() -> None:
    """Measures, and rank 0 writes the figures."""
    die_with_parent()
    ranks = LaunchEnvironment.from_environment()
    device, backend = ranks.device("gloo"), "auto" if sys.argv[3] == "nccl" else "gloo"
    take_hosts_apart()
    with open_world(ranks, ranks.store(), device, TIMEOUT, backend=backend) as world:
        figures = measure(world, small=sys.argv[2] == "small")
        if world.is_main:
            Path(sys.argv[1]).write_text(json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()
