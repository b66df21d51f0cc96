"""Two hosts with a slow link between them: what a window takes and sends, and whether the forecast is right.

``python launch/link.py`` (as root), with Hydra overrides: a hand-written DDP loop that reduces every micro-step,
distaccum, and distaccum with 16-bit reduction, on a link of ``link.mbit``. ``validate=true`` compares forecasts with
measurements at ``link.rates`` instead, and exits with 1 where one is off by more than ``link.within``.

The hosts are network namespaces of this machine (``link_hosts.py``). Bytes are what the interface's counter says has
left a host, Ethernet, IP and TCP headers, acknowledgements and the launcher's messages included. The forecast is told
the rate, the latency of a small all-reduce, and what micro-steps and updates take where nothing is sent; not the
window's time. Table, figure and JSON go to the run directory.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import link_tables
from link_command import command, complain
from link_hosts import LinkError, obstacle, torchrun, two_hosts
from link_worker import WAYS

from distaccum.config.checks import require, require_count, require_positive
from distaccum.config.engine import DDPConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.config.schema import RunConfig
from distaccum.data.plan.batch import micro_steps_of
from distaccum.errors import ConfigError
from distaccum.forecast.cluster import Cluster
from distaccum.forecast.sharding import Formats, Sharding
from distaccum.forecast.window import Job, Sizes, Window

RANKS = 2
TIMEOUT_S = 1200
DEFAULT_BUCKETS = {"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0}  # DDP's own, where it is not told
Figures = dict[str, Any]


def at_rate(values: dict[str, Any], ways: Sequence[str], *, mbit: float, mtu: int, windows: int) -> Figures:
    """Measurement and forecast of each way on a link of that rate.

    Raises:
        LinkError: a host failed; the message ends with what it said.
    """
    with TemporaryDirectory() as folder, two_hosts(mbit=mbit, mtu=mtu) as hosts:
        asked = Path(folder) / "asked.json"
        asked.write_text(json.dumps({"config": values, "ways": ways, "windows": windows, "out": folder}))
        for done in torchrun(hosts, Path(__file__).with_name("link_worker.py"), [str(asked)], timeout=TIMEOUT_S):
            if done.returncode:
                raise LinkError(f"a host failed: {(done.stdout + done.stderr)[-2000:]}")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        "mbit": mbit,
        "mtu": mtu,
        "latency_us": max(rank["latency_us"] for rank in ranks),
        "ways": {name: summary(name, values, mbit, ranks) for name in ways},
    }


def summary(name: str, values: dict[str, Any], mbit: float, ranks: Sequence[Figures]) -> Figures:
    """Of the slower host; the other one waits for it."""
    found = [rank[name] for rank in ranks]
    row = {
        "seconds": max(median(one["seconds"]) for one in found),
        "all seconds": [one["seconds"] for one in found],
        **{key: max(one[key] for one in found) for key in ("bytes", "micro_step_ms", "update_ms")},
        **{key: found[0][key] for key in ("gradient bytes", "parameters")},
    }
    row["forecast"] = forecast(name, values, row, mbit, max(rank["latency_us"] for rank in ranks))
    row["error"] = row["forecast"] / row["seconds"] - 1
    return row


def forecast(name: str, values: dict[str, Any], row: Figures, mbit: float, latency_us: float) -> float:
    """Seconds of a window, by the forecast."""
    way, config = WAYS[name], RunConfig.from_dict(values)
    precision = way.config(config).precision
    job = Job(
        sizes=Sizes(tensors=tuple(row["parameters"])),
        global_batch_size=config.batch.global_size or 0,
        micro_batch_size=config.batch.micro_size,
        **engine_of(name, config.engine, precision),
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
    """What a forecast is told of a way's engine."""
    if WAYS[name].every:
        sharding = Sharding(stage=0, every=True, bucket_cap_mb=DEFAULT_BUCKETS["bucket_cap_mb"])
        return {"sharding": sharding, "first_bucket_mb": DEFAULT_BUCKETS["first_bucket_mb"]}
    return {"sharding": Sharding.of(engine), "formats": Formats.of(engine, precision)}


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
    if find_spec("matplotlib") is None:
        raise ConfigError("link.plot", options["plot"], "matplotlib is missing", "pip install 'distaccum[plot]'")


def compare(values: dict[str, Any], options: dict[str, Any], folder: Path) -> Figures:
    """All ways at one rate."""
    figures = at_rate(values, list(WAYS), **{key: options[key] for key in ("mbit", "mtu", "windows")})
    batch = RunConfig.from_dict(values).batch
    figures["accumulation"] = micro_steps_of(range(batch.global_size or 0), RANKS, batch.micro_size)
    link_tables.show(link_tables.window_rows(figures), link_tables.title(figures), folder / "link.md")
    link_tables.draw(figures, Path(options["plot"] or folder / "link.png"))
    return figures


def validate(values: dict[str, Any], options: dict[str, Any], folder: Path) -> Figures:
    """The ways that reduce once a window, at each rate."""
    ways = [name for name, way in WAYS.items() if not way.every]
    rates = [
        at_rate(values, ways, mbit=rate, mtu=options["mtu"], windows=options["windows"]) for rate in options["rates"]
    ]
    figures = {"rates": rates}
    link_tables.show(link_tables.validation_rows(figures), "forecast and measurement", folder / "validation.md")
    return figures


def run(values: dict[str, Any], folder: Path) -> int:
    """The command; the exit code."""
    options, validates = values.pop("link"), values.pop("validate")
    check(values, options)
    why_not = obstacle()
    if why_not is not None:
        return complain("link", LinkError(f"two hosts cannot be made: {why_not}"))
    try:
        figures = (validate if validates else compare)(values, options, folder)
    except LinkError as error:
        complain("link", error)
        return 1
    (folder / "link.json").write_text(json.dumps(figures, indent=2))
    errors = [abs(row["error"]) for at in figures.get("rates", []) for row in at["ways"].values()]
    return int(max(errors, default=0.0) > options["within"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the hosts would be left behind
    sys.exit(command("link", run))
