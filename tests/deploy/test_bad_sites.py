"""One site that was let in, and lies: what it sends is refused or left out, and the others go on."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import Federated, federate, figures, on, scaled, tree
from flwr.app import Array, Message
from safetensors.numpy import load_file
from torch import nn

from fedskew.deploy._arrays import unpack
from fedskew.errors import StandstillError

Tamper = Callable[[Message, Message], None]
NOTED = ("refused", "failed", "offline", "silent", "skipped", "left_out", "out_of_line")


def normed(num_classes: int, in_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


class Placed(nn.Module):
    """A network with integers that it looks up, as the positions of tokens are."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 2)
        self.head = nn.Linear(128, num_classes)
        self.register_buffer("position_ids", torch.arange(64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.position_ids.clamp_(0, 63)  # what a pass writes to travels
        return self.head((images.flatten(1)[..., None] * self.places(self.position_ids)).flatten(1))


def with_array(name: str, change: Callable[[Any], Any], record: str = "arrays") -> Tamper:
    def put(question: Message, answer: Message) -> None:
        old = answer.content[record][name].numpy()
        answer.content[record][name] = Array(np.asarray(change(old), old.dtype).reshape(old.shape))

    return put


def played(
    folder: Path,
    method: Any,
    lie: Any,
    from_round: int = 1,
    away: tuple[str, ...] = (),
    agreed: dict[str, Any] | None = None,
    model: str = "mlp3",
    **training: Any,
) -> list[dict[str, Any]]:
    """The records of a federation in which birch lies from this round on; None: it is honest."""
    federation = federate(
        folder,
        tree(method, **training) | {"model": {"name": model}},
        **{"start_timeout": 0.01, "evaluation": "none", **(agreed or {})},
    )
    return run(federation, lie, from_round, away=away)


def run(federation: Federated, lie: Any, from_round: int = 1, **others: Any) -> list[dict[str, Any]]:
    lies = {} if lie is None else {"birch": on("train", lie, first=from_round)}
    with suppress(StandstillError):  # where birch is alone, and nothing that it sends is counted
        federation.play(lies, **others)
    return federation.records()[1:]


def test_a_counter_beyond_its_steps_is_refused_and_the_honest_go_on(tmp_path: Path) -> None:
    """The server takes the sites' largest, so that one site's 10**12 shut all others out."""
    lie = with_array("2.num_batches_tracked", lambda old: 10**12)
    (record,) = played(tmp_path, "fedavg", lie, model="test_bad_sites:normed", rounds=1)
    assert sorted(record["answered"]) == [0, 2]
    assert "'2.num_batches_tracked' has a counter" in record["deployment"]["refused"]["birch"]
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert model["2.num_batches_tracked"] == 7  # of cedar, which has the most steps


def test_integers_that_count_nothing_must_be_what_was_sent(tmp_path: Path) -> None:
    """The largest is taken: one higher, and the last place would be none that the network knows."""
    lie = with_array("position_ids", lambda old: old + 1)
    (record,) = played(tmp_path, "fedavg", lie, model="test_bad_sites:Placed", rounds=1, steps=1)
    assert sorted(record["answered"]) == [0, 2]
    assert record["deployment"]["refused"] == {
        "birch": "its array 'position_ids' is not what was sent; of integers only batch norm's num_batches_tracked may "
        "change"
    }
    assert load_file(tmp_path / "run" / "model.safetensors")["position_ids"].tolist() == list(range(64))


@pytest.mark.parametrize(
    ("factor", "away"),
    [(1e30, ()), (1e30, ("ash",)), (1e3, ("ash",)), (1e30, ("ash", "cedar"))],
    ids=["three", "two", "two, by less", "one"],
)
def test_an_update_of_any_length_is_left_out_in_any_cohort(
    tmp_path: Path, factor: float, away: tuple[str, ...]
) -> None:
    (record,) = played(tmp_path, "fedavg", scaled(factor), away=away, rounds=1)
    assert 1 not in record["answered"]
    assert list(record["deployment"]["out_of_line"]) == ["birch"]
    assert record["deployment"]["out_of_line"]["birch"] > 10


@pytest.mark.parametrize(("factor", "answered"), [(1, [1, 2]), (1e3, [2])])
def test_where_adam_takes_the_steps_their_size_tells_what_is_likely(
    tmp_path: Path, factor: float, answered: list[int]
) -> None:
    adam: dict[str, Any] = {"optimizer": "adam", "momentum": 0.0, "lr": 0.05, "rounds": 1}
    (record,) = played(tmp_path, "fedavg", scaled(factor), away=("ash",), **adam)
    assert sorted(record["answered"]) == answered


@pytest.mark.slow
def test_what_a_site_sent_before_is_what_it_may_send_again(tmp_path: Path) -> None:
    """Of two sites no median tells; what the first round allows is out of line after rounds of shorter updates."""
    first = played(tmp_path / "first", "fedavg", scaled(30), away=("ash",), rounds=1, lr=0.005)
    assert sorted(first[0]["answered"]) == [1, 2]
    later = played(tmp_path / "later", "fedavg", scaled(30), from_round=3, away=("ash",), rounds=3, lr=0.005)
    assert [sorted(record["answered"]) for record in later] == [[1, 2], [1, 2], [2]]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "factor"), [("fedavg", -100), ("fednova", 1)])
