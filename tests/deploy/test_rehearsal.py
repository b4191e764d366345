"""What `deploy init`, `local` and `check` say is what the run does: defaults, refusals, and the loss of each site."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from federated import federate, fedskew, init, tree

from common import task
from fedskew.deploy import Address, Agreement, Draft, check_folder, write_federation
from fedskew.errors import ConfigError
from fedskew.experiment import Config, read, resolve
from fedskew.sums import Key

SAMPLES = {"classes": ["a", "b", "c"], "shape": [1, 4, 4]}
NAMES = tuple("abcdefghij")


def config(method: Any = "fedavg", clients: int = 3, **more: Any) -> Config:
    tree = task(clients, **{"rounds": 2, **more.pop("training", {})})
    method = {"preset": method} if isinstance(method, str) else method
    return resolve(tree | {"name": "paper", "data": {"name": "digits", "rows": 60}, "method": method} | more)


@pytest.mark.parametrize(
    ("sites", "participation", "plain", "masked"),
    [
        (2, 1.0, None, None),
        (3, 0.67, None, None),  # two a round: a limit would make their weights equal
        (3, 1.0, 0.5, 0.4),
        (4, 1.0, 0.5, 0.4),
        (5, 1.0, 0.4, 0.4),
        (10, 0.5, 0.4, 0.4),
        (10, 1.0, 0.2, 0.2),
        (3000, 1.0, 0.000667, 0.000667),
    ],
)
def test_the_limit_follows_from_how_many_take_part(
    sites: int, participation: float, plain: float | None, masked: float | None
) -> None:
    one = config(training={"participation": participation})
    own = one.with_value("training.weight_limit", 0.9)
    for made, updates, limit in ((one, "plain", plain), (one, "masked", masked), (own, "plain", 0.9)):
        if updates == "plain" or sites > 2:  # else no sum can be taken
            drafted = Draft.of(made, [f"{place:04}" for place in range(sites)], SAMPLES, updates=updates)
            assert drafted.config.training.weight_limit == limit


def agreed(sites: int, **more: Any) -> Agreement:
    return Agreement.resolve({"sites": list(NAMES[:sites]), **SAMPLES, **more})


def rehearse(made: Config, agreement: Agreement, counts: Any = None) -> str:
    """What `deploy check` says of a federation, with made-up label counts or with those of a run."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        mask_keys = {name: Key.generate() for name in agreement.sites} if agreement.updates == "masked" else None
        write_federation(folder, made, agreement, Address("localhost", 9092), {}, mask_keys=mask_keys)
        if counts is not None:
            run = folder / "server" / "runs" / "run"
            run.mkdir(parents=True)
            (run / "deployment.json").write_text(json.dumps({"label_counts": counts}))
        return "\n".join(check_folder(folder))


@pytest.mark.parametrize(
    ("method", "sites", "training", "reason"),
    [
        ({"preset": "fedentopt", "selection": {"buffer": 0.9}}, 3, {"participation": 0.67}, "buffer: 0.9 keeps 2 of 3"),
        ({"preset": "fedavg", "aggregation": {"name": "krum"}}, 4, {}, "aggregation: krum needs 5 clients"),
        ("fedpals", 3, {}, "target"),
    ],
)
def test_check_refuses_what_the_run_would_refuse_after_the_sites_were_asked(
    method: Any, sites: int, training: dict[str, Any], reason: str
) -> None:
    made = config(method, clients=10, training=training)
    with pytest.raises(ConfigError, match=reason):
        rehearse(made, agreed(sites))


