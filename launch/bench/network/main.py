"""Two hosts with a slow link between them: what a window takes and sends, and whether the forecast is right.

``python launch/bench network`` (as root), with Hydra overrides: hand-written DDP loops that reduce every micro-step and
once a window, distaccum, and distaccum with 16-bit reduction, on a link of ``link.mbit``. ``validate=true`` compares
forecasts with measurements at ``link.rates`` instead, and exits with 1 where one is off by more than ``link.within``.

The count of a window is timed inside of it, on both hosts. The host that comes to it last waits for nothing but the
messages: that is what the count costs. The other one waits for that host too, which it would do later without a count.

The hosts are network namespaces of this machine (``hosts.py``). Bytes are what the interface's counter says has left a
host: Ethernet, IP and TCP headers, acknowledgements and the launcher's messages included. The forecast gets the rate,
the latency of a small all-reduce, and the time of micro-steps and updates without communication; not the window's time.
Table, figure and JSON go to the run directory.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from distaccum.config.checks import require, require_count, require_positive
from distaccum.config.engine import DDPConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.config.schema import RunConfig
from distaccum.data.plan.batch import micro_steps_of
from distaccum.errors import ConfigError
from distaccum.tools.plan.cluster import Cluster
from distaccum.tools.plan.settings_command import command, plot_file, print_error
from distaccum.tools.plan.sharding import Sharding, formats_of, sharding_of
from distaccum.tools.plan.window import Job, Sizes, Window
from launch import python_path
from launch.bench.network import tables
from launch.bench.network.hosts import LinkError, obstacle, torchrun, two_hosts
from launch.bench.network.worker import HANDWRITTEN, ONCE, VARIANTS

RANKS = 2
TIMEOUT_S = 1200
WORKER = "launch.bench.network.worker"
DEFAULT_BUCKETS = {"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0}  # DDP's own defaults
Figures = dict[str, Any]


def at_rate(values: dict[str, Any], names: Sequence[str], *, mbit: float, mtu: int, windows: int) -> Figures:
    """Measurement and forecast of each of these variants on a link of that rate.

    Raises:
        LinkError: a host failed; the message ends with what it said.
    """
    with TemporaryDirectory() as folder, two_hosts(mbit=mbit, mtu=mtu) as hosts:
        asked = Path(folder) / "asked.json"
        asked.write_text(json.dumps({"config": values, "variants": names, "windows": windows, "out": folder}))
        program = ["-m", WORKER, str(asked)]
        for done in torchrun(hosts, program, timeout=TIMEOUT_S, environment=python_path()):
            if done.returncode:
                raise LinkError(f"a host failed: {(done.stdout + done.stderr)[-2000:]}")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    ways = {name: summary(name, values, mbit, ranks) for name in names}
    if ONCE in ways:
        for row in ways.values():
            row["over no_sync"] = paired(row["all seconds"], ways[ONCE]["all seconds"])
    return {"mbit": mbit, "mtu": mtu, "latency_us": max(rank["latency_us"] for rank in ranks), "ways": ways}


def paired(seconds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The median ratio of two loops' windows, in the order in which they ran in turn; each by its slower host."""
    pairs = zip(zip(*seconds, strict=True), zip(*others, strict=True), strict=True)
    return median(max(ours) / max(theirs) for ours, theirs in pairs)


def of_count(ranks: Sequence[Sequence[float]]) -> Figures:
    """Milliseconds of a count: on the host that comes last, and on the one that waits; medians, and the best window."""
    windows = list(zip(*ranks, strict=True))
    if not windows:
        return {}
    last, first = ([of(window) * 1e3 for window in windows] for of in (min, max))
    return {"count_last_ms": median(last), "count_first_ms": median(first), "count_best_ms": min(last)}


