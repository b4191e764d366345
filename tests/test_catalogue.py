"""What is known of every method, as pages and as JSON."""

import io
import json
import sys
import tomllib
from dataclasses import dataclass

import pytest
from rich.console import Console

from fedskew.errors import CombinationError, ConfigError
from fedskew.methods import PLACES, PRESETS, SLOTS, catalogue, expand
from fedskew.methods.catalogue import COMBINATIONS

NAMES = sorted({*PRESETS, *COMBINATIONS, *(name for index in PLACES.values() for name in index)})


def page(name: str, width: int = 80) -> str:
    """What the command prints."""
    out = io.StringIO()
    catalogue.print_page(Console(width=width, file=out), name)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 100])
def test_every_page_fits_its_width(width):
    for name in NAMES:
        for line in page(name, width).splitlines():
            assert len(line) <= width, (name, line)
    out = io.StringIO()
    catalogue.print_listing(Console(width=width, file=out))
    assert max(map(len, out.getvalue().splitlines())) <= width
    assert "…" not in out.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_the_config_on_a_page_is_one_that_works(name):
    if any(one["required"] for one in catalogue.explanation(name)["components"]):
        pytest.skip("it has parameters without a default")
    _, _, rest = page(name, 80).partition("In a config:")
    example = "\n".join(line.strip() for line in rest.splitlines() if line.startswith(" "))
    whole = expand(tomllib.loads(example)["method"])
    if name in PRESETS or "+" in name:
        assert whole == expand({"preset": name})
    else:
        assert name in json.dumps(whole)


def test_a_page_holds_the_whole_text_of_the_components_file():
    text = " ".join(page("fedvls", 80).split())
    source = sys.modules[SLOTS["objective"]["suppression"].__module__].__doc__
    words = [word for word in source.replace("`", "").split() if word != "-"]  # which Markdown renders
    assert [word for word in words if word not in text] == []
    for name in ("vacant_distillation (objective, a term)", "weight = 0.005", "prior_eps = 1e-09", 'form = "official"'):
        assert name in text
    assert text.count('Guo et al., "Exploring Vacant Classes') == 1


def test_a_combination_says_what_it_costs_and_what_conflicts():
    text = " ".join(page("fedentopt+fedpals+fedsam+fedvls", 80).split())
    assert "+2 forward, +1 backward, C up once." in text
    assert "Warning: fedentopt with fedpals:" in text
    assert "fedskew methods fedentopt • fedskew methods fedpals" in text


def test_a_page_keeps_formulas_and_says_what_each_parameter_means():
    fedprox = page("fedprox", 80).splitlines()
    assert any("(mu / 2) ||theta - w||^2" in line for line in fedprox)
    fedpals = " ".join(page("fedpals", 80).split())
    assert "strength = 0.0: The paper's lambda, in samples." in fedpals
    assert "Attributes" not in fedpals


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("fedproxx", ConfigError, "did you mean 'fedprox'"),
        ("FedVLS", ConfigError, "did you mean 'fedvls'"),
        ("suppresion", ConfigError, "did you mean 'suppression'"),
        ("fedlc+fedrs", CombinationError, "take 'fedlc' or 'fedrs'"),
    ],
)
def test_an_unknown_or_senseless_name_is_refused(name, error, says):
    for ask in (catalogue.explanation, lambda name: page(name, 80)):
        with pytest.raises(error, match=says):
            ask(name)


def test_a_component_that_is_no_preset_is_explained_too():
    assert catalogue.explanation("suppression")["preset"] is None
    assert catalogue.explanation("uniform")["preset"] is not None
    assert [one["slot"] for one in catalogue.explanation("uniform")["components"]] == ["selection", "weighting"]


def test_the_listing_for_programs_holds_every_method():
    tree = catalogue.listing()
    assert set(tree["presets"]) == set(PRESETS)
    assert [(one["slot"], one["name"]) for one in tree["components"]] == [
        (slot, name) for slot, index in PLACES.items() for name in index
    ]
    by_name = {f"{one['slot']}.{one['name']}": one for one in tree["components"]}
    prox = by_name["local_step.fedprox"]
    assert prox["parameters"] == {"mu": 0.01}
    assert prox["paper"] == "Li et al., MLSys 2020"
    assert prox["presets"] == ["fedacg", "fedprox"]
    assert by_name["local_step.fedsam"]["cost"] == {
        "forward": 1, "backward": 1, "models_up": 0, "models_down": 0, "client_models": 0, "numbers": (),
    }  # fmt: skip
    assert by_name["objective.suppression"]["parameters"]["weight"] == 0.005
    assert by_name["objective.suppression"]["presets"] == ["fedvls"]
    assert by_name["weighting.fedpals"]["needs_target"]
    assert set(by_name["selection.fedentopt"]["conflicts_with"]) == {"weighting.fedpals"}
    assert set(by_name["server_update.fednova"]["refused_with"]) == {
        "local_step.feddyn", "local_step.scaffold", "aggregation.median", "aggregation.trimmed_mean",
    }  # fmt: skip
    assert tree["combinations"]["fedlc+fedvls"]["method"]["objective"]["name"] == "fedlc"


@dataclass(frozen=True)
class OwnSelection:
    """What a newcomer to the index may say: little."""

    path: str
    shares: tuple[float, ...] = (0.5, 0.5)

    def select(self, state, counts, size, rng, first=None):
        return state


def test_a_component_that_says_nothing_of_itself_is_listed_all_the_same(monkeypatch):
    monkeypatch.setitem(SLOTS["selection"], "own", OwnSelection)
    text = page("own", 80)
    assert "path (required)" in text
    assert 'path = "..."' in text
    assert "shares = [0.5, 0.5]" in text
    assert "Paper: none." in text
    assert catalogue.listing()["components"][-1]["slot"] == "pipeline"
