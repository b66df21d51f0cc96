"""What a rank holds and sends, in bytes."""

from __future__ import annotations

from distaccum.config.sharding import FULL, GRADIENT_STAGE, OPTIMIZER_STAGE, PARAMETER_STAGE, Formats, Sharding
from distaccum.forecast.collectives import KINDS, ring_bytes

FP32 = Formats()


def held(sharding: Sharding, elements: int, ranks: int, formats: Formats = FP32) -> dict[str, float]:
    """Bytes on one of ``ranks`` by the ZeRO paper's table; gradients are whole until the boundary, where there is one
    reduction a window. Without the ``copies`` of weights that DeepSpeed keeps beside: see :func:`copied`.
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
    """Bytes of fp32 weights on a rank, beside the parameters."""
    return formats.copies * elements / sharding.parts(OPTIMIZER_STAGE, ranks)


def gathered(sharding: Sharding, elements: int, in_blocks: int, micro_steps: int) -> int:
    """Elements that a window's micro-steps gather: blocks twice each, the rest once, as it is not freed between."""
    if sharding.stage < PARAMETER_STAGE:
        return 0
    if sharding.held:
        return elements
    return micro_steps * (2 * elements if sharding.whole_again else elements + in_blocks)


def payloads(
    sharding: Sharding, elements: int, in_blocks: int, micro_steps: int, formats: Formats = FP32
) -> dict[str, float]:
    """Bytes of the whole tensors that a window's collectives carry, by kind.

    Args:
        sharding: of the engine.
        elements: parameters.
        in_blocks: those of them in blocks, which are gathered one by one.
        micro_steps: of the window.
        formats: that they travel in.
    """
    found = dict.fromkeys(KINDS, 0.0)
    times = micro_steps if sharding.every else 1
    found["reduce-scatter" if sharding.scatters else "all-reduce"] += times * formats.reduced * elements
    if sharding.spread is not None:
        found[sharding.spread] += formats.gathered * elements
    found["all-gather"] += formats.gathered * gathered(sharding, elements, in_blocks, micro_steps)
    return found


def sent(
    sharding: Sharding, elements: int, in_blocks: int, micro_steps: int, *, ranks: int, formats: Formats = FP32
) -> dict[str, float]:
    """What one of ``ranks`` sends in a window where collectives go around rings, by kind; see :func:`payloads`.

    Replicas of the shards reduce these once more, among each other, in fp32.
    """
    payload, within = payloads(sharding, elements, in_blocks, micro_steps, formats), ranks // sharding.replicas
    found = {kind: ring_bytes(kind, size, within) for kind, size in payload.items()}
    times = micro_steps if sharding.every else 1
    found["all-reduce"] += times * ring_bytes("all-reduce", FULL * elements / within, sharding.replicas)
    return found
