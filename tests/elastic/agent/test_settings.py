"""What the agent reads of its command line."""

from __future__ import annotations

import re

import pytest

from distaccum.elastic.agent.settings import Settings
from distaccum.errors import ConfigError


def test_alone_nothing_has_to_be_said() -> None:
    assert Settings.of([], {}) == Settings()
    assert Settings.of([], {"NPROC": "3"}).nproc == 3


def test_flags_and_overrides_stand_in_any_order() -> None:
    words = ["seed=1", "--nproc", "4", "--nnodes=2", "model.n_layer=1", "--rdzv=n1:29500", "--node-rank", "1", "+x=2"]
    read = Settings.of(words, {"NPROC": "3"})
    assert (read.nproc, read.nnodes, read.node, read.host, read.port) == (4, 2, 1, "n1", 29500)
    assert read.overrides == ("seed=1", "model.n_layer=1", "+x=2")


def test_what_the_configuration_says_of_elastic_is_read_and_left_to_the_workers() -> None:
    words = ["elastic.rejoin=true", "elastic.min_ranks=2", "elastic.expel_after=1m", "++elastic.rejoin=False"]
    read = Settings.of(words, {})
    assert (read.rejoin, read.least, read.expel_after_s) == (False, 2, 60.0)
    assert read.overrides == tuple(words)
    assert Settings.of(["elastic.expel_after=2.5"], {}).expel_after_s == 2.5
    assert Settings.of(["elastic.expel_after='0:20'"], {}).expel_after_s == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc=x", "--nproc=x: not a number of processes. "),
        ("--nproc 0", "--nproc=0: not a number of processes. "),
        ("--nproc", "--nproc: no value follows it. "),
        ("--nprocs 2", "--nprocs: no such flag; did you mean --nproc"),
        ("--nnodes=two", "--nnodes=two: not a number of nodes. "),
        ("--nnodes=2 --node-rank=0", "--rdzv: not given, and 2 nodes have nowhere to meet. "),
        ("--nnodes=2 --rdzv=n1:1", "--node-rank=: not one of 2 nodes. Give each its own, 0 to 1"),
        ("--nnodes=2 --rdzv=n1:1 --node-rank=2", "--node-rank=2: not one of 2 nodes. "),
        ("--node-rank=1", "--node-rank=1: not one of 1 nodes. "),
        ("--rdzv=n1", "--rdzv=n1: not HOST:PORT. "),
        ("--rdzv=n1:70000", "--rdzv=n1:70000: not HOST:PORT. "),
        ("-m seed=1,2", "-m: an elastic job is one run, and no sweep. "),
        ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: an elastic job is one run"),
        ("elastic.rejoin=maybe", "elastic.rejoin=maybe: neither true nor false. "),
        ("elastic.min_ranks=0", "elastic.min_ranks=0: not a number of ranks. "),
        ("elastic.expel_after=soon", "elastic.expel_after=soon: not a positive length of time. "),
        ("elastic.expel_after=-1", "elastic.expel_after=-1.0: not a positive length of time. "),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        Settings.of(words.split(), {})


def test_what_nproc_says_is_named_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^NPROC=some: not a number of processes"):
        Settings.of([], {"NPROC": "some"})
