"""Training over a link between two hosts: the same numbers as on one, and no more bytes than necessary."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from distaccum.config.schema import conf_dir, plain
from distaccum.errors import ConfigError
from launch.bench.network import hosts as network_hosts
from launch.bench.network import main as network
from tests.cluster.two_hosts.hosts import Hosts, hosts, need_hosts, obstacle, succeed_on, torchrun, two_hosts
from tests.support.commands import QUIET, TINY, metrics, status, succeed

pytestmark = pytest.mark.slow

__all__ = ["hosts"]
SETTINGS = (*TINY, *QUIET, "batch.micro_size=4", "trainer.max_steps=5")
EXACT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens")
ONCE = ("distaccum", "distaccum, reduce_dtype=bf16", "distaccum, precision=bf16 too")


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
    return {line.split()[0] for line in listed.stdout.splitlines()}


def _ranks_metrics(run_dir: Path) -> list[list[Any]]:
    return [[record[key] for key in EXACT] for record in metrics(run_dir)]


def test_two_hosts_train_bitwise_as_one_does(hosts: Hosts, tmp_path: Path) -> None:
    """The metrics are equal, and the reduced bytes have gone over the link."""
    before = [host.sent() for host in hosts]
    succeed_on(hosts, *SETTINGS, f"hydra.run.dir={tmp_path / 'two'}")
    sent = [host.sent() - count for host, count in zip(hosts, before, strict=True)]
    assert status(tmp_path / "two") == {"state": "done", "step": 5, "reason": ""}
    succeed(*SETTINGS, f"hydra.run.dir={tmp_path / 'one'}", world=2)
    assert len(_ranks_metrics(tmp_path / "one")) == 5
    assert _ranks_metrics(tmp_path / "two") == _ranks_metrics(tmp_path / "one")
    assert min(sent) > 5 * 4 * 7216


@pytest.mark.heavy
def test_a_host_that_sees_a_checkpoint_late_resumes_bitwise(hosts: Hosts, tmp_path: Path) -> None:
    """As with NFS; what holds back directory entries is ``late_entries.py``. It was an error that there is none."""
    script, saved = Path(__file__).with_name("late_entries.py"), ("checkpoint.every=1", "resume=auto")
    for steps in (3, 5):
        words = (*SETTINGS, *saved, f"trainer.max_steps={steps}", f"hydra.run.dir={tmp_path / 'two'}")
        succeed_on(hosts, *words, script=script)
    succeed(*SETTINGS, f"hydra.run.dir={tmp_path / 'one'}", world=2)
    assert _ranks_metrics(tmp_path / "two") == _ranks_metrics(tmp_path / "one")


def _values(*overrides: str) -> dict[str, Any]:
    """The plain values of ``conf/link.yaml`` with these overrides."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return plain(compose("link", overrides=list(overrides)))