def test_told_samples_buy_neither_length_nor_steps(tmp_path: Path, method: str, factor: float) -> None:
    """Birch says 10**7 samples of each class, with the steps that follow; only four times the median's count.

    More steps don't make -100 times an update any shorter, and FedNova does not scale the honest updates up by them.
    """
    federation = federate(tmp_path, tree(method, weight_limit=0.5, rounds=1), evaluation="none", start_timeout=0.01)
    grid, node = federation.grid(), federation.node("birch")
    name, honest, settings = grid.apps[node]

    def liar(question: Message, context: Any) -> Message:
        if question.metadata.message_type == "train":
            del question.content["config"]["fedskew-reported"]  # the label counts that it told
        answer = honest(question, context)
        answer.content = unpack(answer.content)
        if question.metadata.message_type == "train":
            scaled(factor)(question, answer)
            answer.content["metrics"]["fedskew-steps"] = 10**8 // 32
        else:
            answer.content["metrics"]["label-counts"] = [10**7] * 10
        return answer

    grid.apps[node] = (name, liar, settings)  # type: ignore[assignment]
    record = federation.play(grid=grid)[1]
    assert list(record["deployment"]["out_of_line"]) == ["birch"] * (method == "fedavg")
    steps = {0: 5, 2: 7} if method == "fedavg" else {0: 5, 1: 28, 2: 7}
    assert dict(zip(record["answered"], record["steps"], strict=True)) == steps


EIGHT = ("ash", "birch", "cedar", "elm", "fir", "oak", "rowan", "yew")


def eight(folder: Path, action: str = "leave_out", **agreed: Any) -> Federated:
    """Eight sites whose labels overlap; birch and elm hold some of what others hold."""
    kinds = {"evaluation": "none", "start_timeout": 0.01, "norm_action": action, **agreed}
    return federate(folder, tree("fedavg", rounds=3, epochs=2), EIGHT, **kinds)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, list[dict[str, Any]]]:
    """A federation in which birch flips its sign, and its records."""
    return (federation := eight(tmp_path_factory.mktemp("flipped"))), run(federation, scaled(-1))


