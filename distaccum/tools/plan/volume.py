"""Bytes that a rank holds and sends.

Memory of P parameters on one of N ranks is by S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, table 1: parameters, gradients and optimizer state, each over N from the ZeRO stage on
that shards it. What a micro-step adds is in ``memory.py``.
"""

from __future__ import annotations

from distaccum.tools.plan.collectives import KINDS, ring_bytes
from distaccum.tools.plan.sharding import FULL, GRADIENT_STAGE, OPTIMIZER_STAGE, PARAMETER_STAGE, Formats, Sharding

FP32 = Formats()
THERE_AND_BACK = 3  # exchanges of a tensor that its owner steps: the gradient, the weight, and the new weight


def memory(sharding: Sharding, elements: int, ranks: int, formats: Formats = FP32) -> dict[str, float]:
    """Bytes on one of ``ranks`` by role, by the ZeRO paper's table.

    Gradients are whole until the boundary, unless each micro-step reduces them. The fp32 weights that DeepSpeed keeps
    in addition are in :func:`copied`.
    """
    gradients = formats.gradients * elements
    once = 1 if not sharding.every else sharding.parts(GRADIENT_STAGE, ranks)
    return {
        "parameters": formats.parameters * elements / sharding.parts(PARAMETER_STAGE, ranks),
        "optimizer": formats.moments * elements / sharding.parts(OPTIMIZER_STAGE, ranks),
        "gradients at the boundary": gradients / once,
        "gradients stepped with": gradients / sharding.parts(GRADIENT_STAGE, ranks),
    }


def copied(sharding: Sharding, elements: int, ranks: int, formats: Formats) -> float:
    """Bytes of fp32 weights on a rank, in addition to the parameters."""
    return formats.copies * elements / sharding.parts(OPTIMIZER_STAGE, ranks)


def gathered(sharding: Sharding, elements: int, in_blocks: int, micro_steps: int) -> int:
    """Elements that a window's micro-steps gather: blocks twice in each, the rest once, as it stays in between."""
    if sharding.stage < PARAMETER_STAGE:
        return 0
    if sharding.held:
        return elements
    return micro_steps * (2 * elements if sharding.whole_again else elements + in_blocks)


def payloads(
    sharding: Sharding,
    elements: int,
    in_blocks: int,
    micro_steps: int,
    formats: Formats = FP32,
    *,
    sums: int | None = None,
    owned: int = 0,
) -> dict[str, float]:
    """Bytes of the whole tensors that a window's collectives carry, by kind.

    Args:
        sharding: of the engine.
        elements: all parameters.
        in_blocks: parameters in blocks, which are gathered one by one.
        micro_steps: of the window.
        formats: what gradients and parameters travel in.
        sums: how many of a window's a rank gives to a reduction in a fixed order, whose shards travel as those of a
            reduce-scatter; None: the order is the reduction's.
        owned: elements of tensors that one rank steps whole: their gradients and weights go there, and these back.
    """
    found = dict.fromkeys(KINDS, 0.0)
    times = micro_steps if sharding.every else 1
    if sums is not None:
        found["reduce-scatter"] += sums * formats.reduced * elements
        found["all-gather"] += 0 if sharding.scatters else formats.reduced * elements
    else:
        found["reduce-scatter" if sharding.scatters else "all-reduce"] += times * formats.reduced * elements
    if sharding.spread is not None:
        found[sharding.spread] += formats.gathered * elements
    found["all-gather"] += formats.gathered * gathered(sharding, elements, in_blocks, micro_steps)
    found["all-to-all"] += THERE_AND_BACK * FULL * owned
    return found


def sent(
    sharding: Sharding,
    elements: int,
    in_blocks: int,
    micro_steps: int,
    *,
    ranks: int,
    formats: Formats = FP32,
    sums: int | None = None,
    owned: int = 0,
) -> dict[str, float]:
    """Bytes that one of ``ranks`` sends in a window by kind, where collectives go around rings; see :func:`payloads`.

    Replicas of the shards reduce these again, among each other, in fp32, once a window.
    """
    payload = payloads(sharding, elements, in_blocks, micro_steps, formats, sums=sums, owned=owned)
    within = ranks // sharding.replicas
    found = {kind: ring_bytes(kind, size, within) for kind, size in payload.items()}
    found["all-reduce"] += ring_bytes("all-reduce", FULL * elements / within, sharding.replicas)
    return found
