"""Label counts and targets as files: both forms, round trips, and one line for every way to get a file wrong."""

import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError, DataWarning
from fedskew.labels import LabelCounts, read_target

MALFORMED = tomllib.loads(Path(__file__).with_name("malformed.toml").read_text(encoding="utf-8"))


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "counts.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


READ = {
    # text: clients, classes, counts
    'client,cat,"dog, small"\nParis,3,0\n"Rome",2.5,1\n': ("Paris Rome", ("cat", "dog, small"), [[3, 0], [2.5, 1]]),
    "class,client,count\ndog,b,4\ncat,a,1\ndog,a,2\n": ("b a", ("dog", "cat"), [[4, 0], [2, 1]]),
    "client,class,count\na,10,1\na,2,5\nb,0,7\n": ("a b", ("0", "2", "10"), [[0, 5, 1], [7, 0, 0]]),
    **dict.fromkeys(
        (
            "\ufeffclient,x,y\na,1,2\n",
            "client,x,y\r\na,1,2\r\n",
            "\nclient , x,y\n\n a,1 , 2\n,,\n",
            "x,client,y\n1,a,2\n",
            "client,x,y\na,1e0,2.0",
        ),
        ("a", ("x", "y"), [[1, 2]]),
    ),
}


@pytest.mark.parametrize("text", READ)
def test_both_forms_are_read_as_programs_and_spreadsheets_write_them(tmp_path: Path, text: str) -> None:
    record = LabelCounts.read_csv(written(tmp_path, text))
    clients, classes, counts = READ[text]
    assert (record.clients, record.classes) == (tuple(clients.split()), classes)
    assert record.counts.tolist() == counts


@pytest.mark.parametrize(
    "text",
    [
        "client;x;y\na;1500;2,5\n",
        "client\tx\ty\na\t1500\t2.5\n",
        "client|x|y\na|1500|2.5\n",
        "sep=;\nclient;x;y\na;1500;2,5\n",
        "client\tx\ty\na\t1 500\t2,5\n".encode("utf-16"),
        'client,x,y\na,"1,500",2.5\n',
        'client,x,y\na,"1.500","2,5"\n',
        "client;x;y\na;1.500;2,5\n",
        "client;x;y\na;1'500;2.5\n",
        "client;x;y\na;1\u202f500;2,5\n",
        "client;x;y\na;1500,0;2,50\n",
        "client;x;y;;\na;1500;2,5\n;;;;\n",
        "client;x;y\na;1500;2,5;\n",
        "Client,x,y\na,1500,2.5\n",
        "client;label;n\na;x;1500\na;y;2,5\n",
        "client,Diagnosis,Anzahl\na,x,1500\na,y,2.5\n",
        "client;class;count\na;y;2,5\na;x;1.500\na;z;0\n",
    ],
)
def test_a_spreadsheets_ways_are_understood(tmp_path: Path, text: str | bytes) -> None:
    record = LabelCounts.read_csv(written(tmp_path, text))
    held = dict(zip(record.classes, record.counts[0].tolist(), strict=True))
    assert record.clients == ("a",)
    assert (held["x"], held["y"]) == (1500, 2.5)


