"""Methods, configs and parameters that make no sense are refused before the first round, in one line: refusals.toml."""

import tomllib
from pathlib import Path

import pytest

import fedskew
from common import task
from fedskew import errors
from fedskew.methods import PLACES, expand

BASE = task(12, beta=0.5, rounds=1)
KNOWN = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))


def beside(tables, changes):
    """Tables with these changes; only the method's are in place of what is there."""
    merged = {key: tables[key] | changes[key] for key in tables.keys() & changes.keys() - {"method"}}
    return {**tables, **changes, **merged}


def run(known):
    return fedskew.simulate(beside(beside(BASE, KNOWN["bases"].get(known.get("base"), {})), known["tables"]))


@pytest.mark.parametrize(("kind", "refuse"), [("methods", lambda known: expand(known["tables"])), ("runs", run)])
def test_what_makes_no_sense_is_refused_with_its_key_and_what_to_do(kind, refuse, subtests):
    for known in KNOWN[kind]:
        with subtests.test(says=known["says"], **known["tables"]):
            if "privacy" in (known.get("base"), *known["tables"]):
                pytest.importorskip("dp_accounting")
            error = getattr(errors, known.get("error", "ConfigError"))
            with pytest.raises(error, match=known["says"]) as found:
                refuse(known)
            assert "\n" not in str(found.value)


@pytest.mark.parametrize("slot", KNOWN["parameters"])
def test_senseless_parameters_are_refused_by_name(slot):
    for name, parameters in KNOWN["parameters"][slot].items():
        for parameter, values in parameters.items():
            for value in values:
                with pytest.raises(errors.ArgumentError, match=f"^{parameter}: input should be "):
                    PLACES[slot][name](**{parameter: value})
