"""What may be combined: presets, tables, and a verdict on every cell of the whole product.

The expectations below were written from the papers' definitions (the composition rules of the design), not from the
code.
"""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from covering import ALIKE, Cell, accepted_pairs, covering_set, pairs, pairs_of, whole_product
from fedskew import components, methods
from fedskew.errors import CombinationError, ConfigError
from fedskew.local_steps import INDEX as STEPS
from fedskew.methods import DEFAULTS, PLACES, PRESETS, SLOTS, Method, build, check, cost, expand
from fedskew.methods.catalogue import COMBINATIONS
from fedskew.objectives import INDEX as LOSSES
from fedskew.objectives import Objective
from fedskew.pipelines import FedConcat
from fedskew.selection import Uniform
from fedskew.server_updates import INDEX as UPDATES
from fedskew.server_updates import Plain
from fedskew.weighting import FedAvg

CrossEntropy, FedKD, FedLC, FedNTD = (LOSSES[name] for name in ("cross_entropy", "fedkd", "fedlc", "fedntd"))
FedProx, FedNova = STEPS["fedprox"], UPDATES["fednova"]

LOSSES, TERMS = (
    {name for name, kind in SLOTS["objective"].items() if kind.role == role} for role in ("classification", "term")
)
# FedConcat has no model of all clients, so it refuses what compares with one, and what keeps or sends something for it;
# Krum, since clusters are small; and fixed last layers, since its own is trained.
FIXED = {"fedetf", "fedgela", "fednh", "fedbabu"}
OF_ONE_MODEL = FIXED | {
    "vacant_distillation", "fedntd", "fedlmd", "fedkd", "fedekd", "feddkd", "moon", "fpl", "scaffold", "fedgf", "afl",
    "feddyn", "krum",
}  # fmt: skip
FROM_NO_PAPER = {"recorded", "function"}
MERGING = {"median", "trimmed_mean"}  # leave no client's own update
SAME_COHORT = {"seol_kim", "greedy_kl"}  # what they choose does not depend on the round
EVEN_COHORTS = {"fedentopt", "fedcbs", *SAME_COHORT}


def is_refused(cell: Cell) -> bool:
    """One classification loss, terms that are terms, each once; SCAFFOLD's correction or FedNova's, not both.

    At most one component makes or fixes a last layer. Control variates and FedDyn's drift are not aggregated robustly;
    FedNova and FedEXP read each client's update; FedDyn is its local step and its server update, never one of them.
    """
    return (
        cell.loss not in LOSSES
        or not set(cell.terms) <= TERMS
        or len(set(cell.terms)) < len(cell.terms)
        or len({cell.loss, cell.local_step} & FIXED) + bool(cell.finish) > 1
        or (cell.local_step == "scaffold" and (cell.server_update == "fednova" or cell.aggregation != "mean"))
        or (cell.server_update in ("fednova", "fedexp") and cell.aggregation in MERGING)
        or (cell.local_step == "feddyn") != (cell.server_update == "feddyn")
        or (cell.local_step == "feddyn" and cell.aggregation != "mean")
    )


def conflicts(cell: Cell) -> set[frozenset[str]]:
    """The pairs that may be run although one undoes what the other is for."""
    robust = cell.aggregation != "mean"
    pairs = {
        # Even cohorts against a target mix.
        ("fedpals", cell.selection): cell.weighting == "fedpals" and cell.selection in EVEN_COHORTS,
        # DKD's second half is NTD's term.
        ("fedntd", "feddkd"): {"fedntd", "feddkd"} <= set(cell.terms),
        # SCAFFOLD's corrections recentre every client on the plain mean, so weights don't move where it ends, and
        # FedDyn's terms lead there too; and a cohort that never changes makes c the mean of a part, divided by all.
        ("scaffold", cell.weighting): cell.local_step == "scaffold" and cell.weighting != "uniform",
        ("feddyn", cell.weighting): cell.local_step == "feddyn" and cell.weighting != "uniform",
        ("scaffold", cell.selection): cell.local_step == "scaffold" and cell.selection in SAME_COHORT,
        # AFL looks for the worst client, and never hears of those who are never chosen.
        ("afl", cell.selection): cell.weighting == "afl" and cell.selection in SAME_COHORT,
        # A bad client says its own loss, and FPL's and FedNH's prototypes are averaged plainly.
        (cell.aggregation, "afl"): robust and cell.weighting == "afl",
        (cell.aggregation, "fpl"): robust and "fpl" in cell.terms,
        (cell.aggregation, "fednh"): robust and cell.loss == "fednh",
    }  # fmt: skip
    return {frozenset(pair) for pair, conflict in pairs.items() if conflict}