def alone(ranks: Sequence[Sequence[float]]) -> Figures:
    """Milliseconds of a count by itself, on the host that comes last: the median, and the tenth percentile.

    The second is that of a machine whose cores are free when a message comes.
    """
    last = sorted(min(turn) * 1e3 for turn in zip(*ranks, strict=True))
    return {"alone_ms": median(last), "alone_p10_ms": last[len(last) // 10]} if last else {}


def summary(name: str, values: dict[str, Any], mbit: float, ranks: Sequence[Figures]) -> Figures:
    """The figures of one variant on the slower host, for which the other one waits, and the forecast."""
    found = [rank[name] for rank in ranks]
    row = {
        "seconds": max(median(one["seconds"]) for one in found),
        "all seconds": [one["seconds"] for one in found],
        **{key: max(one[key] for one in found) for key in ("bytes", "micro_step_ms", "update_ms")},
        **{key: found[0][key] for key in ("gradient bytes", "parameters")},
        **of_count([one["counting"] for one in found]),
        **alone([one["counting alone"] for one in found]),
    }
    row["forecast"] = forecast(name, values, row, mbit, max(rank["latency_us"] for rank in ranks))
    row["error"] = row["forecast"] / row["seconds"] - 1
    return row


def forecast(name: str, values: dict[str, Any], row: Figures, mbit: float, latency_us: float) -> float:
    """Seconds of a window by the forecast."""
    config = VARIANTS[name].config(RunConfig.from_dict(values))
    job = Job(
        sizes=Sizes(tensors=tuple(row["parameters"])),
        global_batch_size=config.batch.global_size or 0,
        micro_batch_size=config.batch.micro_size,
        **engine_of(name, config.engine, config.precision),
    )
    cluster = Cluster(
        nodes=RANKS,
        gpus=1,
        link_gbps=mbit / 1000,
        latency_us=latency_us,
        micro_step_ms=row["micro_step_ms"],
        update_ms=row["update_ms"],
    )
    return Window(job, cluster, RANKS).step().seconds


def engine_of(name: str, engine: DDPConfig, precision: PrecisionConfig) -> dict[str, Any]:
    """What a forecast has to know of a variant's engine."""
    if name in (HANDWRITTEN, ONCE):
        sharding = Sharding(stage=0, every=name == HANDWRITTEN, bucket_cap_mb=DEFAULT_BUCKETS["bucket_cap_mb"])
        return {"sharding": sharding, "first_bucket_mb": DEFAULT_BUCKETS["first_bucket_mb"]}
    return {"sharding": sharding_of(engine), "formats": formats_of(engine, precision)}


def check(values: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises ConfigError for what cannot be measured."""
    config = RunConfig.from_dict(values)
    is_ddp = type(config.engine) is DDPConfig
    require(is_ddp, "engine", config.engine.name, "not one that is compared here", "Use engine=ddp")
    if config.batch.global_size is None:
        raise ConfigError("batch.global_size", None, "is not given", "State the samples of one optimizer step")
    for key in ("mbit", "within"):
        require_positive(f"link.{key}", options[key])
    for rate in options["rates"]:
        require_positive("link.rates", rate)
    require_count("link.windows", options["windows"], least=1)
    require(576 <= options["mtu"] <= 65535, "link.mtu", options["mtu"], "no such size", "Use 1500, or 9000")  # noqa: PLR2004


def compare(values: dict[str, Any], options: dict[str, Any], folder: Path) -> Figures:
    """All variants at one rate: a table, and a plot where there is matplotlib."""
    plot = plot_file("link.plot", options["plot"], folder / "link.png")
    figures = at_rate(values, list(VARIANTS), **{key: options[key] for key in ("mbit", "mtu", "windows")})
    batch = RunConfig.from_dict(values).batch
    figures["accumulation"] = micro_steps_of(range(batch.global_size or 0), RANKS, batch.micro_size)
    tables.show(tables.window_rows(figures), tables.title(figures), folder / "link.md")
    if plot is not None:
        tables.draw(figures, plot)
    return figures


def validate(values: dict[str, Any], options: dict[str, Any], folder: Path) -> Figures:
    """distaccum's variants, at each rate."""
    names = [name for name in VARIANTS if name not in (HANDWRITTEN, ONCE)]
    rates = [
        at_rate(values, names, mbit=rate, mtu=options["mtu"], windows=options["windows"]) for rate in options["rates"]
    ]
    figures = {"rates": rates}
    tables.show(tables.validation_rows(figures), "forecast and measurement", folder / "validation.md")
    return figures


def run(values: dict[str, Any], folder: Path) -> int:
    """Measures as the settings say; returns the exit code."""
    options, validates = values.pop("link"), values.pop("validate")
    check(values, options)
    why_not = obstacle()
    if why_not is not None:
        return print_error("link", LinkError(f"two hosts cannot be made: {why_not}"))
    try:
        figures = (validate if validates else compare)(values, options, folder)
    except LinkError as error:
        print_error("link", error)
        return 1
    (folder / "link.json").write_text(json.dumps(figures, indent=2))
    errors = [abs(row["error"]) for at in figures.get("rates", []) for row in at["ways"].values()]
    return int(max(errors, default=0.0) > options["within"])


def main() -> int:
    """Runs the command; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the hosts would be left behind
    return command("link", run)
