"""Breaks what keeps the modes right, one way at a time: masters, the moving average, packed documents, adapters.

``python -m tests.mutants.modes [NAME]`` runs beside each mutant the test that notices it, in a copy of the package with
the mutant and in one without; it exits with 1 if a test passes with the mutant, or fails without.
"""

import subprocess
import sys
from collections.abc import Sequence

from tests.mutants.gradient import Mutant, one
from tests.mutants.guards import package
from tests.support.commands import ROOT, environment

MASTERS = "tests/unit/engines/test_masters.py::"
ADDS_UP = f"{MASTERS}test_updates_that_bf16_has_no_digits_for_add_up_in_the_masters[ddp-1]"
RESUMED = f"{MASTERS}test_a_resume_is_bitwise_and_other_precisions_take_the_masters[zero1-2]"
EMA = "tests/unit/train/test_ema.py::"
APPLIED = f"{EMA}test_it_moves_with_applied_updates_alone"
PACKING = "tests/unit/data/test_packing.py::"
ALONE = f"{PACKING}test_the_gradient_is_that_of_documents_alone"
CAUSAL = f"{PACKING}test_a_causal_model_of_transformers_tells_documents_apart"
LORA = "tests/distributed/test_lora.py::test_a_covering_set_is_exact_and_reduces_adapters_alone"
MEMORY = "tests/distributed/test_out_of_memory.py::test_"
ANYWHERE = f"{MEMORY}a_window_stays_the_same_wherever_memory_runs_out_in_it"
REFUSED = "tests/unit/accumulation/test_restart.py::test_"
MARKS = "tests/unit/engines/test_memory_marks.py::"
LESS = "tests/distributed/test_less_memory.py::test_"
COUNTS = (
    "tests/unit/engines/test_reproducible.py::test_counts_that_are_no_whole_numbers_add_up_to_one_number_in_any_order"
)
EVALUATED = "tests/unit/train/test_evaluation_sums.py::test_scores_are_added_in_the_order_of_batches"
SAME = "tests/distributed/test_reproducible.py::test_a_few_cells_are_the_same_on_1_and_3_ranks"
GOES_ON = "tests/elastic/engine/test_elastic.py::test_the_ranks_that_are_left_finish_the_window_to_the_same_bits"
MIRRORED = "tests/elastic/engine/test_mirror.py::test_those_who_are_left_go_on_to_the_same_bits"
MIRROR_SEARCH = "tests/elastic/simulation/test_mirror.py::test_what_is_left_is_of_one_window_and_whole"
OWNERS = "tests/tools/test_owners.py::test_"
BITS = f"{OWNERS}the_step_is_one_process_own_bit_for_bit[lars-2]"
STATES = f"{OWNERS}a_state_goes_on_bit_for_bit_on_another_engine_and_other_ranks[kronecker-fsdp2 2, ddp 1, fsdp2 3]"
LATE = ("TimeoutError", "Failed: Timeout")
ZEROS = """        for frozen in self._model.parameters():
            if not frozen.requires_grad:
                torch.distributed.all_reduce(torch.zeros_like(frozen).flatten())
"""
ARRIVED = "tests/distributed/test_arriving.py::test_a_window_is_all_that_came[2-distaccum-engines0]"
ADAPTERS = "tests/unit/train/test_adapters.py::"

_OWN = "counts={n: sum(micro.counts[n] for micro in micro_batches) or 1 for n in counts},"
_PADDED = "MicroBatch(batch, {'loss': batch['mask'].numel()})"
_ALIAS = "self.sums[node] = list(tensors)"
_ON_UPDATE = "    def on_update(self, run: Run, outcome: Outcome) -> None:\n"
_ON_SKIP = "    def on_skip(self, run: Run, outcome: Outcome) -> None:\n        "
_ASIDE = "    vars(model)[_ATTRIBUTE] = FrozenBase(names)\n"


def _one(test: str, name: str, file: str, old: str, new: str) -> tuple[str, Mutant]:
    return test, one(name, file, old, new)