@pytest.mark.parametrize(
    ("text", "message", "answers", "first_row"),
    [
        (
            'client,x,y\na,"1,234",2\nb,3,4\n',
            "line 2, column 'x': '1,234' may be 1234 or 1.234, and no other number of the file tells; say by decimal",
            {"decimal": "."},
            [1234, 2],
        ),
        ("client;x;y\na;1.234;2\n", "line 2, column 'x': '1.234' may be 1.234 or 1234", {"decimal": ","}, [1234, 2]),
        ("client,x,y\na,1.234,2\n", "'1.234' may be 1.234 or 1234", {"decimal": "."}, [1.234, 2]),
        ("ort,art,x\na,b,1\n", "no column 'client' in the header: say by client", {"client": "ort"}, None),
        ("id,x,y\n1,2,3\n", "no column 'client' in the header: say by client", {"client": "id"}, [2, 3]),
        ("|flu, mild\na|0,21\n", "columns may be apart by ',' or '|'", {"client": "x"}, False),
        ("site,hospital,x\n1,a,3\n", "several columns may be the client (site, hospital)", {"client": "site"}, None),
        (
            "client,x,y,total\na,1,2,3\nb,1,1,9\n",
            "the column 'total' is called a total and is not the sum of the others (9 where they have 2); say by",
            {"totals": "drop"},
            [1, 2],
        ),
        (
            "client,x,y\na,1,2\nGesamt,5,2\n",
            "the row 'Gesamt' is called a total and is not the sum of the others (5 where they have 1)",
            {"totals": "keep"},
            [1, 2],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::fedskew.errors.DataWarning")
def test_what_may_mean_two_things_is_asked_about(
    tmp_path: Path, text: str, message: str, answers: dict[str, str], first_row: list[float] | bool | None
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ArgumentError) as caught:
        LabelCounts.read_csv(path)
    assert message in str(caught.value)
    if first_row is False:
        return
    if first_row is None:  # the answer leads to the next question: what the other column of text is
        with pytest.raises(ArgumentError, match="expected a number"):
            LabelCounts.read_csv(path, **answers)
    else:
        assert LabelCounts.read_csv(path, **answers).counts[0].tolist() == first_row


def test_two_decimal_signs_in_one_file_are_refused_and_a_given_one_holds(tmp_path: Path) -> None:
    path = written(tmp_path, "client;x;y\na;1,5;2\nb;2.5;1\n")
    with pytest.raises(ArgumentError, match="decimals in two ways, 1,5 in line 2 and 2.5 in line 3"):
        LabelCounts.read_csv(path)
    with pytest.raises(ArgumentError, match="column 'x': '2.5', expected a number with the decimal sign ','"):
        LabelCounts.read_csv(path, decimal=",")


def test_totals_that_fit_are_left_out_and_said(tmp_path: Path) -> None:
    text = "Site ID,cat,mean,Total\nnorth,120,80,200\nsouth,0,40,40\nTotal:,120,120,240\n"  # with "mean"
    with pytest.warns(DataWarning) as said:
        record = LabelCounts.read_csv(written(tmp_path, text))
    assert (record.clients, record.classes) == (("north", "south"), ("cat", "mean"))
    assert record.counts.tolist() == [[120, 80], [0, 40]]
    words = [str(warning.message) for warning in said]
    assert any("clients are named by the column 'Site ID'" in text for text in words)
    assert any("the row 'Total:' is a total, and was left out" in text for text in words)
    assert any("the column 'Total' is a total, and was left out" in text for text in words)


def test_a_total_of_another_name_or_a_mean_is_named_and_counted_until_the_user_decides(tmp_path: Path) -> None:
    path = written(tmp_path, "client,x,y,z\na,10,2,1\nb,5,6,2\nall four,15,8,3\nMean,7.5,4,1.5\n")
    for totals, left, said in ((None, 4, "counted as a client; if it is none"), ("drop", 2, "left out")):
        with pytest.warns(DataWarning, match=f"the row '(all four|Mean)' .*, and was {said}") as all_said:
            assert len(LabelCounts.read_csv(path, totals=totals)) == left
        assert len(all_said) == 2
    assert len(LabelCounts.read_csv(path, totals="keep")) == 4
    assert LabelCounts.read_csv(written(tmp_path, "client,mean,avg\na,1,2\n"), totals="drop").classes == ("mean", "avg")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("client,Covid,covid", "names 'Covid' and 'covid'; they are counted as 2 classes: rename them if they are one"),
        ("client,flu A,fluA", "names 'flu A' and 'fluA'"),
        ("client,caf\u00e9,cafe\u0301", "twice, written with letters that are encoded in two ways (NFC and NFD)"),
    ],
)
def test_names_that_look_alike_are_warned_of(tmp_path: Path, header: str, message: str) -> None:
    with pytest.warns(DataWarning) as said:
        record = LabelCounts.read_csv(written(tmp_path, f"{header}\na,1,2\n"))
    assert record.counts.tolist() == [[1, 2]]
    assert message in str(said[0].message)


def test_the_only_column_of_text_names_the_clients(tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match="clients are named by the column 'Klinik'"):
        record = LabelCounts.read_csv(written(tmp_path, "cat;Klinik;dog\n1;Nord;2\n"))
    assert (record.clients, record.classes) == (("Nord",), ("cat", "dog"))
    assert LabelCounts.read_csv(written(tmp_path, ",cat,dog\nNord,1,2\n")).clients == ("Nord",)  # an index of pandas
    assert LabelCounts.read_csv(written(tmp_path, ",cat,dog\n0,1,2\n")).clients == ("0",)


def test_a_long_table_of_clients_by_number_is_not_read_by_its_classes(tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match="clients are named by the column 'Klinik'"):
        record = LabelCounts.read_csv(written(tmp_path, "Klinik|class|count\n7|flu|3\n7|cold|1\n"))
    assert (record.clients, record.classes) == (("7",), ("flu", "cold"))


@pytest.mark.parametrize("name", ["SUM", "Summe", "Total cases", "total", "Grand Total", "all", "Gesamt"])
def test_totals_have_many_names(name: str, tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match="is a total, and was left out"):
        assert LabelCounts.read_csv(written(tmp_path, f"client,x,y\na,1,2\n{name},1,2\n")).clients == ("a",)


def test_a_list_of_samples_is_pointed_to_the_command_that_counts_it(tmp_path: Path) -> None:
    for text in ("client,label\na,flu\na,cold\n", "client,label\na,1\na,2\n"):
        with pytest.raises(ArgumentError, match="if each row is one sample, count them: fedskew counts"):
            LabelCounts.read_csv(written(tmp_path, text))
    path = written(tmp_path, "id,hospital,finding\n1,a,flu\n2,a,cold\n")  # of which the command itself says so
    with pytest.raises(ArgumentError, match=rf"count them: fedskew counts {path} --label COLUMN"):
        LabelCounts.read_csv(path, client="hospital")


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), form=st.sampled_from(["wide", "long"]), named=st.booleans())
def test_what_is_written_is_read_back_exactly(tmp_path: Path, seed: int, form: str, named: bool) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (4, 3)) * rng.choice([1.0, 0.1, 1e15, 1e-7], (4, 3))
    names = (["é", "b,c", 'd"e', "f g"], ["z", "a", "class"]) if named else (None, None)
    before = LabelCounts(counts, *names)
    before.to_csv(tmp_path / "again.csv", form=form)
    after = LabelCounts.read_csv(tmp_path / "again.csv")
    assert (after.clients, after.classes) == (before.clients, before.classes)
    assert np.array_equal(after.counts, before.counts)


