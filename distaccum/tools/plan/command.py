"""What a run would hold, send and take on a cluster, before it is started: the command ``distaccum plan``.

``distaccum plan engine=fsdp2 cluster.nodes=8 cluster.link_gbps=25 cluster.micro_step_ms=90`` takes the main job's
overrides and those of ``cluster`` (see ``conf/plan.yaml``); it prints tables, and writes JSON and a plot. Parameters
are counted on the meta device, so the model may be larger than this machine. Without ``cluster.micro_step_ms`` a few
real micro-steps run here, in a plain loop in the run's precision. The memory of a micro-step is found without
computing (``activations.py``). The model of communication is ``distaccum.tools.plan``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from distaccum import program
from distaccum.config.batch import SAMPLES
from distaccum.config.checks import AUTO, is_one_of
from distaccum.config.engine import DDPConfig, FSDP2Config
from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig
from distaccum.config.trainer import OptimConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader
from distaccum.data.plan.batch import CONFIG_KEYS, check_sizes
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import open_world
from distaccum.engines.blocks import blocks_of
from distaccum.engines.rules import Verdict, try_rule
from distaccum.errors import ConfigError
from distaccum.tools.balance import BalancedPlan, in_words
from distaccum.tools.nodes import replicas_over
from distaccum.tools.plan.cluster import MILLI, Cluster
from distaccum.tools.plan.memory import MicroStep, gathered, host, peak
from distaccum.tools.plan.micro_step import first_line, measured_micro_step
from distaccum.tools.plan.report import report
from distaccum.tools.plan.settings_command import command, plot_file
from distaccum.tools.plan.sharding import formats_of, sharding_of
from distaccum.tools.plan.timing import LocalTimer
from distaccum.tools.plan.window import Job, Sizes
from distaccum.train.components import build_data, components_from_config, plan_of
from distaccum.train.optimizer import GroupSize, build_optimizers, group_sizes, split
from distaccum.train.packing import pack

MIB, GIB = 2**20, 2**30
WARM_UP, TIMED = 2, 5  # micro-steps that are measured
_INDENT = 11  # of the facts, behind their names
SIDE = 64  # of the matrix on which an optimizer makes its state
MEMORY = {"a rank holds": "memory", "at the peak of a micro-step": "peak", "on the host": "host"}
PARTS = {"compute": "of computing", "update": "of updating", "exposed": "of waiting for the network"}
Values = dict[str, Any]


def sizes_of(config: RunConfig, *, owners: bool = False) -> Sizes:
    """The sizes of the model, which is built without memory.

    Args:
        config: of the run.
        owners: whether one rank steps a tensor that its rule needs whole.

    Raises:
        ConfigError: the model or an optimizer cannot be built.
    """
    with torch.device("meta"):
        model: nn.Module = build("model", config.model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    claimed: set[int] = set()
    blocks = []
    for block in blocks_of(model, config.engine.blocks):  # inner ones first
        own = [p for p in block.parameters() if p.requires_grad and id(p) not in claimed]
        claimed |= {id(parameter) for parameter in own}
        blocks.append(sum(parameter.numel() for parameter in own))
    whole = [(optim, sizes) for optim, sizes in (_stepped(config) if owners else ()) if _needs_whole(optim)]
    owned = tuple(size for _, sizes in whole for size in sizes)
    return Sizes(
        tensors=tuple(parameter.numel() for parameter in trained),
        blocks=tuple(reversed(blocks)),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        owned=owned,
        owned_moments=sum(sum(sizes) * _moments(optim) for optim, sizes in whole) / (sum(owned) or 1),
    )


def groups_of(config: RunConfig) -> list[GroupSize]:
    """The parameter groups that the configuration states, of the model without memory."""
    with torch.device("meta"):
        return group_sizes(config.optim, build("model", config.model))


def moments_of(config: RunConfig) -> float:
    """Bytes of the optimizers' state for each element of a matrix; with several, on average over what they step."""
    if not any("optimizer" in group for group in config.optim.groups):
        return _moments(config.optim)
    stepped = _stepped(config)
    return sum(sum(sizes) * _moments(optim) for optim, sizes in stepped) / sum(sum(sizes) for _, sizes in stepped)


def _stepped(config: RunConfig) -> list[tuple[OptimConfig, list[int]]]:
    """Of each group and of the rest: what steps it, as ``optim.optimizer``, and the elements of what is trained."""
    optim = config.optim
    with torch.device("meta"):
        *members, rest = split(optim.groups, build("model", config.model))
    return [
        (
            replace(optim, optimizer=group.get("optimizer", optim.optimizer)),
            [p.numel() for p in mine.values() if p.requires_grad],
        )
        for group, mine in zip([*optim.groups, {}], [*members, rest], strict=True)
    ]


