"""Run by torchrun: programs of ``test_means.py``, each refused by all ranks in the same words, or trained."""

from distaccum import World
from distaccum.errors import VerificationError
from tests.unit.verification.test_means import RIGHT, WRONG, train

world = World.join()
for name, (program, _) in WRONG.items():
    said = ""
    try:
        train(world, program)
    except VerificationError as error:
        said = str(error)
    found = set(world.all_gather_object(said))
    assert len(found) == 1 and "of micro-batch" in said, (name, found)  # noqa: PT018
assert all(train(world, program) for program in RIGHT.values())
