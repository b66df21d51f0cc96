"""What several files of elastic runs compare with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.elastic_runs import References, undisturbed


@pytest.fixture
def deterministic() -> Iterator[None]:
    import torch  # noqa: PLC0415  seconds, which tests of agents have no need of

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run of one process with these settings, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*arguments: str) -> Path:
        if arguments not in made:
            made[arguments] = undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", *arguments)
        return made[arguments]

    return get