def _needs_whole(optim: OptimConfig) -> bool:
    """Whether its rule steps a matrix otherwise than its rows."""
    matrix = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    (optimizer,) = _one(optim)[1]
    return try_rule(optimizer, [[matrix]], [[[rows]] for rows in torch.split(matrix, SIDE // 2)]) is Verdict.COUPLED


def _one(optim: OptimConfig) -> tuple[nn.Linear, list[Optimizer]]:
    """A matrix, and ``optim.optimizer`` of it."""
    model = nn.Linear(SIDE, SIDE, bias=False)
    return model, build_optimizers(replace(optim, groups=[]), model, torch.device("cpu"))


def _moments(optim: OptimConfig) -> float:
    """Those of ``optim.optimizer``, found by stepping one."""
    model, (optimizer,) = _one(optim)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = optimizer.state[model.weight].values()
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
    return sum(tensor.nbytes for tensor in tensors) / SIDE**2


def balance_of(config: RunConfig, ranks: int) -> Values:
    """How much more the longest of ``ranks`` computes than their mean, where ``batch.balance`` deals micro-batches.

    Raises:
        ConfigError: the data or the model cannot be balanced.
    """
    by = config.batch.balance
    if by == SAMPLES:
        return {}
    loss = build("loss", config.loss)
    try:
        data = pack(build_data(config.data), config.batch, loss)
    except Exception as error:  # the data may be on another machine, and is the user's code
        return {"balance": {"by": by, "unknown": f"is not known: {first_line(error)}"}}
    with torch.device("meta"):
        model: nn.Module = build("model", config.model)
    now, before = cast("BalancedPlan", plan_of(config, data, model, loss, ranks)).over_means()
    return {"balance": {"by": by, "longest_over_mean": now, "without": before, "unknown": ""}}


def measured(config: RunConfig, cluster: Cluster) -> Cluster:
    """The cluster with micro-steps and updates as this machine takes them."""
    one = replace(config.batch, global_size=config.batch.first_micro_size, schedule=[])
    alone = replace(config, engine=DDPConfig(), batch=one)
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        components = components_from_config(alone, world_size=1, device=world.device)
        timer = LocalTimer(components, world.device)
        loader = build_loader(components.data, components.plan, world)
        windows = loader.windows(0, 0, GlobalCounter(world, components.loss.count))
        for i, window in enumerate(islice(windows, WARM_UP + TIMED)):
            if i == WARM_UP:
                timer.forget()
            timer.run(window)
    return replace(cluster, micro_step_ms=timer.micro_step_ms, update_ms=timer.update_ms)


def show(values: Values) -> None:
    """Prints the tables."""
    batch, model, step = values["batch"], values["model"], values["step"]
    console = Console()

    def say(line: str) -> None:  # in a pipe a fact is a line, however long
        console.out(program.wrapped(line, _INDENT).rstrip("\n") if console.is_terminal else line)

    say(f"model      {model['parameters']:,} parameters in {model['tensors']} tensors, {model['blocks']} blocks")
    if "groups" in model:
        say(f"groups     {'; '.join(str(GroupSize(**group)) for group in model['groups'])}")
    say(f"engine     {values['engine']}; {values['precision']}")
    update = f"{batch['ranks']} ranks x {batch['accumulation']} micro-steps of at most {batch['micro_size']}"
    say(f"plan       global batch {batch['global_size']} samples = {update}")
    if batch["stages"]:
        say(f"           after the stages of batch.schedule ({batch['stages']}), which these figures leave out")
    if "balance" in values:
        known = values["balance"]
        told = (
            known["unknown"] or f"{in_words(known['longest_over_mean'], known['without'])}; times here are the mean's"
        )
        say(f"balance    by {known['by']}: {told}")
    if batch["idle"]:
        say(f"           {batch['idle']} ranks have nothing to do: there are fewer samples than ranks")
    parts = (f"{step[key] / MILLI:,.1f} ms {word}" for key, word in PARTS.items())
    say(f"window     {step['seconds'] / MILLI:,.1f} ms: {', '.join(parts)}")
    for title in MEMORY:
        parts = values[MEMORY[title]]
        memory = Table(title, *parts)
        memory.add_row("MiB", *("unknown" if size is None else f"{size / MIB:,.2f}" for size in parts.values()))
        console.print(memory)
    for line in about_peak(values):
        say(line)
    kinds = {kind: size for kind, size in values["sent"].items() if size}
    sent = Table("a rank sends in a window", *kinds, "all")
    sent.add_row("MiB", *(f"{size / MIB:,.2f}" for size in (*kinds.values(), sum(kinds.values()))))
    console.print(sent)
    console.print(scaling_table(values))


def about_peak(values: Values) -> list[str]:
    """In words: what the peak is of, why it is not known, and whether it fits."""
    about, total, memory_gib = values["micro_step"], values["peak"]["total"], values["cluster"]["memory_gib"]
    lines = [f"peak       is not known: {about['unknown']}"] if about["unknown"] else []
    if about["peak"] is not None:
        compiled = "; compiled code keeps less, as a rule" if values["compiled"] else ""
        kept, whose = f"{about['kept'] / MIB:,.2f} MiB", {"cuda": "a GPU's", "cpu": "a CPU's"}[about["device"]]
        lines.append(f"kept       {kept} of activations, from forward to backward, by {whose} operators{compiled}")
    if total is not None and memory_gib is not None:
        left = memory_gib - total / GIB
        fits = f"fits, {left:,.2f} GiB are left" if left >= 0 else f"does not fit: {-left:,.2f} GiB too much"
        lines.append(f"card       of {memory_gib:g} GiB: the peak {fits}")
    return lines


def scaling_table(values: Values) -> Table:
    """A line for each number of ranks; the planned one is marked."""
    columns = ("ranks", "micro-steps", "window ms", "computing", "waiting", "efficiency", "idle")
    table = Table(title="the same global batch on more ranks (* planned)")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in values["scaling"]:
        mark = "*" if row["ranks"] == values["batch"]["ranks"] else ""
        times = (f"{row[key] / MILLI:,.1f}" for key in ("seconds", "compute", "exposed"))
        idle = str(row["idle"]) if row["idle"] else ""
        table.add_row(f"{mark}{row['ranks']}", str(row["accumulation"]), *times, f"{row['efficiency']:.1%}", idle)
    return table


def draw(values: Values, path: Path) -> None:
    """Draws efficiency and step time over the number of ranks to a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    rows = values["scaling"]
    ranks = [row["ranks"] for row in rows]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    figure.suptitle(f"{values['engine']}: global batch {values['batch']['global_size']}, forecast", fontsize=10)
    left, right = figure.subplots(1, 2)
    left.plot(ranks, [100 * row["efficiency"] for row in rows], marker=".")
    left.set_ylabel("efficiency (%)")
    left.set_ylim(0, 105)
    right.plot(ranks, [row["seconds"] / MILLI for row in rows], marker=".", label="window")
    right.plot(ranks, [row["compute"] / MILLI for row in rows], linestyle="--", color="0.5", label="computing")
    right.set_ylabel("time of a window (ms)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.axvline(values["batch"]["ranks"], color="0.4", linewidth=0.8, linestyle=":", label="planned")
        if values["batch"]["global_size"] < ranks[-1]:
            label = "more ranks than samples"
            axes.axvspan(values["batch"]["global_size"], ranks[-1], color="0.93", zorder=0, label=label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def job_of(config: RunConfig) -> Job:
    """What the arithmetic of a forecast takes.

    Raises:
        ConfigError: the model or its optimizers cannot be built, sizes do not fit, or the global batch or the
            micro-batch is in tokens.
    """
    if config.batch.global_size is None:
        remedy = "State batch.global_size: how many samples a budget of tokens makes depends on the data"
        raise ConfigError("batch.tokens", config.batch.tokens, "cannot be planned without the data", remedy)
    if config.batch.micro_tokens is not None:
        remedy = "Set it to null and state batch.micro_size: how it cuts depends on the lengths of the samples"
        raise ConfigError("batch.micro_tokens", config.batch.micro_tokens, "cannot be planned without the data", remedy)
    check_sizes(config.batch.global_size, config.batch.first_micro_size, CONFIG_KEYS)
    return Job(
        sizes=sizes_of(config, owners=sharding_of(config.engine).owners),
        sharding=sharding_of(config.engine),
        formats=formats_of(config.engine, config.precision, moments_of(config)),
        global_batch_size=config.batch.global_size,
        micro_batch_size=config.batch.first_micro_size,
        virtual_ranks=config.batch.virtual_ranks if config.reproducible else None,
    )


def peak_bytes(config: RunConfig, ranks: int = 1) -> int:
    """The most bytes of tensors that one of ``ranks`` holds at once on its device, from the second window on.

    To be compared with ``torch.cuda.max_memory_allocated()``, which has the workspaces of cuBLAS and of fused attention
    too. Nothing of the model's size is allocated.

    Raises:
        ConfigError: the configuration cannot be planned; or the peak is not known, and why.
    """
    job = job_of(config)
    job.sharding.check(ranks)
    micro_step = measured_micro_step(config, max(job.micro_sizes(ranks)))
    total = peak(job, ranks, micro_step)["total"]
    if total is None:
        raise ConfigError("model", config.model.get("_target_"), why_unknown(job, micro_step), "Measure it on the card")
    return round(total)


def why_unknown(job: Job, micro_step: MicroStep) -> str:
    """In words, why the peak is not known; empty where it is."""
    if not micro_step.unknown and gathered(job) is None:
        return "DeepSpeed decides while it runs how much of a model in shards it keeps gathered"
    return micro_step.unknown


def memory_of(config: RunConfig, job: Job, ranks: int, *, measures: bool) -> Values:
    """The peak of a rank's memory and what it takes on the host, in plain values."""
    switched_off = MicroStep(unknown="plan.activations=false")
    micro_step = measured_micro_step(config, max(job.micro_sizes(ranks))) if measures else switched_off
    trainer, checkpoint = config.trainer, config.checkpoint
    windows = 1 + (trainer.prefetch_windows if trainer.num_workers else 0)
    copies = checkpoint.background and checkpoint.saves
    return {
        "peak": peak(job, ranks, micro_step),
        "host": host(job, ranks, micro_step, windows=windows, copies_checkpoint=copies),
        "micro_step": asdict(micro_step) | {"unknown": why_unknown(job, micro_step)},
        "compiled": config.compile.compiles,
    }


def plan(values: Values, *, activations: bool = True) -> Values:
    """All figures of a configuration, given as nested plain values with those of ``cluster``.

    Args:
        values: the settings.
        activations: whether a micro-step runs without numbers, for the peak of memory.

    Raises:
        ConfigError: the configuration cannot be planned.
    """
    cluster = Cluster(**values.pop("cluster"))
    config = RunConfig.from_dict(values)
    automatic = is_one_of((AUTO,), getattr(config.engine, "replicas", 1))
    if automatic:
        replicas = replicas_over(cluster.nodes, cluster.ranks)
        config = replace(config, engine=replace(cast(FSDP2Config, config.engine), replicas=replicas))
    job = job_of(config)
    sizes = job.sizes
    guess = replace(cluster, micro_step_ms=cluster.micro_step_ms or 1.0)
    report(job, guess, [cluster.ranks])  # raises for what cannot work, before anything is measured
    balance = balance_of(config, cluster.ranks)
    memory = memory_of(config, job, cluster.ranks, measures=activations)
    if cluster.micro_step_ms is None:
        cluster = measured(config, cluster)
    model: Values = {
        "parameters": sizes.elements + sizes.frozen,
        "tensors": len(sizes.tensors),
        "blocks": len(sizes.blocks),
    }
    plain = vars(type(config.engine)())
    settings = [f"{key}={value}" for key, value in vars(config.engine).items() if value != plain[key]]
    if automatic:
        settings.append("replicas as cluster.nodes says, at every number of ranks")
    if groups := groups_of(config):
        model["groups"] = list(map(asdict, groups))
    engine = ", ".join([config.engine.name, *settings])
    precision = f"{config.precision.name}, gradients travel in {config.precision.reduce_dtype}"
    about = {"model": model, "block_sizes": sizes.blocks, "engine": engine, "precision": precision}
    found = report(job, cluster)
    found["batch"]["stages"] = len(config.batch.schedule)
    return about | {"cluster": vars(cluster)} | found | memory | balance


def run(values: Values, folder: Path) -> int:
    """Prints and writes the figures; returns the exit code."""
    outputs = values.pop("plan")
    plot = plot_file("plan.plot", outputs["plot"], folder / "plan.png")
    figures = plan(values, activations=outputs["activations"])
    show(figures)
    file = Path(outputs["json"] or folder / "plan.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=2))
    if plot is not None:
        draw(figures, plot)
    return 0


def main() -> None:
    """Runs the command, and exits: with 2 where the settings are wrong."""
    sys.exit(command("plan", run))


if __name__ == "__main__":
    main()