def verdict(cell: Cell) -> set[frozenset[str]] | None:
    """What the code says: None where it refuses, else the pairs that it warns of."""
    try:
        return {frozenset(text.partition(":")[0].split(" with ")) for text in check(cell.method())}
    except CombinationError:
        return None


@pytest.mark.parametrize("cells", [pairs, pytest.param(whole_product, marks=pytest.mark.whole_product)])
def test_every_cell_is_accepted_or_refused_as_it_should_be(cells):
    for cell in cells():
        assert verdict(cell) == (None if is_refused(cell) else conflicts(cell)), cell


def declared(kind) -> tuple:
    properties = [what for what in components.PROPERTIES if components.has(kind, what)]
    return properties, getattr(kind, "refuses", {}), getattr(kind, "warns", {})


def test_components_that_the_whole_product_leaves_out_declare_what_another_one_does():
    for index in SLOTS.values():
        for name in ALIKE.keys() & index.keys():
            assert declared(index[name]) == declared(index[ALIKE[name]]), name


@pytest.mark.slow
def test_every_loss_with_every_two_terms_is_accepted_or_refused_as_it_should_be():
    every = tuple(SLOTS["objective"])  # terms where a loss belongs, and losses where a term does, too
    steps = ("sgd", "scaffold")  # one that other slots have rules with, one that none has
    for loss, *terms, step in itertools.product(every, every, every, steps):
        for cell in (Cell(loss=loss, terms=tuple(terms), local_step=step), Cell(loss=loss, terms=(terms[0],))):
            assert verdict(cell) == (None if is_refused(cell) else conflicts(cell)), cell


@pytest.mark.parametrize("slot", SLOTS)
def test_fedconcat_refuses_what_compares_with_or_keeps_something_for_one_model_of_all_clients(slot):
    for name in SLOTS[slot]:
        if (slot, name) == ("server_update", "feddyn"):
            continue  # it comes with its local step, which is refused
        factor = "terms" if name in TERMS else "loss" if slot == "objective" else slot
        method = replace(Cell(**{factor: (name,) if factor == "terms" else name}).method(), pipeline=FedConcat())
        if name in OF_ONE_MODEL:
            with pytest.raises(CombinationError, match=rf"fedconcat doesn't go with {slot}.{name}: .*; take "):
                check(method)
        else:
            warned = {text.partition(":")[0] for text in check(method)}
            assert warned == ({"fedconcat with fedpals"} if name == "fedpals" else set())


@dataclass(frozen=True)
class OwnStep:
    """A local step of one's own that says what it does not go with."""

    refuses: ClassVar = {"server_update.fednova": "its steps are not SGD's; take the plain server update"}
    warns: ClassVar = {"weighting.fedla": "it weighs by itself; take uniform weights"}

    def step(self, parameters, gradient, carried, settings):
        return parameters, carried


class OwnKD(FedKD):
    """A term of one's own that inherits from one of ours."""


def own(**slots) -> Method:
    components = {"selection": Uniform(), "objective": Objective(CrossEntropy()), "local_step": OwnStep()}
    return Method(**{**components, "weighting": FedAvg(), "server_update": Plain(), **slots})


