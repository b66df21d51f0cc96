"""The interfaces, beside what ``ip`` says of them; and what is made of the driver's answers about GPUs."""

import json
import shutil
import subprocess

import pytest
import torch

from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.gpus import Gpu, gpus, judge_health, judge_links, judge_use, link_kinds, parse, runs_on
from distaccum.tools.doctor.network import Interface, gloo_choice, interfaces, nccl_choice, network
from tests.tools.doctor.here import notes, wrong


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


TABLE = """\
0, GPU-aa, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 81000
1, GPU-bb, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 40000
"""
MATRIX = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-51\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\t52-103\t1\t\tN/A
NIC0\tPXB\tNODE\tPHB\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


def test_the_table_of_gpus() -> None:
    first, second = parse(TABLE)
    assert first == Gpu(
        index=0,
        uuid="GPU-aa",
        name="NVIDIA H100 80GB HBM3",
        driver="550.54.15",
        total=81559 * 2**20,
        free=81000 * 2**20,
    )
    assert second.free == 40000 * 2**20
    assert parse("No devices were found\n") == []
    assert parse("0, GPU-a, a small part, 1, [N/A], [N/A]\n")[0].total == 0


def test_who_uses_them() -> None:
    found = Look()
    judge_use(found, parse(TABLE), "GPU-bb, 4711, /usr/bin/python3, 41000\n")
    assert wrong(found) == ["GPU 1: 40.6 GiB of its memory are taken by python3 (4711, 41000 MiB)"]
    assert found.findings[0].mend == "export CUDA_VISIBLE_DEVICES=0"
    found = Look()
    judge_use(found, parse(TABLE)[:1], "")
    assert found == Look()


@pytest.mark.parametrize(
    ("row", "problems", "noted"),
    [
        ("GPU-aa, 0, 0x0000000000000001, 16, 16, 35", 0, 0),  # idle
        ("GPU-aa, 0, 0x0000000000000004, 16, 16, 70", 0, 0),  # at its power cap, as under load
        ("GPU-aa, [N/A], [N/A], [N/A], [N/A], [N/A]", 0, 0),
        ("GPU-aa, 2, 0x0000000000000000, 16, 16, 35", 1, 0),
        ("GPU-aa, 0, 0x0000000000000048, 16, 16, 95", 1, 0),
        ("GPU-aa, 0, 0x0000000000000000, 8, 16, 35", 0, 1),
        ("GPU-zz, 9, 0x0000000000000048, 1, 16, 95", 0, 0),  # not ours
    ],
)
def test_health(row: str, problems: int, noted: int) -> None:
    found = Look()
    judge_health(found, parse(TABLE), row + "\n")
    assert (len(wrong(found)), len(notes(found))) == (problems, noted)
    if "0x0000000000000048" in row and problems:
        assert "hardware slowdown, too hot for the hardware, 95 °C" in wrong(found)[0]


def test_links() -> None:
    assert link_kinds(MATRIX) == {"NV18", "SYS"}
    assert link_kinds("") == set()
    found = Look()
    judge_links(found, MATRIX, NVLINK)
    assert found.value("NVLink") == {"links": 3, "GB/s": 26.562}
    assert wrong(found) == ["1 of 4 NVLink links are not up"]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),  # binaries run on later minor versions
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),  # and the driver compiles what is not a binary
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "compute_120"], False),
    ],
)
def test_what_torch_was_built_for(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) is runs


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpus()
    assert found.value("GPUs seen") == 0
    assert found.findings == []


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same() -> None:
    found = gpus()
    assert found.value("GPUs seen") == torch.cuda.device_count()
    names = [fact.value["name"] for fact in found.facts if isinstance(fact.value, dict) and "uuid" in fact.value]
    assert names == [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
