"""Whether it is worth it for each client: rows over seeds, differences with intervals, and the page's figure."""

import dataclasses
import json
import math

import numpy as np
import pytest
from example_runs import example_run, with_sites
from scipy import stats

from fedskew.report import ClientTable, SeedRun, write_report

NAN = math.nan
ROWS = {"alone": [0.5, 0.9, 0.7, 0.6, NAN], "common": [0.7, 0.8, 0.7, 0.9, 0.5], "personal": [0.8, 0.95, 0.8, 0.9, 0.6]}


def run_of(rows=ROWS, seed: int = 0, partition_seed: int | None = None) -> SeedRun:
    run = example_run("fedavg", seed, rounds=2, clients=5, cohort=2)
    rule = {"rule": "iid", "seed": partition_seed}
    return with_sites(dataclasses.replace(run, config=run.config | {"partition": rule}), rows)


def test_who_gains_and_who_loses_by_hand():
    table = ClientTable.of([run_of()])
    assert table.kinds == ["alone", "common", "personal"]
    common, personal, over_common = table.gains("accuracy")
    assert (common.row, common.other) == ("common", "alone")
    assert common.names == ("client 1", "client 2", "client 0", "client 3")
    assert common.differences == pytest.approx([-0.1, 0.0, 0.2, 0.3])
    assert (common.losing, common.gaining) == (1, 2)  # one is equal
    assert common.in_words().startswith("Common against alone: +10.0 points of accuracy in the mean over 4 clients (95")
    assert common.in_words().endswith("; 2 gain, 1 lose: client 1 (-10.0).")
    assert (personal.losing, personal.gaining) == (0, 4)
    assert len(over_common.names) == 5
    assert over_common.losing == 0
    (by_loss, *_) = table.gains("loss")
    assert by_loss.names == common.names  # a lower loss is a gain
    assert by_loss.differences == pytest.approx(-common.differences)
    assert (by_loss.losing, by_loss.gaining) == (1, 2)
    assert table.gains("auroc") == []
    assert table.summaries()["common"]["accuracy"]["losing"] == common.losing


def test_the_interval_is_that_of_the_bootstrap_over_clients_and_always_the_same():
    rng = np.random.default_rng(5)
    alone, common = rng.uniform(0.5, 0.9, size=(2, 40))
    run = run_of({"alone": alone.tolist(), "common": common.tolist()})
    run = dataclasses.replace(run, client_names=tuple(map(str, range(40))))
    (gain,) = ClientTable.of([run]).gains("accuracy")
    expected = stats.bootstrap((common - alone,), np.mean, method="percentile", n_resamples=4000, rng=rng)
    assert (gain.low, gain.high) == pytest.approx(expected.confidence_interval, abs=0.006)
    (again,) = ClientTable.of([run]).gains("accuracy")
    assert (again.low, again.high) == (gain.low, gain.high)


def test_a_single_client_has_no_interval():
    (gain,) = ClientTable.of([run_of({"alone": [0.5], "common": [0.75]})]).gains("accuracy")
    assert math.isnan(gain.low)
    assert gain.in_words().endswith("+25.0 points of accuracy in the mean over 1 client; 1 gain, 0 lose.")
    assert gain.to_dict()["low"] is None


def test_clients_of_one_federation_are_averaged_over_seeds_and_those_of_several_are_not():
    other = {row: [0.5 * value for value in values] for row, values in ROWS.items()}
    same = ClientTable.of([run_of(seed=0), run_of(other, seed=1)])
    assert len(same.names) == 10
    assert same.names[-1] == "client 4, seed 1"
    one = ClientTable.of([run_of(seed=0, partition_seed=3), run_of(other, seed=1, partition_seed=3)])
    assert one.names == tuple(f"client {at}" for at in range(5))
    assert one.values("common", "accuracy") == pytest.approx([0.525, 0.6, 0.525, 0.675, 0.375])
    assert one.seeds == (0, 1)


def test_the_page_names_who_loses(tmp_path):
    text = write_report([run_of()], tmp_path / "report.html", "Worth it").read_text(encoding="utf-8")
    assert "Worth it for each client" in text
    assert "2 gain, 1 lose: client 1 (-10.0)." in text
    (chart,) = [
        one
        for one in json.loads(text.split('id="figures"')[1].split(">", 1)[1].split("</script>")[0])["charts"]
        if [trace.get("name") for trace in one["data"]] == [None, "alone", "common", "personal"]
    ]
    lines, alone, _, personal = chart["data"]
    assert alone["y"] == ["client 0", "client 3", "client 2", "client 1", "client 4"]
    assert personal["x"] == [80.0, 90.0, 80.0, 95.0, 60.0]
    assert lines["x"][:4] == [50.0, 70.0, 80.0, None]
    without = write_report([example_run(rounds=2)], tmp_path / "none.html", "None").read_text(encoding="utf-8")
    assert "Worth it for each client" not in without


@pytest.mark.parametrize("clients", [1, 41, 1500])
def test_a_page_of_any_number_of_clients_can_be_drawn(tmp_path, clients):
    rows = {row: np.linspace(0.2, 0.9, clients).tolist() for row in ("alone", "common", "pooled")}
    run = dataclasses.replace(run_of(rows), client_names=tuple(f"site {at}" for at in range(clients)))
    run = dataclasses.replace(run, counts=np.ones((clients, 10), dtype=np.int64), rounds=run.rounds[:1])
    page = write_report([run], tmp_path / "report.html", "Worth it")
    assert "What each client gets" in page.read_text(encoding="utf-8")