def test_a_component_of_ones_own_needs_to_say_nothing_and_is_heard_where_it_does():
    assert check(own()) == []
    with pytest.raises(CombinationError, match=r"fednova: its steps are not SGD's; take the plain"):
        check(own(server_update=FedNova()))
    (text,) = check(own(weighting=SLOTS["weighting"]["fedla"]()))
    assert "with fedla: it weighs by itself" in text


def test_a_term_of_ones_own_goes_by_the_name_of_the_one_that_it_inherits_from():
    assert methods.named("objective", OwnKD()) == "fedkd"
    check(own(objective=Objective(CrossEntropy(), ((0.1, FedKD()), (0.1, OwnKD())))))
    with pytest.raises(CombinationError, match=r"method.pipeline: fedconcat doesn't go with objective.fedkd"):
        check(own(objective=Objective(CrossEntropy(), ((0.1, OwnKD()),)), pipeline=FedConcat()))


def test_a_component_in_the_wrong_slot_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"method.weighting: FedProx has no weigh\(\).* it goes into local_step"):
        expand({"weighting": FedProx()})
    with pytest.raises(ConfigError, match=r"role must be 'classification' or 'term'"):
        check(own(objective=Objective(type("Bare", (), {"value": print})())))


def brought(tables) -> set[str]:
    """The slots that a preset fills, the objective's as its loss and its terms."""
    of_objective = {{"name": "loss"}.get(key, key) for key in tables.get("objective", {})}
    return (tables.keys() - {"objective"}) | (of_objective & {"loss", "terms"})


BRINGS = {name: brought(tables) for name, tables in PRESETS.items() if tables}
# FedVLS is its terms too; SCAFFOLD's, FedNH's and FedDyn's plain means are defaults, and so is FedACG's weak pull.
YIELDS = {
    ("fedvls", "loss"), ("scaffold", "weighting"), ("fednh", "weighting"), ("feddyn", "weighting"),
    ("fedacg", "local_step"),
}  # fmt: skip


@pytest.mark.slow
def test_any_two_presets_compose_unless_both_insist_on_the_same_thing():
    for first, second in itertools.combinations(BRINGS, 2):
        shared = (BRINGS[first] & BRINGS[second]) - {"terms"}
        insist = {thing for thing in shared if not {(first, thing), (second, thing)} & YIELDS}
        refused = bool(insist) or {first, second} == {"scaffold", "fednova"}
        robust = {one for one in (first, second) if BRINGS[one] == {"aggregation"}}
        refused |= bool(robust) and bool({first, second} & {"scaffold", "feddyn"})
        refused |= bool(robust & MERGING) and bool({first, second} & {"fednova", "fedexp"})
        refused |= {first, second} <= FIXED
        refused |= bool(FIXED & {first, second}) and bool(
            {"adapt", "ccvr", "fedcof", "gaussian", "ridge"} & {first, second}
        )
        own = {"partial", "ditto", "rod"}
        refused |= "fedconcat" in (first, second) and bool({first, second} & {"fedvls", *own, *OF_ONE_MODEL})
        refused |= {first, second} == {"partial", "scaffold"}
        for name in (f"{first}+{second}", f"{second}+{first}"):
            if refused:
                with pytest.raises(CombinationError):
                    expand({"preset": name})
            else:
                expand({"preset": name})


@pytest.mark.parametrize("name", [*PRESETS, *COMBINATIONS])
def test_a_preset_expands_to_a_method_that_replays_itself(name):
    whole = expand({"preset": name})
    assert set(whole) == set(SLOTS) | (
        {"pipeline"} if name == "fedconcat" else BRINGS.get(name, set()) & {"finish", "personal"}
    )
    assert expand(whole) == whole
    assert expand({slot: getattr(build(whole), slot) for slot in whole}) == whole


