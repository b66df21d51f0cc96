"""What ``--check`` says of a configuration that can run, in one line."""

from __future__ import annotations

from distaccum.precision.selection import describe
from distaccum.train.components import TrainingComponents


def passed(components: TrainingComponents, from_step: int | None) -> str:
    """What was built, for how many processes, and what the run would do.

    Args:
        components: all that was built.
        from_step: the step of the checkpoint that ``resume`` would continue; None without one.
    """
    begins = "" if from_step is None else f", from step {from_step} on"
    updates = f"{components.total_steps} updates{begins}"
    parts = (
        f"{type(components.model).__name__} with {components.parameters:,} parameters",
        f"{components.config.engine.name}, {describe(components.model, components.policy)}",
        components.plan.describe()[0],
        "one evaluation, no update" if components.evaluates_alone else updates,
    )
    return f"check passed: {'; '.join(parts)}"
