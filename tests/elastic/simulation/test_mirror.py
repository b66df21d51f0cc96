"""zero1's shares survive the loss of a rank at every moment, and of several unless neighbours are among them."""

import pytest

from tests.support.mirror_model import BrokenError, Rules, Search


@pytest.mark.parametrize(("members", "deaths", "newcomers"), [(2, 1, 1), (3, 2, 1), (4, 2, 1), (4, 3, 0)])
def test_what_is_left_is_of_one_window_and_whole(members: int, deaths: int, newcomers: int) -> None:
    found = Search(members, deaths, newcomers)
    assert found.states > 20
    assert found.lost < found.states / 2


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(sends_weights_at=2), id="weights are sent before the predecessor's state has come"),
        pytest.param(Rules(keeps_before=False), id="what was dealt before is forgotten at once"),
        pytest.param(Rules(looks_ahead=False), id="who is behind goes on with the state of before"),
    ],
)
def test_another_order_is_found_wrong(rules: Rules) -> None:
    with pytest.raises(BrokenError):
        Search(3, 2, 1, rules)