@pytest.mark.heavy
@pytest.mark.parametrize("accumulation", [2, 8])
def test_a_window_sends_the_gradient_once_and_half_of_it_in_16_bits(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the counters of both interfaces, with headers and acknowledgements; bytes do not depend on the speed."""
    need_hosts()
    monkeypatch.setenv("COLUMNS", "200")  # or names would be cut
    values = _values("link.mbit=1000", "link.windows=5", f"batch.global_size={4 * accumulation}")
    assert network.run(values, tmp_path) == 0
    said = capsys.readouterr().out
    figures = json.loads((tmp_path / "link.json").read_text())
    assert figures["accumulation"] == accumulation
    over = {name: row["bytes"] / row["gradient bytes"] for name, row in figures["ways"].items()}
    assert accumulation <= over.pop("hand-written DDP") <= accumulation * 1.02
    assert 1 <= over.pop("hand-written, no_sync") <= 1.02
    assert 1 <= over.pop("distaccum") <= 1.02
    assert set(over) == {"distaccum, reduce_dtype=bf16", "distaccum, precision=bf16 too"}
    for name, ratio in over.items():
        assert 0.5 <= ratio <= 0.51, name
    table = (tmp_path / "link.md").read_text()
    for name, row in figures["ways"].items():
        assert row["gradient bytes"] == 4 * sum(row["parameters"]) > 10_000_000
        assert row["forecast"] > accumulation * row["micro_step_ms"] / 1000 > 0
        assert [len(seconds) for seconds in row["all seconds"]] == [5, 5]
        assert ("count_last_ms" in row) == name.startswith("distaccum")
        assert row.get("count_best_ms", 0) <= row.get("count_last_ms", 0) <= row.get("count_first_ms", 0)
        assert row.get("count_first_ms", 0) < 1e3 * row["seconds"]
        assert row.get("alone_p10_ms", 0) <= row.get("alone_ms", 0)
        assert name in table
        assert name in said
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_forecasts_are_within_a_fifth_of_what_is_measured(tmp_path: Path) -> None:
    """At three rates; the exit code is 1 otherwise."""
    need_hosts()
    assert network.run(_values("validate=true"), tmp_path) == 0
    figures = json.loads((tmp_path / "link.json").read_text())
    assert [at["mbit"] for at in figures["rates"]] == [100, 200, 400]
    for at in figures["rates"]:
        assert set(at["ways"]) == set(ONCE)
        for row in at["ways"].values():
            assert row["forecast"] == pytest.approx(row["seconds"], rel=0.2)
    assert (tmp_path / "validation.md").read_text().count("\n| ") == 1 + 1 + 9


@pytest.mark.heavy
def test_the_link_lets_no_more_through_than_its_rate(tmp_path: Path) -> None:
    """A megabyte at 8 Mbit/s takes a second, less what may leave at once."""
    need_hosts()
    program = tmp_path / "send.py"
    program.write_text(
        "import socket, sys\n"
        "there = (sys.argv[2], 5000)\n"
        "if sys.argv[1] == 'serve':\n"
        "    server = socket.create_server(there)\n"
        "    print('ready', flush=True)\n"
        "    stream, _ = server.accept()\n"
        "    while stream.recv(65536): pass\n"
        "else:\n"
        "    with socket.create_connection(there) as stream: stream.sendall(bytes(1_000_000))\n"
    )
    with two_hosts(mbit=8) as (a, b):
        server = subprocess.Popen(
            a.command(sys.executable, str(program), "serve", a.address), stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        with server, server.stdout:
            assert server.stdout.readline() == "ready\n"
            began = monotonic()
            subprocess.run(b.command(sys.executable, str(program), "send", a.address), check=True, timeout=60)
            assert server.wait(timeout=60) == 0
            took = monotonic() - began
        assert took > 0.9
        until = monotonic() + 10  # what is queued on the link is sent, and not yet received
        while a.received() != b.sent() and monotonic() < until:
            sleep(0.05)
        assert a.received() == b.sent()
        assert 1_000_000 < b.sent() < 1_020_000


def test_hosts_are_gone_after_a_failure_and_nothing_runs_on_them() -> None:
    need_hosts()
    before = _namespaces()
    left: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with two_hosts(mbit=100) as (a, b):
            assert _namespaces() - before == {a.namespace, b.namespace}
            left.append(subprocess.Popen(b.command("sleep", "600")))
            while not b.processes():
                pass
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert _namespaces() == before
    assert left[0].wait(timeout=10) < 0


@pytest.mark.heavy
def test_a_host_that_fails_or_hangs_is_not_waited_for(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host fails at once, and the other would sleep for an hour."""
    monkeypatch.setattr(network_hosts, "GRACE_S", 2.0)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nif '10.77.0.1' in os.environ['WHERE']: raise SystemExit(3)\ntime.sleep(3600)\n"
    )
    first = {"WHERE": "10.77.0.1"}
    finished = torchrun(hosts, [str(program)], timeout=200, environment=first)
    assert all(one.returncode for one in finished)
    with pytest.raises(network_hosts.LinkError, match="not done after 3 s"):
        torchrun(hosts, [str(program)], timeout=3, environment={"WHERE": ""})
    assert not any(host.processes() for host in hosts)


def test_without_root_or_tools_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISTACCUM_REQUIRE_TOOLS", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obstacle() == "ip and tc not found: install iproute2"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert obstacle() == "network namespaces need root"
    values = {"link": {"mbit": 1.0, "mtu": 9000, "windows": 1, "rates": [], "within": 0.2, "plot": None}}
    assert network.run({**values, "validate": False}, tmp_path) == 2
    assert capsys.readouterr().err == "link: two hosts cannot be made: network namespaces need root\n"
    with pytest.raises(pytest.skip.Exception, match="need root"):
        need_hosts()
    monkeypatch.setenv("DISTACCUM_REQUIRE_TOOLS", "1")
    with pytest.raises(pytest.fail.Exception, match="need root"):
        need_hosts()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({}, {"rates": [100, 0]}, "link.rates=0: must be a positive finite number"),
        ({}, {"mtu": 10}, "link.mtu=10: no such size"),
        ({}, {"windows": 0}, "link.windows=0: must be at least 1"),
        ({"engine": "fsdp2"}, {}, "engine=fsdp2: not one that is compared here"),
        ({"batch": {"global_size": None}}, {}, "batch.global_size: is not given"),
    ],
)
def test_settings_of_the_link_that_cannot_be(values: dict[str, Any], options: dict[str, Any], message: str) -> None:
    good = {"mbit": 200.0, "mtu": 1500, "windows": 1, "rates": [100], "within": 0.2, "plot": None}
    network.check({}, good)
    with pytest.raises(ConfigError, match=re.escape(message)):
        network.check(values, good | options)
