"""Processes: how they find each other, what they are to each other, and their random number generators."""

import base64
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import sleep

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from distaccum.distributed import environment
from distaccum.distributed import world as world_module
from distaccum.distributed.environment import REJECTED, LaunchEnvironment, main_first, private_store
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, PeerError
from distaccum.testing import single_process_world
from tests.support.threads import on_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_torchruns_variables_are_read_and_without_them_it_is_a_world_of_one() -> None:
    ranks = LaunchEnvironment.from_environment(TORCHRUN)
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.launched) == (3, 4, 1, True)
    assert LaunchEnvironment.from_environment({"MASTER_PORT": "1"}) == LaunchEnvironment()
    with pytest.raises(ConfigError, match="RANK=x: not a number"):
        LaunchEnvironment.from_environment(TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}: not set"):
        LaunchEnvironment.from_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_that_are_no_ranks_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2: .* each would train alone. Start one task a node with torchrun"):
        LaunchEnvironment.from_environment({name: "2", "SLURM_NTASKS": "2"})
    assert LaunchEnvironment.from_environment({name: "1", "SLURM_NTASKS": "2"}) == LaunchEnvironment()
    assert LaunchEnvironment.from_environment(TORCHRUN | {name: "2"}).size == 4
    with single_process_world():  # a program that makes ranks of its tasks itself
        assert LaunchEnvironment.from_environment({name: "2"}) == LaunchEnvironment()


def test_collectives_of_one(gloo_world: World) -> None:
    assert gloo_world.all_reduce_host([3, 2**53 - 1, 0.5]) == [3, 2**53 - 1, 0.5]
    assert gloo_world.all_reduce_max_host([3, 4]) == [3, 4]
    assert gloo_world.all_gather_names(["b", "a", "b"]) == ("a", "b")
    assert gloo_world.all_reduce_(torch.tensor([1.5])).tolist() == [1.5]
    assert gloo_world.broadcast_str("a") == "a"
    assert gloo_world.is_main
    gloo_world.barrier()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.uint8])
@pytest.mark.parametrize("row", [(), (3,), (2, 0)])
@pytest.mark.parametrize("rows", [(2, 0, 3), (0, 0, 0)])
def test_rows_of_all_ranks(dtype: torch.dtype, row: tuple[int, ...], rows: tuple[int, ...]) -> None:
    given = [torch.randn(number, *row).mul(9).to(dtype) for number in rows]
    for found in on_ranks(3, lambda world: world.all_gather_rows(given[world.rank], rows)):
        assert [one.dtype for one in found] == [dtype] * 3
        assert all(torch.equal(*pair) for pair in zip(found, given, strict=True))


def test_the_group_is_closed_on_failure_and_can_be_opened_again() -> None:
    def fail() -> None:
        with single_process_world():
            raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            fail()
        assert not dist.is_initialized()


def test_the_groups_timeout_is_read_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "GROUP_TIMEOUT", timedelta(seconds=7))
    cpu = torch.device("cpu")
    with world_module.open_world(LaunchEnvironment(), HashStore(), cpu):
        group = dist.group.WORLD
        assert group is not None
        assert group._get_backend(cpu).options._timeout == timedelta(seconds=7)


def test_a_second_group_is_refused(gloo_world: World) -> None:
    with pytest.raises(RuntimeError, match="open already"), single_process_world():
        pass
    assert gloo_world.all_reduce_host([1]) == [1]


SIZE = 3


def _meet(connect: Callable[[], Store], *, last: int) -> list[str]:
    """All ranks at once, one of them late; each then writes what nobody else may, and reads what rank 0 has written."""

    def rank(number: int) -> str:
        sleep(0.2 * (number == last))
        part = private_store(connect(), number, SIZE, timeout_s=20)
        if number == 0:
            part.set("job", f"by the set whose last was {last}")
        return str(part.get("job").decode())

    with ThreadPoolExecutor(SIZE) as pool:
        return [*pool.map(rank, range(SIZE))]


@pytest.mark.parametrize("kind", ["in memory", "of torchrun's kind"])
def test_each_set_of_ranks_reads_its_own_notes(kind: str) -> None:
    timeout = timedelta(seconds=30)
    shared, server = HashStore(), TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)

    def connect() -> Store:  # over the network every rank has a connection of its own
        return shared if kind == "in memory" else TCPStore("127.0.0.1", server.port, timeout=timeout)

    for last in (0, 1, 2, 0):  # the second time on, words and notes of ranks before them are there
        assert _meet(connect, last=last) == [f"by the set whose last was {last}"] * SIZE