@pytest.mark.slow
@pytest.mark.parametrize(("action", "counted"), [("leave_out", False), ("report", True)])
def test_a_site_that_flips_its_sign_is_found_within_rounds(
    tmp_path: Path, flipped: Any, action: str, counted: bool
) -> None:
    """Sites with its labels pull the other way."""
    records = run(eight(tmp_path, action), scaled(-1)) if counted else flipped[1]
    found = [list(record["deployment"]["contrary"]) for record in records]
    assert found[0] == []
    assert found[-1] == ["birch"]
    assert [1 in record["answered"] for record in records] == [counted or not names for names in found]
    assert not any(record["deployment"]["out_of_line"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [False, True])
def test_directions_are_not_compared_where_nothing_is_known(tmp_path: Path, lie: bool) -> None:
    """Nobody is contrary among honest sites; nor among sites that withhold their label counts."""
    federation = eight(tmp_path, label_counts="withheld") if lie else eight(tmp_path)
    records = run(federation, scaled(-1 if lie else 1))
    assert [record["deployment"]["contrary"] for record in records] == [{}] * 3


def holding(federation: Federated, held: dict[str, tuple[int, ...]]) -> Federated:
    """The federation, where these sites train on all samples of these classes."""
    whole = dict(np.load(federation.folder / "whole.npz"))
    for name, classes in held.items():
        rows = np.flatnonzero(np.isin(whole["y"], classes))
        path = federation.folder / name / "own.npz"
        np.savez(path, **dict(np.load(path)) | {"x": whole["x"][rows], "y": whole["y"][rows]})
    return federation


def settled(folder: Path, held: dict[str, tuple[int, ...]], **agreed: Any) -> list[dict[str, Any]]:
    """The records of honest sites with a linear model and weight decay: each soon undoes what the others do."""
    config = tree("fedavg", rounds=6, epochs=10, lr=0.2, weight_decay=0.1) | {"model": {"name": "logistic"}}
    kinds = {"evaluation": "none", "start_timeout": 0.01, **agreed}
    return run(holding(federate(folder, config, tuple(held), **kinds), held), scaled(1))


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["exact", "withheld"])
def test_an_honest_site_of_other_labels_is_not_contrary(tmp_path: Path, counts: str) -> None:
    """Few of its labels are held by others; where label counts are withheld, that is not known."""
    held = dict.fromkeys(EIGHT[:5], tuple(range(5))) | {"birch": tuple(range(4, 10))}
    records = settled(tmp_path, held, label_counts=counts)
    assert not any(record["deployment"]["contrary"] for record in records)


