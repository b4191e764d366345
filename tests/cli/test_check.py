"""`fedskew check`: what it finds in a file of components, and what it does not."""

from pathlib import Path

import pytest

from fedskew import checks, methods

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "components"

HEAD = """
import random
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np


class Term:
    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()


class Stateless:
    def init(self, *given):
        return None

"""

GOOD = """
@dataclass(frozen=True)
class Flat:
    power: float = 0.5

    def weigh(self, answered):
        raw = answered.sizes**self.power
        return raw / raw.sum() if raw.any() else np.full(len(raw), 1 / len(raw))
"""

GLOBAL = """
@dataclass(frozen=True)
class Global(Stateless):
    def select(self, state, counts, size, rng, first=None):
        return np.array(random.sample(range(len(counts)), size)), state
"""

REMEMBERS = """
@dataclass(frozen=True)
class Remembers:
    memory: ClassVar[dict] = {}

    def init(self, counts):
        self.memory["turn"] = 0
        return None

    def select(self, state, counts, size, rng, first=None):
        self.memory["turn"] += 1
        return (np.arange(size) + self.memory["turn"]) % len(counts), state
"""

SHORT_CUTS = """
from fedskew.local_steps import SGD
from fedskew.weighting import FedAvg


@dataclass(frozen=True)
class Half(SGD):
    def step(self, parameters, gradient, carried, settings):
        after, carried = super().step(parameters, gradient, carried, settings)
        return parameters + 0.5 * (after - parameters), carried


@dataclass(frozen=True)
class Double(SGD):
    def step_in_place(self, model, objective, carried, settings):
        super().step_in_place(model, objective, carried, settings._replace(lr=2 * settings.lr))


@dataclass(frozen=True)
class Halved(FedAvg):
    def own_weight(self, counts, announced):
        return super().own_weight(counts, announced) / 2
"""

UNMASKED = """
@dataclass(frozen=True)
class Unmasked(Term):
    def value(self, batch, context):
        return batch.logits.square().mean()
"""

LOGARITHM = """
@dataclass(frozen=True)
class Logarithm(Term):
    def value(self, batch, context):
        share = context.counts / context.counts.sum()
        return (share * (share / batch.logits.softmax(1).mean(0)).log()).sum()
"""

BRANCH = """
@dataclass(frozen=True)
class Branch(Term):
    def value(self, batch, context):
        logits = batch.logits if batch.mask is None else batch.logits * batch.mask.unsqueeze(1)
        total = logits.square().sum() / (len(logits) if batch.mask is None else batch.mask.sum())
        return total if total > 1 else 2 * total
"""

IN_PLACE = """
@dataclass(frozen=True)
class InPlace(Stateless):
    def move(self, state, parameters, change, extras):
        parameters += change.to(parameters.dtype)
        return parameters, state
"""

ZERO_STEP = """
@dataclass(frozen=True)
class Unit(Stateless):
    def step(self, parameters, gradient, carried, settings):
        found = gradient(parameters)
        return parameters - settings.lr * found / found.norm(), None
"""

OWN_SGD = """
from fedskew.local_steps import SGD

@dataclass(frozen=True)
class Bare(SGD):
    def step(self, parameters, gradient, carried, settings):
        return parameters - settings.lr * gradient(parameters), carried
"""

NEEDS_LIMIT = """
@dataclass(frozen=True)
class Capped:
    limit: float

    def weigh(self, answered):
        raw = np.minimum(answered.sizes, self.limit)
        return raw / raw.sum() if raw.any() else np.full(len(raw), 1 / len(raw))
"""

BARE = """
class Bare:
    def weigh(self, answered):
        return answered.sizes / answered.sizes.sum()
"""

WRONG_CALL = """
@dataclass(frozen=True)
class Two:
    def weigh(self, counts, sizes):
        return sizes / sizes.sum()
"""