@pytest.mark.parametrize(
    ("row", "text"), [([3, 0.5], "3,0.5"), ([1.125, 12.5], "1.1250,12.5"), ([1.125, 120], "1.1250,120")]
)
def test_numbers_are_written_so_that_they_are_not_taken_for_thousands(tmp_path: Path, row, text) -> None:
    LabelCounts([row]).to_csv(tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_text() == f"client,0,1\n0,{text}\n"
    assert LabelCounts.read_csv(tmp_path / "c.csv").counts.tolist() == [row]


LATIN = (b"client,cat\nParis,1\nK\xf6ln,2\n", "line 3: not UTF-8 text; save the file as CSV in UTF-8")


READERS = {
    "counts": LabelCounts.read_csv,
    "target": lambda path: read_target(path, ["cat", "dog"]),
    "own": lambda path: LabelCounts.read_own(path, ["cat", "dog"]),
}


@pytest.mark.parametrize(
    ("what", "text", "message"), [("counts", *LATIN), *((what, *case) for what in READERS for case in MALFORMED[what])]
)
def test_a_malformed_file_is_one_line_that_says_where(
    tmp_path: Path, what: str, text: str | bytes, message: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        READERS[what](written(tmp_path, text))
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "counts.csv"))
    assert message in said
    assert "\n" not in said


