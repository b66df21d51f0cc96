"""One build of the image for all the tests that run it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp

import pytest

from tests.cluster.container.engine import DEBIAN, Engine, Image, missing_tools

TAG = "distaccum:cpu"


@pytest.fixture(scope="session")
def secret() -> str:
    """A line of pip's configuration that must not be found in the image."""
    return f"# secret {token_hex(16)}"


@pytest.fixture(scope="session")
def image(secret: str) -> Iterator[Image]:
    """The CPU image, built as the README says, from a Debian that is made first. Some 15 GB of disk, for so long.

    Without the tools its tests are skipped, unless DISTACCUM_REQUIRE_TOOLS is set.
    """
    if missing := missing_tools():
        reason = f"needs {', '.join(missing)} (Debian: apt-get install buildah debootstrap)"
        if os.environ.get("DISTACCUM_REQUIRE_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(mkdtemp(prefix="container-"))
    try:
        engine = Engine(folder)
        engine.make_base()
        engine.build(TAG, secret=secret, BASE_IMAGE=DEBIAN, RUNTIME_IMAGE=DEBIAN, REVISION="of-the-test")
        with engine.image(TAG) as built:
            yield built
    finally:
        shutil.rmtree(folder)