PERSONAL = """
from fedskew.parameters import component
from fedskew.personal import OwnTraining, Personal


@component
class Tuned(Personal):
    def trainings(self):
        return (OwnTraining("end", "head", epochs=1),)

    def moved(self, logits, held_out, counts):
        return logits + np.log(counts + 1)


@dataclass(frozen=True)
class _Plainly:  # a part of another: not tried by itself
    inner: object

    def init(self, settings):
        return self.inner.init(settings)

    def step(self, parameters, gradient, carried, settings):
        moved = parameters - settings.lr * gradient(parameters)
        return parameters.where(settings.client["private.mask"], moved), carried


@component
class Around(Personal):
    head_epochs: int = 1

    def private(self, names):
        return frozenset(names.head)

    def local_step(self, step):
        return _Plainly(step)


@component
class Typo(Personal):
    def private(self, names):
        return {"haed.weight"}
"""

SUMS = """
@dataclass(frozen=True)
class Halved(Stateless):
    clients: int | None = None
    reads_each_update: ClassVar[bool] = True

    def share(self, update, steps, weight):
        return 0.5, {"clients": weight * self.clients}

    def move(self, state, parameters, change, extras):
        return (parameters + 2 * change).float(), state
"""


@pytest.fixture
def check(tmp_path: Path, command):
    """Write a file, and check it."""

    def run(text: str, *words: str):
        (tmp_path / "own.py").write_text(HEAD + text)
        return command("check", "own.py", *words, status=None)

    return run


@pytest.mark.slow
def test_a_good_component_is_tried_and_nothing_is_found(check):
    done = check(GOOD)
    assert done.returncode == 0, done.stdout
    assert ":Flat (weighting)" in done.stdout
    assert done.stdout.count("  ok  ") == 7
    assert "1 component: nothing found" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            GLOBAL,
            "two runs of one seed differ from round 1 on, first in cohort; draw from the generator that is passed in",
        ),
        (REMEMBERS, "a run that was resumed and one that was not differ from round 3 on, first in cohort; keep what"),
        (UNMASKED, "with two rows that batch.mask leaves out; take the mean over the real rows only"),
        (LOGARITHM, "a client with one class, logits up to about 3: the loss is nan"),
        (BRANCH, "a Python branch on values can't be mapped over clients"),
        (IN_PLACE, "move() or share() writes to the model or to the updates"),
        (ZERO_STEP, "a gradient of 0, plain SGD: the parameters are NaN or infinite"),
        (OWN_SGD, "step() does the same with optimizer adamw and with SGD; step by SGD().step(...), or refuse it"),
        (OWN_SGD, "step() does the same with training.clip_norm as without; let SGD().step(...) take the step"),
        (NEEDS_LIMIT, "limit: missing"),
        (BARE, "write @dataclass(frozen=True) above class Bare"),
        (WRONG_CALL, "Two.weigh(counts, sizes) is called as weigh(answered), after self"),
    ],
)
def test_a_mistake_is_found_and_said_in_one_line(check, text, says):
    done = check(text)
    assert done.returncode == 1, done.stderr
    assert "PROBLEM" in done.stdout
    assert says in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_short_cut_that_disagrees_is_named_and_an_inherited_one_does_not_matter(check):
    done = check(SHORT_CUTS)
    half, rest = done.stdout.split(":Double")
    assert "PROBLEM" not in half
    assert "step_in_place() and step() end up to" in rest
    assert "own_weight() gives [" in rest
    assert "batch.mask" not in done.stdout


def test_a_server_update_that_reads_more_of_each_client_passes(check):
    done = check(SUMS)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_parameters_are_given_by_set(check):
    assert check(NEEDS_LIMIT, "--set", "Capped.limit=8.0").returncode == 0
    done = check(NEEDS_LIMIT, "--set", "Caped.limit=8.0")
    assert done.returncode == 2
    assert "CLASS one of Capped" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [("x = 1", "a network or sampler isn't"), ("1 / 0", "can't be imported: ZeroDivision"), ("x = = 1", "SyntaxError")],
)
def test_a_file_without_components_is_one_line(check, text, says):
    done = check(text)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def problems_of(slot: str, name: str) -> list:
    found = checks.FoundComponent(slot, name, methods.SLOTS[slot][name])
    return [one for one in checks.check(found, {}) if one.problem]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "name"),
    [
        ("selection", "fedentopt"),
        ("objective", "fedntd"),
        ("local_step", "scaffold"),
        ("local_step", "fedprox"),
        ("weighting", "afl"),
        ("aggregation", "krum"),
        ("server_update", "fedadam"),
    ],
)
def test_a_component_of_each_slot_of_our_own_keeps_the_contract(slot, name):
    """That all resume, and train alike on both backends, is in `test_combinations.py` and `test_cohort_backend.py`."""
    assert problems_of(slot, name) == []


