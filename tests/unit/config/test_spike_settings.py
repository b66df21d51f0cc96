"""Settings of spikes and of the clock of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from distaccum import RunConfig
from distaccum.errors import ConfigError
from tests.support.commands import TRAIN, run


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer": {"on_spike": "stop"}}, "trainer.on_spike=stop: no such choice"),
        ({"trainer": {"spike_zscore": 0}}, "trainer.spike_zscore=0"),
        ({"trainer": {"spike_window": 1}}, "trainer.spike_window=1: must be at least 2"),
        ({"trainer": {"on_spike": "rollback"}, "checkpoint": {"every": 0}}, "checkpoint.every=0 saves nothing to roll"),
        ({"checkpoint": {"every_minutes": 0}}, "checkpoint.every_minutes=0"),
        ({"checkpoint": {"every_minutes": "soon"}}, "checkpoint.every_minutes"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(settings)
    assert said in str(error.value)


def test_the_clock_alone_is_enough_to_roll_back_and_to_keep_the_best() -> None:
    settings = {"every": 0, "every_minutes": 30, "best": "eval_loss"}
    config = RunConfig.from_dict({"trainer": {"on_spike": "rollback"}, "checkpoint": settings})
    assert config.checkpoint.saves
    assert config.checkpoint.every_minutes == 30


@pytest.mark.parametrize("off", ["off", False])
def test_off_may_be_what_yaml_makes_of_it(off: Any) -> None:
    assert RunConfig.from_dict({"trainer": {"on_spike": off}}).trainer.on_spike == "off"


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Any) -> None:
    finished = run("--cfg", "job", "trainer.on_spike=off", "checkpoint.every_minutes=15", script=TRAIN, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "every_minutes: 15" in finished.stdout
    assert run("--check", "trainer.on_spike=off", script=TRAIN, cwd=tmp_path).returncode == 0
