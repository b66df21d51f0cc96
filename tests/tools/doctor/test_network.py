"""The interfaces, beside what ``ip`` says of them; and whom gloo and NCCL would take."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from distaccum.tools.doctor.network import Interface, gloo_choice, interfaces, nccl_choice, network
from tests.tools.doctor.here import wrong


def _interface(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name=name, addresses=addresses, up=up, mtu=1500, bits=1e9, virtual=False)


LO, DOCKER, ETH, IB = (
    _interface("lo", "127.0.0.1"),
    _interface("docker0", "172.17.0.1"),
    _interface("eth0", "10.0.0.5"),
    _interface("ib0", "10.1.0.5"),
)


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_interfaces_are_those_of_ip() -> None:
    told = json.loads(subprocess.run(["ip", "-j", "address"], capture_output=True, check=True).stdout)  # noqa: S607
    seen = {one.name: one for one in interfaces()}
    assert set(seen) == {one["ifname"] for one in told}
    for one in told:
        addresses = {a["local"] for a in one["addr_info"] if a["scope"] != "link" and not a.get("label", "").count(":")}
        assert set(seen[one["ifname"]].addresses) <= addresses  # of several IPv4 addresses, the first
        assert bool(seen[one["ifname"]].addresses) == bool(addresses)
        assert seen[one["ifname"]].mtu == one["mtu"]
        assert seen[one["ifname"]].up == ("UP" in one["flags"] and one["operstate"] in ("UP", "UNKNOWN"))


@pytest.mark.parametrize(
    ("told", "seen", "chosen"),
    [
        ("", [LO, DOCKER, ETH, IB], IB),
        ("", [LO, DOCKER, ETH], ETH),
        ("", [LO, DOCKER], DOCKER),
        ("", [LO], LO),
        ("", [LO, _interface("ib0", up=False), ETH], ETH),
        ("eth", [LO, DOCKER, ETH, IB], ETH),
        ("=eth", [LO, ETH], None),
        ("=eth0", [LO, ETH], ETH),
        ("^lo,docker", [LO, DOCKER, ETH], ETH),
        ("^ib", [LO, IB, ETH], LO),
        ("wlan", [LO, ETH], None),
    ],
)
def test_nccl_takes(
    told: str, seen: list[Interface], chosen: Interface | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its documentation of NCCL_SOCKET_IFNAME says."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
    assert nccl_choice(seen)[0] == chosen


def test_gloo_on_the_loopback_is_wrong_between_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_choice([LO, ETH]) == (LO, "GLOO_SOCKET_IFNAME=lo")
    assert wrong(network(several_nodes=False, gpus=False)) == []
    found = network(several_nodes=True, gpus=False)
    assert wrong(found) == ["ranks of other machines cannot reach this one over gloo: GLOO_SOCKET_IFNAME=lo"]
    assert found.findings[0].mend.startswith("export GLOO_SOCKET_IFNAME=")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing7")
    assert wrong(network(several_nodes=False, gpus=False)) == [
        "GLOO_SOCKET_IFNAME=nothing7: there is no such interface here"
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=nothing7")
    assert wrong(network(several_nodes=False, gpus=True)) == ["NCCL finds no interface: NCCL_SOCKET_IFNAME==nothing7"]
