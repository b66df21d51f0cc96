"""What is said of ranks together, by numbers worked out by hand; real ranks: ``tests/tools/test_doctor_command.py``."""

from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.tools.doctor.agreement import About, agreement, listed, nodes
from distaccum.tools.doctor.collective import judge_rate
from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.meeting import AbsentError, Meeting, judge_clock
from tests.tools.doctor.here import notes, wrong


def _about(rank: int, local_rank: int, host: str, **versions: str) -> About:
    return About(rank=rank, local_rank=local_rank, host=host, pid=100 + rank, versions=versions, settings={})


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    ranks = [_about(rank, rank % 2, f"n{rank // 2}", torch="2.13.0", Python="3.11.7") for rank in range(4)]
    assert agreement(ranks).findings == []
    ranks[3] = replace(
        ranks[3],
        versions={"torch": "2.12.0", "Python": "3.11.7"},
        settings={"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"},
    )
    found = agreement(ranks)
    assert wrong(found) == [
        "torch differs: 2.13.0 on ranks 0 to 2; 2.12.0 on rank 3",
        "NCCL_IB_DISABLE differs: none on ranks 0 to 2; 1 on rank 3",
    ]
    assert notes(found) == ["NCCL_IB_HCA differs: none on ranks 0 to 2; mlx5_0 on rank 3"]
    assert [one.mend for one in found.findings if one.wrong] == [
        "python -m pip install 'torch==2.13.0'    # on every node",
        "unset NCCL_IB_DISABLE    # on every node",
    ]


def test_nodes_are_named_by_their_hosts_or_by_their_first_rank() -> None:
    two = [_about(rank, rank % 2, f"n{rank // 2}") for rank in range(4)]
    assert nodes(two) == {"n0": [0, 1], "n1": [2, 3]}
    assert nodes([_about(0, 0, "pod"), _about(1, 0, "pod")]) == {"pod (rank 0)": [0], "pod (rank 1)": [1]}
    assert [listed(one) for one in ([3], [0, 1, 2], [0, 2])] == ["rank 3", "ranks 0 to 2", "ranks 0 and 2"]


@pytest.mark.parametrize(
    ("best", "text", "is_wrong"),
    [
        ((0.001, 0.5), "500 ms ahead of rank 0's, give or take 1 ms", False),
        ((0.001, -90.0), "90 s behind rank 0's, give or take 1 ms", True),
        ((5.0, 4.0), "4 s ahead of rank 0's, give or take 5 s", False),  # the network is slow, not the clock
        (None, "no answer within 10 s", False),
    ],
)
def test_a_clock(best: tuple[float, float] | None, text: str, is_wrong: bool) -> None:
    found = Look()
    judge_clock(found, 4, "n1", best)
    assert [fact.text for fact in found.facts] == [text]
    assert bool(wrong(found)) is is_wrong


def _measured(bits: float, backend: str = "gloo") -> Look:
    found = Look()
    found.tell("backend", backend)
    found.tell("all-reduce of 1.0 KiB", "", {"bytes": 1024, "seconds": 1, "bus_bits_per_s": 1e6})
    found.tell("all-reduce of 64.0 MiB", "", {"bytes": 2**26, "seconds": 1, "bus_bits_per_s": bits})
    return found


@pytest.mark.parametrize(
    ("bits", "nominal", "backend", "virtual", "judged"),
    [
        (0.9e9, 1e9, "gloo", False, ""),
        (0.4e9, 1e9, "gloo", False, "wrong"),
        (0.4e9, 1e9, "gloo", True, "note"),  # a veth's rate is a constant
        (8e9, 100e9, "gloo", False, ""),  # as much as gloo moves
        (8e9, 100e9, "nccl", False, "wrong"),
    ],
)
def test_a_rate_beside_the_links(bits: float, nominal: float, backend: str, virtual: bool, judged: str) -> None:
    found = _measured(bits, backend)
    fast = {"name": "eth1", "bits": 400e9, "virtual": False}
    judge_rate(found, {"n0": fast, "n1": {"name": "eth0", "bits": nominal, "virtual": virtual}}, nodes=2)
    assert found.value("nominal") == nominal
    assert ("wrong" if wrong(found) else "note" if notes(found) else "") == judged
    if judged:
        assert "eth0 of n1" in found.findings[0].what


def test_a_rate_without_a_nominal_one_is_not_judged() -> None:
    for links, count in (({"n0": None}, 2), ({"n0": {"name": "e", "bits": None, "virtual": False}}, 2), ({}, 1)):
        found = _measured(1.0)
        judge_rate(found, links, nodes=count)
        assert found.value("nominal") == 0
        assert found.findings == []


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(AbsentError, match=r"ranks \[1, 2\] have not come within 0 s"):
        Meeting.open(LaunchEnvironment(rank=0, size=3, launched=True), within_s=0.3)