# Of each mutant: the test that notices it.
MUTANTS: tuple[tuple[str, Mutant], ...] = (
    (
        ADDS_UP,
        Mutant(
            "masters: the optimizer steps the bf16 weights",
            (
                (
                    "engines/ddp/masters.py",
                    'group["params"] = [self.of(p) for p in group["params"]]',
                    'group["params"] = list(group["params"])',
                ),
                # This ends the run: and what is stepped is then taken for the master.
                (
                    "engines/ddp/masters.py",
                    "if [weight._version for weight in self._weights] != self._versions:",
                    "if False:",
                ),
                (
                    "engines/ddp/masters.py",
                    "torch._foreach_copy_(places, masters)",
                    "torch._foreach_copy_(masters, places)",
                ),
            ),
        ),
    ),
    _one(
        ADDS_UP,
        "masters: made their roundings after each step",
        "engines/ddp/masters.py",
        "            torch._foreach_copy_(places, masters)\n",
        ("            torch._foreach_copy_(places, masters)\n            torch._foreach_copy_(masters, places)\n"),
    ),
    _one(
        ADDS_UP,
        "masters: a checkpoint has the roundings",
        "engines/ddp/masters.py",
        "found[name] = self._masters[id(weight)].detach()",
        "found[name] = weight.detach().float()",
    ),
    _one(
        RESUMED,
        "masters: a resume begins with the roundings",
        "engines/ddp/masters.py",
        "self._masters[id(weight)].copy_(model[name])",
        "self._masters[id(weight)].copy_(weight)",
    ),
    _one(
        f"{APPLIED}[constant]",
        "average: moves with skipped windows too",
        "train/ema.py",
        _ON_UPDATE,
        f"{_ON_SKIP}self.on_update(run, outcome)\n\n{_ON_UPDATE}",
    ),
    _one(
        f"{APPLIED}[warm-up]",
        "average: its warm-up counts skipped windows",
        "train/ema.py",
        _ON_UPDATE,
        f"{_ON_SKIP}self._updates += 1\n\n{_ON_UPDATE}",
    ),
    _one(
        f"{EMA}test_a_resumed_run_goes_on_bit_by_bit",
        "average: begins anew with a resume",
        "train/ema.py",
        "    average.load(TensorFiles(folder, KIND))\n",
        "",
    ),
    _one(
        f"{EMA}test_the_average_is_evaluated_and_the_weights_put_back",
        "average: stays in the model after an evaluation",
        "train/ema.py",
        "            for average, weight in exchanged:\n                _exchange(average, weight)\n",
        "",
    ),
    _one(
        f"{ALONE}[ddp-1-rotary]",
        "packing: the mask of documents left out",
        "models/gpt.py",
        "mask = None if position_ids is None else documents_mask(position_ids)",
        "mask = None",
    ),
    _one(
        f"{ALONE}[fsdp2-2-rotary]",
        "packing: positions go on from document to document",
        "data/packing.py",
        "positions[place, begin:end] = torch.arange(lengths[i])",
        "positions[place, begin:end] = torch.arange(begin, end)",
    ),
    _one(
        f"{ALONE}[ddp-1-learned]",
        "packing: learned positions are those of the row",
        "models/gpt.py",
        "            x = x + self.positions(position_ids)\n",
        "            x = x + self.positions.weight[:length]\n",
    ),
    _one(
        f"{ALONE}[ddp-2-rotary]",
        "packing: the rest of a row has labels",
        "data/packing.py",
        "labels = torch.full(shape, IGNORED, dtype=torch.int64)",
        "labels = torch.zeros(shape, dtype=torch.int64)",
    ),
    _one(
        CAUSAL,
        "packing: a document's first token is predicted from the document before",
        "data/packing.py",
        "                if self._shifted:\n",
        "                if False:\n",
    ),
    _one(
        f"{PACKING}test_a_model_that_does_not_tell_documents_apart_is_refused",
        "packing: models that do not tell documents apart are taken",
        "train/packing.py",
        "    if not torch.equal(said[0], said[1]):\n",
        "    if False:\n",
    ),
    _one(
        LORA,
        "adapters: their base is reduced and trained too",
        "engines/state.py",
        _ASIDE,
        f"{_ASIDE}    for parameter in model.parameters():\n        parameter.requires_grad_()\n",
    ),
    (
        LORA,
        Mutant(
            "adapters: zeros are reduced for their base",
            (
                (  # of a shape that is known to fit, and of one that is not
                    "engines/ddp/engine.py",
                    "        with uncounted():\n            self._reduce(loss)\n",
                    "        with uncounted():\n            self._reduce(loss)\n" + ZEROS,
                ),
                (
                    "engines/ddp/engine.py",
                    "            self._reduction.join(nan if self._missing else -0.0)\n",
                    "            self._reduction.join(nan if self._missing else -0.0)\n" + ZEROS,
                ),
            ),
        ),
    ),
    _one(
        f"{ADAPTERS}test_adapters_alone_are_saved_and_the_base_does_not_move[fp32]",
        "adapters: their base is saved too",
        "engines/state.py",
        'aside."""\n    aside = names_set_aside(model)\n',
        'aside."""\n    aside = frozenset()\n',
    ),
    _one(
        f"{ADAPTERS}test_another_base_is_refused",
        "adapters: another base is taken",
        "train/adapters.py",
        'if not now or before.get("digest") == here.get("digest"):',
        "if not now or before:",
    ),
    *(
        _one(test, f"memory: {name}", *edit)
        for test, name, *edit in (
            (
                ANYWHERE,
                "what the window has added before stays",
                "accumulation/restart.py",
                "            engine.zero_gradients()\n",
                "            pass\n",
            ),
            (
                ANYWHERE,
                "a shape that is not known to fit reduces as it goes",
                "accumulation/restart.py",
                "engine.defer_reduction = bool(shapes) and not marks.is_proven(",
                "engine.defer_reduction = False and not marks.is_proven(",
            ),
            (
                ANYWHERE,
                "a part is left out",
                "accumulation/restart.py",
                "cut(whole.batch, start, stop, rows[i])\n",
                "cut(whole.batch, 0, stop - start, rows[i])\n",
            ),
            (
                f"{MEMORY}a_boundary_that_has_begun_to_reduce_is_given_up_on_all_ranks",
                "a boundary that has begun to reduce begins again",
                "accumulation/restart.py",
                "            if engine.restart is Restart.TOO_LATE:\n",
                "            if False:\n",
            ),
            (
                f"{REFUSED}memory_that_is_over_in_the_optimizers_step_is_an_error",
                "a window begins again that was stepped on",
                "accumulation/restart.py",
                "stepped = engine.activity.phase is Phase.STEP",
                "stepped = False",
            ),
            (
                f"{REFUSED}hooks_on_parameters_do_not_see_a_reduction_that_follows_the_backward",
                "a user's hooks see the reduction's zeros",
                "engines/ddp/reducer.py",
                "        hooks.clear()\n",
                "        pass\n",
            ),
            (
                f"{MARKS}test_a_failure_takes_the_proof_of_what_is_no_smaller_and_what_runs_after_all_is_not_too_large",
                "the mark is not lowered",
                "engines/memory_marks.py",
                "        if apart and shape.rows > 1 and not self.is_too_large(shape):\n",
                "        if apart and shape.rows > 1 and not self._proven and not self.is_too_large(shape):\n",
            ),
            (
                f"{LESS}a_sharded_run_goes_on_with_less[engine=fsdp2]",
                "each rank cuts what it has found too large itself",
                "train/micro_batch.py",
                "for shape in json.loads(world.broadcast_str(json.dumps(shapes)))]",
                "for shape in json.loads(world.broadcast_str(json.dumps(shapes))) if world.is_main]",
            ),
            (
                f"{REFUSED}a_loss_that_is_no_sum_is_not_cut",
                "what was refused is a mark all the same",
                "accumulation/restart.py",
                "self._marks.fail(shape, apart=not why)",
                "self._marks.fail(shape)",
            ),
            (
                f"{REFUSED}a_loss_that_is_no_sum_is_not_cut",
                "a loss that is no sum is cut",
                "accumulation/restart.py",
                "        if why:\n            same",
                "        if False:\n            same",
            ),
            (
                "tests/unit/verification/test_parts.py::test_what_may_not_be_cut_is_told",
                "losses alone are looked at",
                "verification/parts.py",
                "        said = gradients_differ(",
                "        said = False and gradients_differ(",
            ),
            (
                f"{MEMORY}parts_with_dropout_draw_as_micro_batches_of_their_own",
                "a part draws with the key of the whole",
                "accumulation/restart.py",
                "keys=[window.own_key(i, start) or 0 for",
                "keys=[window.own_key(i, 0) or 0 for",
            ),
        )
    ),
    *(
        (SAME, Mutant(f"reproducible: {name}", (edit,)))
        for name, edit in {
            "dropout is keyed by the rank": (
                "data/loader.py",
                "keys=keys_of(_firsts(positions), self._seed, epoch),",
                "keys=keys_of(_firsts(positions), self._seed, epoch, self._world.rank),",
            ),
            "ranks are summed one after the other": (
                "engines/ddp/tree.py",
                "total = add_up(values, self._clock.expect_assignment().blocks) if values else idle.pop()",
                "total = sum(values.values(), torch.zeros(1)) if values else idle.pop()",
            ),
            "the ranks decide about the tree": (
                "data/plan/units.py",
                "UnitAssignment(units, min(units, self.virtual_ranks), self.world_size)",
                "UnitAssignment(units, min(units, 2 * self.world_size), self.world_size)",
            ),
            "norms are of shards": ("engines/fsdp2/engine.py", "load(WHOLE_NORMS)() if numerics", "None if numerics"),
            "losses are summed rank by rank": (
                "accumulation/step.py",
                "assignment=self._assignment,\n            by_unit=None if self._assignment is None else",
                "assignment=None,\n            by_unit=None if True else",
            ),
            "held-out batches are as large as the ranks allow": (
                "data/held_out.py",
                "(1 if fixed_batches else world.size)",
                "world.size",
            ),
            "Python's random numbers are the rank's": (
                "engines/numerics.py",
                "KeyedRandom(device, others=self.fixed_order)",
                "KeyedRandom(device, others=False)",
            ),
            "samples draw from the rank's generators": (
                "data/loader.py",
                "self._seeds_here = plan.has_units and not self._workers",
                "self._seeds_here = False",
            ),
            "losses are divided for the ranks": (
                "engines/ddp/engine.py",
                "gradient_divide_factor=1,",
                "gradient_divide_factor=world.size,",
            ),
            "fsdp2 adds sums that are no neighbours in the tree": (
                "engines/fsdp2/tree_scatter.py",
                "for sums in reversed(self._sums[len(self._sums) - times :]):",
                "for sums in reversed(self._sums):",
            ),
        }.items()
    ),
    *(
        (GOES_ON, Mutant(f"elastic: {name}", (edit,)))
        for name, edit in {
            "a window that goes on counts what is left of it": (
                "elastic/engine/window.py",
                "return self.again.counts if self._begun(k) else counted",
                "return counted",
            ),
            "losses of units that are held are lost": (
                "elastic/engine/tree.py",
                "self.taken_up.along if held else None",
                "None",
            ),
            "what is held is dealt again": (
                "elastic/engine/window.py",
                "for block in self.computed[rank] for unit",
                "for block in range(self.blocks) for unit",
            ),
            "a rank sends what is left in its buckets": (
                "elastic/engine/tree.py",
                "if self._given_up or not nodes:",
                "if True:",
            ),
            "what was sent is not kept": ("engines/partial_sums.py", "self.sums[node] = kept", _ALIAS),
        }.items()
    ),
    *(
        _one(test, f"elastic: {name}", *edit)
        for test, name, *edit in (
            (
                MIRRORED,
                "a step that is not made leaves its weights",
                "elastic/engine/mirror.py",
                "weights = self._before if self._steps else {",
                "weights = {",
            ),
            (
                MIRRORED,
                "a step that is not made moves the loss scale",
                "elastic/engine/mirror.py",
                "scaler = self._scaler if self._steps else self",
                "scaler = self",
            ),
            (
                MIRRORED,
                "the predecessor's state is not kept",
                "elastic/engine/mirror.py",
                "self._sent, self._received = self._next",
                "self._sent, _ = self._next",
            ),
            (
                MIRROR_SEARCH,
                "who is behind goes on with the state of before",
                "elastic/run/hand_over.py",
                "else carried.shares.ahead",
                "else carried.shares.now",
            ),
            (
                MIRROR_SEARCH,
                "what was dealt before is forgotten at once",
                "elastic/engine/shares.py",
                "now=self.now | before.now",
                "now=self.now",
            ),
        )
    ),
    *(
        _one(test, f"owners: {name}", *edit)
        for test, name, *edit in (
            (
                BITS,
                "shards are stepped as if they were whole",
                "engines/fsdp2/wrap.py",
                "            faults[number] = fault",
                "            pass",
            ),
            (
                BITS,
                "a whole tensor is sent back to no rank",
                "tools/owners.py",
                "            from_owners(wholes, parts, _rows_of(dealt, parts), dealt.owners, self._group)",
                "            pass",
            ),
            (
                BITS,
                "a gradient is this rank's neighbour's",
                "tools/owners.py",
                "dealt.own[i].grad = gathered.get(i)",
                "dealt.own[i].grad = gathered[i].roll(1, 0)",
            ),
            (
                STATES,
                "a state has the name of another tensor",
                "tools/owners.py",
                "self.stepped[names[id(shard)]] = stand_in",
                "self.stepped[names[id(shards[i - 1])]] = stand_in",
            ),
            (STATES, "a state is not saved", "engines/fsdp2/engine.py", " or i in self._owners.own)", ")"),
        )
    ),
    _one(
        COUNTS,
        "reproducible: counts are rounded where they are summed",
        "data/counter.py",
        "whole = sum(round(math.ldexp(number, _SCALE)) for number in each)",
        "whole = round(math.ldexp(sum(each), _SCALE))",
    ),
    _one(
        EVALUATED,
        "reproducible: scores are added rank by rank",
        "train/evaluate.py",
        "            if self._batches:\n",
        "            if False:\n",
    ),
    *(
        _one(ARRIVED, f"arriving: the count of {what}", file, old, new)
        for what, file, old, new in (
            ("one rank", "data/arriving.py", "counts=counts,", _OWN),
            ("a micro-batch", "accumulation/open_window.py", "self._known_counts(count) if", "self._current.counts if"),
            ("padded tokens", "data/arriving.py", "counter.micro_batch(batch)", _PADDED),
        )
    ),
)