def test_a_missing_file_and_an_unwritable_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"none\.csv: can't be read: No such file"):
        LabelCounts.read_csv(tmp_path / "none.csv")
    with pytest.raises(ArgumentError, match="can't be read: Is a directory"):
        LabelCounts.read_csv(tmp_path)
    with pytest.raises(ArgumentError, match=r"c\.csv: can't be written"):
        LabelCounts([[1]]).to_csv(tmp_path / "none" / "c.csv")
    with pytest.raises(ArgumentError, match="form: must be 'wide' or 'long', not 'tall'"):
        LabelCounts([[1]]).to_csv(tmp_path / "c.csv", form="tall")


@pytest.mark.parametrize(
    "text",
    [
        "class,share\ndog,30\ncat,10\n",
        "share,class\n3,dog\n1,cat\n",
        "dog,cat\n0.75,0.25\n",
        "Class;Share\ndog;0,75\ncat;0,25",
    ],
)
def test_a_target_is_matched_by_name_and_normalised(tmp_path: Path, text: str) -> None:
    assert read_target(written(tmp_path, text), ["cat", "dog"]).tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("text", "client"),
    [
        ("class,count\ndog,3\ncat,1\n", None),
        ("Diagnosis;Cases\ndog;3\ncat;1\n", None),
        ("dog,cat\n3,1\n", None),
        ("0,1\n1,3\n", None),  # ids
        ("client,dog,cat\nx,3,1\n", None),
        ("client,dog,cat\nx,9,9\ny,3,1\n", "y"),
        ("hospital,class,count\nx,cat,9\ny,cat,1\ny,dog,3\n", "y"),
        ("client,0,1,2\n7,9,9,0\n8,1,3,0\n", "8"),
    ],
)
def test_one_clients_counts_are_matched_by_name_and_0_where_none_is_named(tmp_path: Path, text: str, client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # that clients are named by a column "hospital"
        own = LabelCounts.read_own(written(tmp_path, text), ["cat", "dog", "owl"], client=client)
    assert own.tolist() == [1, 3, 0]


def test_one_clients_counts_say_whose_they_are(tmp_path: Path) -> None:
    several, one = written(tmp_path, "client,cat\nnorth,1\nsouth,2\n"), tmp_path / "one.csv"
    with pytest.raises(ArgumentError, match=r"has no client 'nort' \(did you mean 'north'\?\)"):
        LabelCounts.read_own(several, ["cat"], client="nort")
    one.write_text("class,count\ncat,1\n")
    with pytest.raises(ArgumentError, match="the counts of one client, without a name"):
        LabelCounts.read_own(one, ["cat"], client="north")


@pytest.mark.parametrize(("shares", "total"), [("0.4,0.4", "0.8"), ("0.9,0.2", "1.1"), ("30.5,30", "60.5")])
def test_shares_that_do_not_add_up_are_refused_with_their_sum(tmp_path: Path, shares: str, total: str) -> None:
    with pytest.raises(ArgumentError, match=rf"counts.csv: the shares sum to {total}; give shares that sum to 1"):
        read_target(written(tmp_path, f"cat,dog\n{shares}\n"), ["cat", "dog"])


@pytest.mark.parametrize("shares", ["0.3,0.7", "0.3333,0.6666", "300,700", "29.9,70.1", "3,7"])
def test_shares_percentages_and_counts_are_a_mix(tmp_path: Path, shares: str) -> None:
    assert read_target(written(tmp_path, f"cat,dog\n{shares}\n"), ["cat", "dog"]).sum() == pytest.approx(1)