@pytest.mark.slow
def test_check_and_server_refuse_with_the_same_words(tmp_path: Path) -> None:
    method = {"preset": "fedentopt", "selection": {"buffer": 0.9}}
    federation = federate(tmp_path, tree(method, participation=0.67))
    said = []
    for play in (lambda: federation.run(federation.grid()), lambda: rehearse(federation.config, federation.agreement)):
        with pytest.raises(ConfigError) as error:
            play()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_check_plays_the_loss_of_each_site() -> None:
    assert "without any of a, b, c: rounds go on with the others" in rehearse(config(), agreed(3))
    krum = config({"preset": "fedavg", "aggregation": {"name": "krum"}}, clients=5)
    said = "every round stands still, as krum needs 5 clients, and has 4"
    assert f"without any of a, b, c, d, e: {said}" in rehearse(krum, agreed(5))
    alone = config(training={"participation": 0.34})  # one of three a round
    assert "% of the rounds stand still, as nobody else takes part in them" in rehearse(alone, agreed(3))
    assert "training begins once all sites are there (min_sites = 3" in rehearse(config(), agreed(3, min_sites=3))


def test_check_plays_it_for_sums_too_with_the_label_counts_there_are() -> None:
    made = Draft.of(config(), NAMES[:4], SAMPLES, updates="masked")
    wide = made.config.with_value("training.weight_limit", 0.5)
    counts = [[150, 0, 0], [4, 0, 0], [0, 210, 0], [0, 0, 120]]
    said = rehearse(made.config, made.agreement, counts)
    assert "without any of a, b, c, d: rounds go on with the others" in said
    assert "never is" not in said
    assert (
        "without d: every round stands still, as with these weights a sum over 3 sites is in effect one over 2.05"
        in rehearse(wide, made.agreement, counts)
    )
    assert "up to 0.4 it never is" in rehearse(wide, made.agreement)
    three = Draft.of(config(), NAMES[:3], SAMPLES, updates="masked")
    assert "without any of a, b, c: every round stands still, as a masked sum is over 3 sites at least" in (
        rehearse(three.config, three.agreement)
    )


def test_check_says_when_the_limit_decides_all_weights() -> None:
    two = config("fedla", training={"participation": 0.67, "weight_limit": 0.5})
    said = rehearse(two, agreed(3))
    assert "makes all weights equal, as 2 of 3 sites take part in a round: fedla never acts; take one above 0.5" in said
    more = two.with_value("training.weight_limit", 0.6)
    assert "the largest share of the weight that a site can have\n" in rehearse(more, agreed(3))


PRIVATE: dict[str, Any] = {
    "method": "fedavg",
    "clients": 4,
    "training": {"weight_limit": 0.5},
    "privacy": {"clip": 1.0, "noise": 1.0, "epsilon": 50.0, "delta": 0.01},
    "engine": {"updates": "masked"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "options"),
    [({}, ()), ({}, ("--updates", "masked")), (PRIVATE, ()), ({}, ("--label-counts", "withheld"))],
    ids=["plain", "masked", "private", "withheld"],
)
def test_local_rehearses_what_init_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], options: tuple[str, ...]
) -> None:
    if given:
        pytest.importorskip("dp_accounting")
    monkeypatch.setenv("PATH", "")  # the folder is written, and then no process starts
    names = ",".join(f"site-{place}" for place in range(4))
    init(tmp_path / "one", config(**{"clients": 4, **given}).tree(), "--sites", names, *options)
    fedskew("deploy", "local", tmp_path / "two", "--config", tmp_path / "one.toml", *options)
    one, two = tmp_path / "one" / "app", tmp_path / "two" / "app"
    assert read(one / "run.toml") == read(two / "run.toml")
    ours, theirs = (Agreement.read(app / "deploy.toml").tree() for app in (one, two))
    assert ours.pop("keys", {}).keys() == theirs.pop("keys", {}).keys()
    assert ours == theirs


def test_init_says_plainly_that_the_loss_of_any_site_stops_rounds(tmp_path: Path) -> None:
    _, said = init(tmp_path / "fed", config().tree(), "--sites", "a,b,c", "--updates", "masked")
    assert "note: without any of a, b, c: every round stands still, as a masked sum is over 3 sites at least" in said
