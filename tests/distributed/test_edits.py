"""What users' loops do to weights, optimizers and groups between windows is exact, or refused by one message."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.distributed.workers.edits import PROGRAMS
from tests.support.answers import answer
from tests.support.optional import needs

pytestmark = [pytest.mark.slow, needs("deepspeed")]
_OTHERS = "ranks would step with different settings"
_FLAT = "its rule looks at more than one element"
_HOOK = "would see a part of the parameters on each rank"
_OF_RANKS = {
    "a rate of the rank's": f"{_OTHERS}: lr of group 0 of optimizer 0 is 0.02 on rank 0, and 0.04 on rank 1",
    "a decay of the rank's": f"{_OTHERS}: weight_decay of group 0",
    "a schedule of the rank's": f"{_OTHERS}: the schedule's next factor",
}
# Where a rank steps a part.
_IN_PARTS = {
    "hook": _HOOK,
    "hook after": _HOOK,
    "hook later": _HOOK,
    "hook, fused and clipped": _HOOK,
    "add_param_group": "the optimizer's groups hold other parameters than when the engine was made",
    "state_dict": "see one rank's share",
}
_COUPLED = ("global norm", "global norm, a warm-up", "norm over groups")
_ZERO1 = dict.fromkeys(_COUPLED, "its step of one parameter depends on the others")
_FLAT_RULES = dict.fromkeys((*_COUPLED, "own norms"), _FLAT)
_COPIES = {
    "momentum by parameter": "optimizer.state was asked for",
    "unfrozen": "requires_grad of middle.weight was changed",
}
_NO_WHOLE = "was changed outside of a window, which changes nothing at engine.stage=3"
_WIDE = {"float64 too": "in float32, which is in float64"}
REFUSED: dict[str, dict[str, str]] = {
    "ddp": {**_OF_RANKS, "unfrozen": "a parameter was unfrozen after wrapping"},
    "zero1": {**_OF_RANKS, **_IN_PARTS, **_ZERO1, "unfrozen": "a parameter was unfrozen after wrapping"},
    "ds0": {**_OF_RANKS, "unfrozen": _COPIES["unfrozen"], "add_param_group": _IN_PARTS["add_param_group"], **_WIDE},
    "ds1": {**_OF_RANKS, **_IN_PARTS, **_FLAT_RULES, **_COPIES, **_WIDE},
    "ds2": {**_OF_RANKS, **_IN_PARTS, **_FLAT_RULES, **_COPIES, **_WIDE},
    "ds3": {**_OF_RANKS, **_IN_PARTS, **_FLAT_RULES, **_COPIES, **_WIDE},
    "ds3x": dict.fromkeys(("clamp", "clamp by groups", "load_state_dict"), _NO_WHOLE),
}
# In 16 bits the whole batch itself is off by a few roundings of them.
ROUNDING_OF_BF16 = 3e-2
_QUICK = (
    *(f"zero1:{name}" for name in ("rebind .data", "clamp by groups", "global norm, a warm-up")),
    *(f"ds2:{name}" for name in ("clamp .data", "rebind .data", "clamp by groups", "hook later")),
    *("ds2/bf16:clamp .data", "ds3x:clamp", "ddp:a rate of the rank's", "zero1:a schedule of the rank's"),
)


def hold(found: Sequence[Mapping[str, Any]], engine: str) -> None:
    """Each program of an engine that was run is exact or refused, on all ranks alike."""
    name, _, sixteen = engine.partition("/")
    for program in PROGRAMS:
        cell = f"{program} {engine}"
        if cell not in found[0]:
            continue
        message = REFUSED[name].get(program)
        if message is None:
            assert not isinstance(found[0][cell], str), (cell, found[0][cell])
            error, plain = found[0][cell]
            assert error <= (ROUNDING_OF_BF16 if sixteen else 4 * max(plain, 2e-7)), (cell, error, plain)
        else:
            said = [own[cell] for own in found]
            assert all(isinstance(text, str) and message in text for text in said), (cell, said)


def launch(*cells: str) -> Any:
    return answer("edits", *cells, warm="deepspeed", timeout=250)


def test_edits_are_stepped_and_what_sees_a_part_is_refused() -> None:
    found = launch(*_QUICK)
    assert len(found[0]) == len(_QUICK)
    for engine in {cell.partition(":")[0] for cell in _QUICK}:
        hold(found, engine)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["ddp", "zero1", "ds0", "ds1", "ds2", "ds3"])
def test_every_program_is_exact_or_refused(engine: str) -> None:
    found = launch(engine)
    assert len(found[0]) == len(PROGRAMS)
    hold(found, engine)


@pytest.mark.heavy
def test_in_16_bits_edited_elements_are_taken() -> None:
    edits = ("plain", "clamp", "clamp .data", "rebind .data", "clamp by groups", "load_state_dict")
    engines = [f"ds{stage}/bf16" for stage in range(4)]
    found = launch(*[f"{engine}:{name}" for engine in engines for name in edits])
    for engine in engines:
        hold(found, engine)


@pytest.mark.heavy
def test_some_more_cells() -> None:
    """At stage 3 with no parameter whole."""
    found = launch(*[f"ds3x:{name}" for name in ("clamp by groups", "load_state_dict", "gathered", "plain")])
    hold(found, "ds3x")