def outcome(tests: Sequence[str], mutant: Mutant | None) -> tuple[int, str]:
    """pytest's exit code with a mutated copy of the package on its path (0: passed, 1: failed), and what it says."""
    with package([mutant]) as folder:
        (folder / "launch").symlink_to(ROOT / "launch")
        whole = ["-q", "-x", "-m", "", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", folder]
        command = [sys.executable, "-B", "-m", "pytest", *map(str, whole), *(str(folder / test) for test in tests)]
        given = environment(PYTHONPATH=str(folder))
        found = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
        return found.returncode, _reason(found.stdout + found.stderr)


def _reason(printed: str) -> str:
    """What failed first; or all, if nothing did."""
    return next((line[1:].strip() for line in printed.splitlines() if line.startswith("E ")), printed.strip())


def main(wanted: str = "") -> int:
    """How many mutants are not noticed, plus one if a test fails without any."""
    chosen = [(test, mutant) for test, mutant in MUTANTS if wanted in mutant.name]
    code, said = outcome(list(dict.fromkeys(test for test, _ in chosen)), None)
    wrong = int(code != 0)
    print(f"{'FAILS' if code else 'passes'}  no mutant: {said}", flush=True)
    for test, mutant in chosen:
        code, said = outcome([test], mutant)
        fine = code == 1 and not said.startswith(LATE)  # no mutant hangs: that was the machine
        wrong += not fine
        print(f"{'caught' if fine else 'NOT CAUGHT'}  {mutant.name}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
