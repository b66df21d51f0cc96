"""Run by torchrun: trains adapters in the asked cells, and writes what was found."""

from dataclasses import asdict

from distaccum import World
from tests.support import lora
from tests.support.answers import asked, give


def main(world: World) -> list[object]:
    answers: list[object] = []
    for values in asked():
        cell = lora.Cell(**values)
        model = lora.make_model(cell.base)
        answers.append(asdict(lora.run(cell, world, model, lora.truths(cell, model))))
    return answers


if __name__ == "__main__":
    give(main, of_all=True)
