"""Run by torchrun: trains adapters in the asked cells, and writes what was found."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from distaccum import World
from tests.support import lora
from tests.support.answers import give

if __name__ == "__main__":
    joined = World.join()
    answers = []
    for values in json.loads(Path(sys.argv[2]).read_text()):
        cell = lora.Cell(**values)
        model = lora.make_model(cell.base)
        answers.append(asdict(lora.run(cell, joined, model, lora.truths(cell, model))))
    give(joined.all_gather_object(answers), joined)