def test_a_rank_that_does_not_come_is_told_of_before_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_FIRST_WORD_S", 0.05)
    with caplog.at_level("WARNING", "distaccum"), pytest.raises(TimeoutError):
        private_store(HashStore(), 0, 3, timeout_s=0.3)
    assert [record.getMessage()[:32] for record in caplog.records] == ["ranks [1, 2] have not come after"] * 3


def test_a_word_of_a_rank_before_is_not_taken_for_the_rank() -> None:
    store = HashStore()
    store.set("meeting/1", "stale")
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not come"):
        private_store(store, 0, 2, timeout_s=0.2)


def test_alone_there_is_nobody_to_wait_for() -> None:
    part = private_store(HashStore(), 0, 1, timeout_s=0.1)
    part.set("a", "b")
    assert part.get("a") == b"b"


def _draw() -> tuple[list[float], list[float], list[float]]:
    """Numbers of torch, NumPy (with an odd number of normal ones, so that one is cached) and Python."""
    numpys = [*np.random.normal(size=3), *np.random.random(2)]  # noqa: NPY002  the global generator is what is tested
    pythons = [random.gauss(0, 1), random.random()]  # noqa: S311
    return torch.randn(3).tolist(), [float(number) for number in numpys], pythons


def _through_json(state: RNGState) -> RNGState:
    return RNGState.from_json(json.loads(json.dumps(state.to_json())))


@pytest.mark.parametrize("kept", [lambda state: state, _through_json], ids=["in memory", "through JSON"])
def test_what_was_captured_is_drawn_again(kept: Callable[[RNGState], RNGState]) -> None:
    _draw()  # caches a normal number
    state = kept(RNGState.capture(torch.device("cpu")))
    first, second = _draw(), _draw()
    assert first != second
    state.restore()
    assert _draw() == first
    state.restore()
    assert _draw() == first


def test_the_file_format_stays() -> None:
    """Checkpoints of earlier versions hold these values."""
    state = RNGState.capture().to_json()
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    assert state == {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch": {"cpu": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()},
    }


def test_a_gpus_state_is_left_out_where_there_is_none() -> None:
    values = RNGState.capture().to_json()
    values["torch"]["cuda"] = base64.b64encode(bytes(16)).decode()
    state = RNGState.from_json(values, torch.device("cpu"))
    assert state.gpu is None
    state.restore()


def test_a_gpus_generator_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: which device is asked, and what is written back to it."""
    device, generator = torch.device("cuda", 1), torch.arange(16, dtype=torch.uint8)
    written: list[tuple[list[int], torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda asked: generator if asked == device else None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, to: written.append((state.tolist(), to)))
    values = RNGState.capture(device).to_json()
    assert values["torch"]["cuda"] == base64.b64encode(bytes(range(16))).decode()
    RNGState.from_json(json.loads(json.dumps(values)), device).restore()
    RNGState.capture(device).restore()
    assert written == [(list(range(16)), device)] * 2


def test_one_rank_of_each_machine_is_first() -> None:
    """Two machines of two ranks; the store gives up waiting at once, and nobody waits in it."""
    store, done = HashStore(), list[tuple[int, int]]()
    store.set_timeout(timedelta(milliseconds=10))

    def prepare(rank: int) -> list[str]:
        ranks = LaunchEnvironment(rank=rank, size=4, local_rank=rank % 2, machine=f"{rank // 2}", launched=True)
        said = []
        for turn in range(3):
            try:
                with main_first(ranks, store):
                    if ranks.local_rank == 0:
                        sleep(0.05)
                    done.append((turn, rank // ((rank, turn) != (2, 1))))
            except (ZeroDivisionError, PeerError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(prepare, range(4)))
    assert said[:2] == [[], []]
    assert said[2] == ["ZeroDivisionError: integer division or modulo by zero"]
    assert said[3][0].startswith(
        "PeerError: rank 2: ZeroDivisionError: integer division or modulo by zero (while this rank waited for"
    )
    assert len(said[3]) == 1
    assert sorted(done) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    seconds = [(turn, rank) for turn, rank in done if rank % 2]
    assert all(done.index((turn, rank - 1)) < done.index((turn, rank)) for turn, rank in seconds)


def test_nobody_waits_for_a_rank_that_cannot_go_on() -> None:
    store = HashStore()
    store.set(REJECTED, "data.path=none: no such file")
    second = LaunchEnvironment(rank=1, size=2, local_rank=1, launched=True)
    with pytest.raises(PeerError, match=r"data\.path=none"), main_first(second, store):
        raise AssertionError
    with single_process_world() as world, world.main_first():
        pass
