"""The book of label counts: noise is drawn once, and what is released is added up."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common import largest_file
from fedskew.deploy import Book
from fedskew.deploy.terms import Budget, CountsRequest, NotAgreedError, converted
from fedskew.errors import RunError

CLASSES = ("cat", "dog", "owl")
COUNTS = np.array([40.0, 3.0, 0.0])
ONE = Budget(epsilon=2.0, total=2.0, neighbours="add-remove", data="monday")


@pytest.fixture(autouse=True)
def secure() -> None:
    pytest.importorskip("opendp")


def noisy(epsilon: float = 1.0, classes: tuple[str, ...] = CLASSES, neighbours: str = "add-remove") -> CountsRequest:
    return CountsRequest("noisy", classes, epsilon, neighbours)  # type: ignore[arg-type]


def numbers(book: Book, request: CountsRequest, counts: np.ndarray, budget: Budget = ONE) -> list[float]:  # type: ignore[type-arg]
    return book.release(request, counts, budget).values(request.classes)


def asked(book: Book, *more: object, budget: Budget = ONE, counts: np.ndarray = COUNTS) -> list[float]:  # type: ignore[type-arg]
    return numbers(book, noisy(*more), counts, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [ONE, ONE._replace(total=1e9)], ids=["one", "plenty"])
def test_epsilons_that_alternate_give_one_release(tmp_path: Path, budget: Budget) -> None:
    book = Book(tmp_path / "state")
    answers = {tuple(asked(book, 1 + 1e-9 * (turn % 2), budget=budget)) for turn in range(400)}
    assert len(answers) == 1
    (release,) = book.releases
    assert (release.epsilon, release.neighbours, release.exact) == (1.0, "add-remove", [40, 3, 0])


def test_queries_at_the_same_time_give_one_release(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:  # Flower handles each message in a process of its own
        answers = list(pool.map(lambda turn: tuple(asked(Book(tmp_path / "state"), 1 + 1e-9 * turn)), range(16)))
    assert len(set(answers)) == 1
    assert len(Book(tmp_path / "state").releases) == 1


def test_orders_parts_and_neighbours_are_answered_from_the_release(tmp_path: Path) -> None:
    book = Book(tmp_path)
    cat, dog, owl = asked(book)
    assert asked(book, 1.0, ("owl", "cat", "dog"), counts=COUNTS[[2, 0, 1]]) == [owl, cat, dog]
    assert asked(book, 1.0, ("dog", "cat"), counts=COUNTS[[1, 0]]) == [dog, cat]
    assert asked(book, 0.1, CLASSES, "replace") == [cat, dog, owl]
    assert len(book.releases) == 1


def test_a_release_is_on_the_disk_and_its_owners_alone(tmp_path: Path) -> None:
    first = asked(Book(tmp_path / "state"))
    assert stat.S_IMODE((tmp_path / "state" / "book.db").stat().st_mode) == 0o600
    assert asked(Book(tmp_path / "state")) == first


def test_nothing_is_sent_that_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="can't be written"):
        asked(Book(tmp_path / "state"))


def test_data_that_changed_are_released_again_if_the_site_says_so_and_within_the_total(tmp_path: Path) -> None:
    book = Book(tmp_path)
    first, grown = asked(book), COUNTS + 1000
    assert asked(book, counts=grown) == first  # nobody has said so
    second = asked(book, counts=grown, budget=ONE._replace(data="tuesday"))
    assert second[0] > 900
    assert book.releases.spent("add-remove") == 2.0
    assert asked(book, counts=grown + 1000, budget=ONE._replace(data="wednesday")) == second  # the total is spent
    more = ONE._replace(data="wednesday", total=3.0)
    assert asked(book, counts=grown + 1000, budget=more)[0] > 1900
    assert book.releases.spent("add-remove") == 3.0


def test_classes_that_no_release_covers_cost_another(tmp_path: Path) -> None:
    book = Book(tmp_path)
    asked(book)
    four, counts = (*CLASSES, "ape"), np.array([40.0, 3.0, 0.0, 0.0])
    with pytest.raises(
        NotAgreedError, match=r"agreed to 2 in one release and 1\.5 in all \(add-remove\), and has spent 1$"
    ):
        asked(book, 1.0, four, counts=counts, budget=ONE._replace(total=1.5))
    asked(book, 1.0, four, counts=counts)
    assert book.releases.spent("add-remove") == 2.0
    with pytest.raises(NotAgreedError):
        asked(book, 1.0, (*four, "bee"), counts=np.append(counts, 0))


def test_a_release_with_less_noise_than_agreed_is_refused(tmp_path: Path) -> None:
    book = Book(tmp_path)
    with pytest.raises(NotAgreedError, match=r"a release with 2\.5"):
        asked(book, 2.5)
    with pytest.raises(NotAgreedError, match="a release with 2;"):  # 4 for replaced samples is 2 for added ones
        asked(book, 4.0, CLASSES, "replace", budget=ONE._replace(epsilon=1.9))
    assert book.releases == ()


def test_epsilons_convert_as_laplace_noise_does() -> None:
    # Scale 1 / epsilon under add-remove; a replaced sample changes two counts by one each.
    assert converted(0.5, "add-remove", "replace") == 1.0
    # Scale 2 / epsilon under replace; an added sample changes one count by one.
    assert converted(0.5, "replace", "add-remove") == 0.25
    assert converted(0.5, "replace", "replace") == 0.5


def test_the_sum_is_in_the_units_that_were_asked_for(tmp_path: Path) -> None:
    book, plenty = Book(tmp_path), ONE._replace(total=10.0)
    for place, (epsilon, neighbours) in enumerate(((0.1, "add-remove"), (0.2, "add-remove"), (0.6, "replace"))):
        asked(book, epsilon, CLASSES, neighbours, budget=plenty._replace(data=str(place)))
    assert book.releases.spent("add-remove") == pytest.approx(0.6)
    assert book.releases.spent("replace") == pytest.approx(1.2)


def test_a_total_is_reached_in_spite_of_rounding(tmp_path: Path) -> None:
    book, three = Book(tmp_path), Budget(0.1, 0.3, "add-remove")
    for place in range(4):
        asked(book, 0.1, budget=three._replace(data=str(place)))
    assert len(book.releases) == 3  # 0.1 + 0.1 + 0.1 > 0.3 in floating point


def test_exact_counts_are_written_down_as_often_as_they_change(tmp_path: Path) -> None:
    book, exact = Book(tmp_path), CountsRequest("exact", CLASSES)
    for _ in range(3):
        assert numbers(book, exact, COUNTS) == [40, 3, 0]
    assert numbers(book, CountsRequest("exact", CLASSES[::-1]), COUNTS[::-1]) == [0, 3, 40]
    assert numbers(book, exact, COUNTS + 1) == [41, 4, 1]
    assert numbers(book, CountsRequest("withheld", CLASSES), COUNTS) == [43]
    assert [(entry.label_counts, entry.epsilon) for entry in book.releases] == [
        ("exact", None),
        ("exact", None),
        ("withheld", None),
    ]


@pytest.mark.parametrize("length", [0, 2, 5000])
def test_a_damaged_book_releases_nothing(tmp_path: Path, length: int) -> None:
    book = Book(tmp_path)
    asked(book)
    book.path.write_bytes(book.path.read_bytes()[:length])
    with pytest.raises(RunError, match=r"book\.db: can't be read .*restore it"):
        asked(book)


def test_a_book_that_has_no_room_is_one_line(tmp_path: Path) -> None:
    with largest_file(8192), pytest.raises(RunError, match=r"book\.db: can't be"):
        asked(Book(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
    assert asked(Book(tmp_path / "state"))
