"""A group that is left while gloo still has an operation: what is said of its connections decides."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from distaccum.elastic.group import polled_group
from distaccum.elastic.group.polled_group import PolledGroup
from distaccum.errors import DistaccumError


class Work:
    """An operation that gloo never ends."""

    def is_completed(self) -> bool:
        """Never."""
        return False

    def wait(self, _: timedelta) -> None:
        """Not called."""


class Gloo:
    """Answers a receive with ``said``, once the connections were closed."""

    def __init__(self, said: str) -> None:
        self._said = ["Timed out waiting 1ms for recv operation to complete"], said
        self.closed = 0

    def recv(self, *_: Any) -> Any:
        """Raises what gloo says."""
        self.closed += 1
        first, then = self._said
        raise RuntimeError(first.pop() if first else then)


def _left(said: str, monkeypatch: pytest.MonkeyPatch) -> Gloo:
    monkeypatch.setattr(polled_group, "_UNTOLD_S", 0.05)
    monkeypatch.setattr(polled_group, "_DRAIN_S", 0.3)
    monkeypatch.setattr(polled_group, "_STUCK", [])
    gloo = Gloo(said)
    group = PolledGroup(gloo, HashStore(), 0, 2, lost=str, limit_s=lambda: None)
    group._started.add(Work())
    group.leave()
    return gloo


@pytest.mark.parametrize("said", ["Connection closed by peer [127.0.0.1]:1", "Application timeout caused pair closure"])
def test_a_send_that_gloo_tells_nothing_of_a_closed_connection_holds_nobody_up(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo = _left(said, monkeypatch)
    assert gloo.closed == 2
    assert [gloo] == polled_group._STUCK  # or freeing it would wait for the send's time-out


def test_with_a_connection_that_is_open_its_tensors_are_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistaccumError, match="does not let go of the tensors"):
        _left("Timed out waiting 1ms for recv operation to complete", monkeypatch)
