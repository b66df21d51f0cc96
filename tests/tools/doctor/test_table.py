"""The table at 80 and 120 columns and piped; JSON holds the same facts."""

from __future__ import annotations

import json

import pytest

from distaccum.tools.doctor.facts import Look, rate, seconds
from distaccum.tools.doctor.table import Examination, Section, lines

LONG = "kernels that can be built: " + ", ".join(f"kernel_{number}" for number in range(30))


COMMAND = f"cp --all {' '.join(f'folder-{number}' for number in range(20))}"


def _examination() -> Examination:
    one, other, both = Look(), Look(), Look()
    for look in (one, other):
        look.tell("torch", "2.13.0")
        look.tell("kernels", LONG)
        look.find("no cable", "plug it in    # it is the red one")
    one.tell("free memory", "3.0 GiB", 3 * 2**30)
    other.tell("free memory", "1.0 GiB", 2**30)
    other.tell("disk", "could not be looked at: OSError")
    other.find("slow " * 30, "wait", wrong=False)
    both.tell("backend", "gloo")
    both.find("versions differ", f"{COMMAND}    # which is long")
    sections = [Section(title="Machine", looks={"n0": one, "n1": other}), Section(title="Together", looks={"": both})]
    return Examination(nodes={"n0": [0, 1], "n1": [2, 3]}, sections=sections)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(width: int) -> None:
    wrapped = [line for _, line in lines(_examination(), width)]
    (command,) = [line for line in wrapped if "cp --all" in line]
    assert command == f"       -> {COMMAND}"  # to be copied
    wrapped.remove(command)
    assert max(map(len, wrapped)) <= width
    piped = [line for _, line in lines(_examination(), None)]
    assert f"{command}    # which is long" in piped
    assert {"# which is long", "-> plug it in    # it is the red one"} <= {line.strip() for line in wrapped}
    said = [word for line in piped if "cp --all" not in line for word in line.split()]
    told = [word for line in wrapped if "# which is long" not in line for word in line.split()]
    assert said == told


def test_piped_each_fact_is_a_line_and_what_all_nodes_have_is_said_once() -> None:
    text = "\n".join(line for _, line in lines(_examination(), None))
    assert text.startswith("distaccum doctor: 4 ranks on 2 nodes\n\nMachine\n")
    assert text.count("2.13.0") == 1
    assert "  free memory                   n0: 3.0 GiB\n" in text
    assert "                                n1: 1.0 GiB\n" in text
    assert (
        "Wrong (2)\n  1    no cable (on n0, n1)\n       -> plug it in    # it is the red one\n  2    versions differ\n"
        in text
    )
    assert "Notes (1)\n  1    slow " in text
    assert text.endswith("\n2 wrong. 1 thing could not be looked at.")


def test_json_has_the_same_facts() -> None:
    examination = _examination()
    told = json.loads(json.dumps(examination.to_json()))
    assert told["right"] is False
    assert (told["ranks"], told["nodes"], told["unseen"]) == (4, {"n0": [0, 1], "n1": [2, 3]}, 1)
    facts = [fact for section in told["sections"] for of in section["nodes"].values() for fact in of]
    assert {"name": "free memory", "text": "1.0 GiB", "value": 2**30} in facts
    text = "\n".join(line for _, line in lines(examination, None))
    assert all(fact["text"] in text and fact["name"] in text for fact in facts)
    assert [(one["what"], one["nodes"], one["wrong"]) for one in told["findings"][:2]] == [
        ("no cable", ["n0", "n1"], True),
        ("versions differ", [], True),
    ]


def test_notes_alone_are_not_wrong() -> None:
    look = Look()
    look.find("slow", "wait", wrong=False)
    examination = Examination(nodes={"n": [0]}, sections=[Section(title="A", looks={"n": look})])
    assert examination.right
    assert [line for _, line in lines(examination, 80)][-1] == "Nothing that was looked at is wrong."


def test_numbers_as_people_read_them() -> None:
    assert [seconds(one) for one in (2.0, 0.0015, 2.5e-7)] == ["2 s", "1.5 ms", "0.25 µs"]
    assert [rate(one) for one in (1e10, 2.5e8)] == ["10 Gbit/s", "250 Mbit/s"]