def names(tables) -> tuple:
    whole = expand(tables)
    return whole["objective"]["name"], [(term["name"], term["weight"]) for term in whole["objective"]["terms"]]


VLS = [("vacant_distillation", 0.1), ("suppression", 0.005)]


@pytest.mark.parametrize(
    ("preset", "loss", "terms"),
    [
        ("fedvls", "fedvls_calibration", VLS),
        ("fedlc+fedvls", "fedlc", VLS),
        ("fedvls+fedlc", "fedlc", VLS),
        ("fedvls+fedrs", "fedrs", VLS),
        ("fedvls+fedntd", "fedvls_calibration", [*VLS, ("fedntd", 0.1)]),
        ("fedlc+fedntd", "fedlc", [("fedntd", 0.1)]),
        ("feduv", "cross_entropy", [("classifier_variance", 2.5), ("uniformity", 0.5)]),
        ("fedvls+feddecorr", "fedvls_calibration", [*VLS, ("feddecorr", 0.1)]),
        ("fedmr+fedkd", "cross_entropy", [("fedmr", 1e-4), ("fedkd", 0.1)]),
        ("fedentopt+fedlc+fedvls+fedprox", "fedlc", VLS),
    ],
)
def test_objectives_of_presets_compose(preset, loss, terms):
    assert names({"preset": preset}) == (loss, terms)


@pytest.mark.parametrize("term", ["fedntd", "fedlmd", "fedkd", "fedekd", "feddkd"])
def test_terms_of_the_distillation_family_weigh_what_they_do_in_the_fedvls_comparison(term):
    assert names({"preset": term}) == ("cross_entropy", [(term, 0.1)])
    assert names({"objective": {"terms": [{"name": term, "weight": 1}]}}) == ("cross_entropy", [(term, 1.0)])


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_papers_own_combinations_run_without_a_word(name):
    assert check(build(expand({"preset": name}))) == []


def test_a_table_with_a_name_replaces_its_slot_and_one_without_changes_it():
    assert expand({"preset": "fedprox", "local_step": {"mu": 0.5}})["local_step"] == {"name": "fedprox", "mu": 0.5}
    assert expand({"preset": "fedprox", "local_step": {"name": "sgd"}})["local_step"] == {"name": "sgd"}
    assert names({"preset": "fedlc+fedvls", "objective": {"tau": 0.5}}) == names({"preset": "fedlc+fedvls"})
    assert names({"preset": "fedvls", "objective": {"name": "fedlc"}}) == ("fedlc", [])
    replaced = {"name": "fedvls_calibration", "terms": ["fedkd"]}
    assert names({"preset": "fedvls", "objective": replaced}) == ("fedvls_calibration", [("fedkd", 0.1)])


def test_terms_of_ones_own_are_added_to_those_of_a_preset():
    own = {"extra_terms": [{"name": "fedmr", "weight": 0.2}, FedNTD()]}
    added, bare = [("fedmr", 0.2), ("fedntd", 0.1)], [("fedkd", 0.1), ("fedmr", 0.0001)]
    assert names({"preset": "fedvls", "objective": own}) == ("fedvls_calibration", [*VLS, *added])
    assert names({"preset": "fedlc", "objective": own}) == ("fedlc", added)
    assert names({"objective": {"name": "fedlc", "terms": ["fedkd"], "extra_terms": ["fedmr"]}}) == ("fedlc", bare)
    whole = expand({"preset": "fedvls", "objective": own})
    assert expand(whole) == whole


