"""What several files of elastic runs compare with."""

from pathlib import Path

import pytest

from tests.support.elastic_runs import References, undisturbed


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run of one process with these settings, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*arguments: str) -> Path:
        if arguments not in made:
            made[arguments] = undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", *arguments)
        return made[arguments]

    return get