@pytest.mark.whole_product
@pytest.mark.parametrize("slot", [*methods.SLOTS])
def test_all_of_our_own_components_keep_the_contract(slot):
    for name in methods.SLOTS[slot]:
        if name not in ("recorded", "function"):  # which need parameters
            assert problems_of(slot, name) == [], name


@pytest.mark.slow
def test_a_personal_component_is_tried(check):
    done = check(PERSONAL)
    assert ":Tuned (personal)" in done.stdout
    assert "private() names haed.weight, which is no trained parameter" in " ".join(done.stdout.split())
    tuned, around = done.stdout.split(":Around")
    assert tuned.count("  ok  ") == 6
    assert "step() does the same with training.clip_norm as without" in around
    assert "PROBLEM a cohort" not in around


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ldawa", "fedsol", "power_of_choice", "feddf", "by_age"])
def test_methods_that_see_more_are_tried(command, name):
    assert "nothing found" in command("check", EXAMPLES / f"{name}.py").stdout


BY_NAME = """
from fedskew.aggregation import Aggregation

@dataclass(frozen=True)
class ByName(Aggregation):
    def combine(self, updates, weights, layout, log):
        assert layout.views(updates[0])["fc1.weight"].shape == (5, 64)
        log("fc2", updates[:, layout.slices["fc2.weight"]].norm())
        return updates, weights
"""


@pytest.mark.slow
def test_the_tiny_federation_has_the_network_classes_and_shapes_of_a_config(check, digits):
    digits.write_text(digits.read_text().replace('"logistic"', '"mlp3", width = 5'))
    assert "KeyError" in check(BY_NAME).stdout
    done = check(BY_NAME, "--config", digits)
    assert done.returncode == 0, done.stdout
    assert "nothing found" in done.stdout


@pytest.mark.slow
def test_or_its_texts(check, digits, tmp_path):
    for kind, words in (("films", "a good film"), ("sports", "the goal"), ("banks", "no money")):
        for number in range(5):
            (tmp_path / "texts" / kind).mkdir(parents=True, exist_ok=True)
            (tmp_path / "texts" / kind / f"{number}.txt").write_text(words)
    text = digits.read_text().replace('"digits"', '"folder", root = "texts", length = 7').replace("= 10", "= 2")
    digits.write_text(text.replace('"logistic"', '"fasttext", vocabulary = 40, dim = 5'))
    by_name = BY_NAME.replace('fc1.weight"].shape == (5, 64)', 'embedding.weight"].shape == (40, 5)')
    done = check(by_name.replace("fc2.weight", "head.weight"), "--config", digits)
    assert "nothing found" in done.stdout, done.stdout


BY_TERM = UNMASKED.replace(
    "batch.logits.square().mean()",
    "(batch.logits.square().mean(1) * (1 if batch.mask is None else batch.mask)).sum() / "
    "(len(batch.logits) if batch.mask is None else batch.mask.sum())",
)


@pytest.mark.slow
def test_a_network_that_can_t_be_mapped_is_no_fault_of_a_component(check, digits, tmp_path):
    (tmp_path / "drawing.py").write_text(
        "from torch import nn\nfrom torch.nn import functional\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.head = nn.Linear(64, num_classes)\n\n"
        "    def forward(self, x):\n        return self.head(functional.dropout(x.flatten(1), 0.1, self.training))\n"
    )
    digits.write_text(digits.read_text().replace("logistic", "drawing:Net"))
    assert "nothing found" in check(BY_TERM, "--config", digits).stdout