def test_a_presets_terms_are_never_dropped_without_a_word():
    for given in (["fedkd"], ["fedkd", "suppression"], [FedNTD()]):
        with pytest.raises(
            ConfigError, match=r"method.objective.terms: .* vacant_distillation.* extra_terms.* name = "
        ):
            expand({"preset": "fedvls+fedprox", "objective": {"terms": given}})
    with pytest.raises(ConfigError, match=r"extra_terms: .*vacant_distillation, suppression.* 'fedlc' replaces"):
        expand({"preset": "fedvls", "objective": {"name": "fedlc", "extra_terms": ["fedkd"]}})
    every = [{"name": "vacant_distillation", "weight": 0.5}, "suppression", "fedkd"]
    weights = [("vacant_distillation", 0.5), ("suppression", 0.005), ("fedkd", 0.1)]
    assert names({"preset": "fedvls", "objective": {"terms": every}}) == ("fedvls_calibration", weights)
    assert names({"preset": "fedvls", "objective": {"terms": []}}) == ("fedvls_calibration", [])


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({}, "cross_entropy"),
        (
            {"preset": "fedvls", "objective": {"extra_terms": [FedNTD()]}},
            "fedvls_calibration + 0.1 vacant_distillation + 0.005 suppression + 0.1 fedntd",
        ),
        ({"preset": "fedlc+fedmr", "objective": {"tau": 0.5}}, "fedlc(tau=0.5) + 0.0001 fedmr"),
    ],
)
def test_the_whole_objective_is_one_line(tables, line):
    assert methods.objective_in_words(expand(tables)) == line


def test_components_may_stand_where_tables_may():
    objective = Objective(FedLC(tau=0.5), ((0.3, FedNTD()),))
    assert names({"objective": objective}) == ("fedlc", [("fedntd", 0.3)])
    assert names({"objective": {"name": "fedlc", "terms": [FedNTD()]}}) == ("fedlc", [("fedntd", 0.1)])
    for step in (FedProx(0.3), {"name": FedProx, "mu": 0.3}):
        assert expand({"local_step": step})["local_step"] == {"name": "fedprox", "mu": 0.3}
    for term in ({"name": FedNTD}, FedNTD):
        assert names({"objective": {"name": FedLC, "terms": [term]}}) == ("fedlc", [("fedntd", 0.1)])


def test_fednova_reckons_with_the_momentum_of_the_run_and_with_no_other():
    whole = expand({"preset": "fednova"})
    assert "local_momentum" not in whole["server_update"]
    assert build(whole, momentum=0.9).server_update == FedNova(0.9)
    assert build(expand({"server_update": FedNova(0.9)}), momentum=0.9).server_update == FedNova(0.9)
    with pytest.raises(ConfigError, match=r"method.server_update.local_momentum: 0.5 isn't the clients' .* 0.9"):
        build(expand({"server_update": FedNova(0.5)}), momentum=0.9)
    assert build(expand({"preset": "fedavg"}), momentum=0.9).server_update == Plain()


def preset_cost(name: str) -> components.Cost:
    return cost(build(expand({"preset": name})))


def test_costs_are_those_of_the_definitions():
    assert preset_cost("fedavg") == components.Cost()
    assert preset_cost("fedvls") == components.Cost(forward=1)
    assert preset_cost("fedsam") == components.Cost(forward=1, backward=1)
    assert preset_cost("ditto") == components.Cost(forward=1, backward=1, client_models=1)
    assert preset_cost("fedentopt").numbers == ("C up once",)
    assert preset_cost("seol_kim").numbers == ("C up once", "C down")
    assert preset_cost("fednova").numbers == ("1 up",)
    assert preset_cost("feddyn") == components.Cost(client_models=1)
    assert preset_cost("feddisco").numbers == preset_cost("fedcbs").numbers == ("C up once",)
    for free in (
        "fedprox",
        "fedrs",
        "fedlc",
        "fedmr",
        "fedexp",
        "uniform",
        "fedacg",
        "fedadagrad",
        "fedadam",
        "fedyogi",
    ):
        assert preset_cost(free) == components.Cost()