@pytest.mark.slow
def test_three_sites_that_share_labels_in_pairs_are_not_compared(tmp_path: Path) -> None:
    records = settled(tmp_path, {"ash": (1, 2), "birch": (0, 2), "cedar": (0, 1)})
    assert not any(record["deployment"]["contrary"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_one_round_makes_a_site_contrary_only_where_it_is_everyones_first(tmp_path: Path, late: bool) -> None:
    """Later, an honest newcomer may go another way than those that have settled."""
    federation = holding(eight(tmp_path), dict.fromkeys(EIGHT, (0, 1, 2, 3)))
    records = run(federation, scaled(-1), away=("birch",) if late else (), after={1: lambda grid: grid.offline.clear()})
    found = [list(record["deployment"]["contrary"]) for record in records]
    assert found[:3] == ([[], [], ["birch"]] if late else [["birch"]] * 3)


@pytest.mark.slow
def test_who_was_contrary_is_kept_over_a_restart(tmp_path: Path, flipped: Any) -> None:
    (whole, one), cut = flipped, eight(tmp_path)
    run(cut, scaled(-1), stop=2)
    other = run(cut, scaled(-1))
    assert one[-1]["deployment"]["contrary"] == other[-1]["deployment"]["contrary"] != {}
    states = [load_file(part.run_folder / "checkpoint" / "state.safetensors") for part in (whole, cut)]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("away", [(), ("cedar",)], ids=["three", "two"])
def test_an_honest_site_with_other_classes_may_join_late(tmp_path: Path, away: tuple[str, ...]) -> None:
    """The others hardly move any more, and the newcomer goes as far as all did in the first round."""
    federation = federate(tmp_path, tree("fedavg", rounds=8, lr=0.2, epochs=5), evaluation="none", start_timeout=0.01)
    (tmp_path / "cedar" / "own.npz").write_bytes((tmp_path / "birch" / "own.npz").read_bytes())
    newcomer = federation.node("ash")
    record = federation.play(away=("ash", *away), after={7: lambda grid: grid.offline.discard(newcomer)})[-1]
    assert record["deployment"]["out_of_line"] == {}
    assert 0 in record["answered"]


@pytest.mark.slow
def test_what_was_accepted_is_kept_over_a_restart(tmp_path: Path) -> None:
    whole, cut = (federate(tmp_path / name, tree("fedavg"), evaluation="none") for name in ("whole", "cut"))
    one = run(whole, scaled(30), 3)

    cut.play(stop=2)
    other = run(cut, scaled(30), 3)
    for record in (one[2], other[2]):
        del record["deployment"]["began"], record["deployment"]["ended"]
    assert one[2]["deployment"] == other[2]["deployment"]
    assert one[2]["deployment"]["out_of_line"]
    states = [load_file(part.run_folder / "checkpoint" / "state.safetensors") for part in (whole, cut)]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value", "word", "away"),
    [
        ("2.running_var", -1.0, "refused", ("ash", "cedar")),
        ("2.running_var", 1e8, "out_of_line", ()),
        ("2.running_mean", 1e4, "out_of_line", ("ash", "cedar")),
        ("2.running_mean", -1e4, "out_of_line", ()),
    ],
)
def test_running_statistics_are_checked(
    tmp_path: Path, name: str, value: float, word: str, away: tuple[str, ...]
) -> None:
    def one_channel(old: Any) -> Any:
        return np.where(np.arange(old.size) == 3, value, old)

    (record,) = played(
        tmp_path, "fedavg", with_array(name, one_channel), away=away, model="test_bad_sites:normed", rounds=1
    )
    assert list(record["deployment"][word]) == ["birch"]
    assert 1 not in record["answered"]


@pytest.mark.slow
def test_scaffolds_change_must_be_what_the_update_makes_it(tmp_path: Path) -> None:
    lie = with_array("scaffold.change", lambda old: -old, "reply")
    records = played(tmp_path / "lie", "scaffold", lie, rounds=2)
    assert [list(record["deployment"]["refused"]) for record in records] == [["birch"], ["birch"]]
    assert "control variate" in records[0]["deployment"]["refused"]["birch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "fednova",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("scaffold", "afl", "moon")),
        *(pytest.param(name, marks=pytest.mark.whole_product) for name in ("fedvls", "fedgf")),
    ],
)
def test_honest_sites_are_not_suspected(tmp_path: Path, method: str) -> None:
    records = played(tmp_path, method, None, rounds=2, epochs=2, momentum=0.9)
    assert not any(record["deployment"].get(kind) for record in records for kind in NOTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "lr"),
    # At 0.05 FPL is where training diverges on one processor and not on the next.
    [("fpl", "mlp3", 0.02), ("fedavg", "test_bad_sites:normed", 0.05)],
)
def test_an_honest_pair_is_not_suspected(tmp_path: Path, method: str, model: str, lr: float) -> None:
    """FPL's numbers of samples are larger than any mean, and small batches move running variances a hundredfold."""
    if method == "fpl":
        pytest.importorskip("finch")
    training = {"rounds": 2, "epochs": 2, "lr": lr, "momentum": 0.9, "batch_size": 4}
    records = played(tmp_path, method, None, away=("ash",), model=model, **training)
    assert [record["deployment"]["out_of_line"] for record in records] == [{}] * 2


@pytest.mark.slow
def test_afls_loss_is_bounded(tmp_path: Path) -> None:
    lie = with_array("afl.loss", lambda old: 1000.0, "reply")
    for away in ((), ("ash",)):
        records = played(tmp_path / f"without-{len(away)}", "afl", lie, away=away, rounds=1)
        for record in records:
            assert list(record["deployment"]["out_of_line"]) == ["birch"]
            assert 1 not in record["answered"]


@pytest.mark.slow
def test_fpls_means_and_numbers_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("finch")
    for place, (lie, word) in enumerate(
        [
            (with_array("fpl.means", lambda old: old * 1e6, "reply"), "out_of_line"),
            (with_array("fpl.counts", lambda old: old + 1e6, "reply"), "refused"),
            (with_array("fpl.means", lambda old: old + 0.01, "reply"), "refused"),
        ]
    ):
        (record,) = played(tmp_path / str(place), "fpl", lie, rounds=1)
        assert list(record["deployment"][word]) == ["birch"]
        assert 1 not in record["answered"]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "smallest"), [(1, 1), (4, 1), (3, 32)])
def test_steps_are_what_counts_epochs_and_batches_make_them(tmp_path: Path, steps: int, smallest: int) -> None:
    """90 samples in batches of 32: three steps, or two where a last batch of fewer than 32 is left out."""
    method = {"preset": "fednova"}
    (record,) = played(tmp_path, method, figures(fedskew_steps=steps), rounds=1, smallest_batch=smallest)
    expected = 3 if smallest == 1 else 2
    assert f"its steps are {steps}; expected {expected}" in record["deployment"]["refused"]["birch"]
    assert 1 not in record["answered"]


@pytest.mark.slow
def test_steps_may_differ_by_the_noise_of_noisy_counts(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    (record,) = played(tmp_path, "fedavg", None, rounds=1, agreed={"label_counts": "noisy", "epsilon": 0.5})
    assert not any(record["deployment"].get(kind) for kind in NOTED)


def test_a_site_that_took_no_step_sends_back_what_it_was_sent(tmp_path: Path) -> None:
    """With noisy counts a site may truly have no sample; what took no step has no length to compare."""
    pytest.importorskip("opendp")

    def lie(question: Message, answer: Message) -> None:
        scaled(1e6)(question, answer)
        answer.content["metrics"]["fedskew-steps"] = 0

    noisy = {"label_counts": "noisy", "epsilon": 0.5}
    (record,) = played(tmp_path, "fedavg", lie, rounds=1, agreed=noisy)
    assert "took no step" in record["deployment"]["refused"]["birch"]


def single(own: dict[str, Any]) -> dict[str, Any]:
    return {"x": own["x"][:1], "y": own["y"][:1]}


@pytest.mark.parametrize("name", ["2.running_mean", "2.running_var", None], ids=str)
def test_statistics_without_a_step_are_those_that_were_sent(tmp_path: Path, name: str | None) -> None:
    """A site that says a single sample, of which batch norm makes no batch, truly takes no step."""
    federation = federate(
        tmp_path,
        tree("fedavg", rounds=1, smallest_batch=2) | {"model": {"name": "test_bad_sites:normed"}},
        evaluation="none",
    )
    federation.change_samples("birch", single)
    (record,) = run(federation, with_array(name, lambda old: old + 1e30) if name else None)
    assert ["took no step" in reason for reason in record["deployment"]["refused"].values()] == [True] * bool(name)
    assert sorted(record["answered"]) == ([0, 2] if name else [0, 1, 2])


def test_what_comes_beside_the_model_is_compared_without_a_step(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("afl", rounds=1, smallest_batch=2), evaluation="none")
    federation.change_samples("birch", single)
    (record,) = run(federation, with_array("afl.loss", lambda old: 1000.0, "reply"))
    assert list(record["deployment"]["out_of_line"]) == ["birch"]
    assert 1 not in record["answered"]


@pytest.mark.slow
def test_counts_that_the_test_samples_do_not_bear_out_are_said(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    federation.change_samples("birch", lambda own: {"x_test": own["x"], "y_test": own["y"]})  # classes 3, 4 and 5
    run(federation, None)
    said = [entry.getMessage() for entry in caplog.records if "other labels" in entry.getMessage()]
    assert [line.split(":")[0] for line in said] == ["ash", "cedar"]  # whose test samples are of all classes, once each