def test_what_two_methods_share_costs_once():
    assert preset_cost("fedvls+fedntd+fedkd").forward == 1  # one teacher for all
    assert preset_cost("fedsam+fedvls") == components.Cost(forward=2, backward=1)
    assert preset_cost("fedentopt+fedla").numbers == ("C up once",)
    reads = type("Reads", (), {"reads": frozenset({"teacher", "previous"})})
    assert components.cost(reads) == components.Cost(forward=2, client_models=1)
    several = components.Cost(forward=1, models_down=1, client_models=1)
    assert str(several) == "+1 forward, +1 model down, client keeps 1 model"


def test_every_component_names_its_paper_and_what_it_says_of_others_are_names_and_reasons():
    for slot, index in SLOTS.items():
        for name, kind in index.items():
            assert bool(getattr(kind, "paper", "")) != (name in FROM_NO_PAPER), f"{slot}.{name}: its paper?"
            for other, reason in {**getattr(kind, "refuses", {}), **getattr(kind, "warns", {})}.items():
                other_slot, _, other_name = other.partition(".")
                word = other_name.removeprefix("not ")
                assert word in components.PROPERTIES or word in PLACES[other_slot], f"{slot}.{name} names {other}"
                assert not reason.endswith("."), "it becomes part of a line"


def test_the_defaults_are_fedavg():
    assert expand({}) == expand({"preset": "fedavg"}) == expand(DEFAULTS)


@pytest.mark.slow
def test_the_covering_set_holds_every_accepted_pair_in_few_accepted_combinations():
    cells = covering_set()
    assert cells == covering_set.__wrapped__()
    assert all(cell.accepted and not is_refused(cell) for cell in cells)
    assert set().union(*map(pairs_of, cells)) == set(accepted_pairs())
    others = [len(index) for slot, index in SLOTS.items() if slot != "objective"]
    first, second = sorted([len(LOSSES), *others])[-2:]
    # A cell for each pair of the two largest slots, of the objective's losses, and not many more.
    assert len(cells) <= first * second * 1.5


def test_the_covering_set_is_written_as_configs():
    for cell in covering_set():
        assert build(expand(cell.tables())) == cell.method(), cell


@dataclass(frozen=True)
class OwnWeighting:
    """A weighting of one's own that reads the target mix, and says nothing else of itself."""

    needs_target: ClassVar = True

    def weigh(self, answered):
        return answered.sizes / answered.sizes.sum()


@dataclass(frozen=True)
class OwnSelection:
    """A selection of one's own that never varies."""

    fixed_cohort: ClassVar = True

    def select(self, state, counts, size, rng, first=None):
        return list(range(size)), state


def warned(**slots) -> set[str]:
    method = own(**{"local_step": SLOTS["local_step"]["sgd"](), **slots})
    return {text.partition(":")[0].split(" with ")[0] for text in check(method)}


def test_rules_are_about_properties_so_that_they_hold_for_components_of_ones_own():
    weighting, selection = OwnWeighting(), OwnSelection()
    assert warned(weighting=weighting) == warned(selection=selection) == set()
    assert warned(weighting=weighting, local_step=SLOTS["local_step"]["scaffold"]()) == {"scaffold"}
    assert warned(weighting=weighting, selection=SLOTS["selection"]["fedentopt"]()) == {"fedentopt"}
    assert warned(weighting=SLOTS["weighting"]["afl"](), selection=selection) == {"afl"}
    uniform, scaffold = SLOTS["weighting"]["uniform"](), SLOTS["local_step"]["scaffold"]()
    assert warned(weighting=uniform, local_step=scaffold) == set()
    assert warned(weighting=uniform, local_step=scaffold, selection=selection) == {"scaffold"}


def test_every_component_that_needs_no_parameter_is_a_preset_of_its_own_name_or_part_of_one():
    defaults = {table["name"] for table in DEFAULTS.values()}
    parts = {"fedvls_calibration", "vacant_distillation", "suppression", "classifier_variance", "uniformity"}
    need_parameters = {"recorded", "function"}
    for index in PLACES.values():
        for name in index:
            assert (name in PRESETS) == (name not in parts | need_parameters | (defaults - {"uniform", "fedavg"})), name
