"""Tables by a schema: columns by name, encoders equal to scikit-learn's, what is refused and where, the proposal."""

import datetime
import tomllib
import warnings

import numpy as np
import pytest
import torch
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from common import refused, rng, table
from fedskew import data
from fedskew.data import Proposal, TableSchema, encoder_of
from fedskew.errors import ArgumentError, ConfigError, DataError, DataWarning

SCHEMA = {
    "columns": {
        "sex": {"kind": "category", "categories": ["f", "m"]},
        "age": {"kind": "number", "missing": True, "range": [0, 120], "unit": "years"},
        "diagnosis": {"kind": "label"},
        "dose": {"kind": "number"},
        "row": {"kind": "ignored"},
    }
}
TABLE = "row,sex,age,dose,diagnosis\n1,f,30,1.5,ill\n2,m,,2.5,well\n3,,50,0.5,ill\n4,m,70,1,well\n"


def load(path, schema=SCHEMA, **options):
    return data.load("csv", path, schema=schema, rng=rng(), **options)


def test_inputs_by_hand(tmp_path):
    """Numbers in the schema's order, whether age is missing, sex = f, m, another or missing."""
    schema = TableSchema.of_plain(SCHEMA)
    names, values = schema.read(table(tmp_path / "t.csv", TABLE))
    assert [name.rpartition("/")[2] for name in names] == ["t.csv:2", "t.csv:3", "t.csv:4", "t.csv:5"]
    expected = [[30, 1.5, 0, 1, 0, 0], [np.nan, 2.5, 1, 0, 1, 0], [50, 0.5, 0, 0, 0, 1], [70, 1, 0, 0, 1, 0]]
    np.testing.assert_array_equal(values, expected)
    assert [slot.name for slot in schema.slots] == [
        "age", "dose", "age is missing", "sex = f", "sex = m", "sex = another"
    ]  # fmt: skip


def test_encoders_are_those_of_scikit_learn(tmp_path):
    """On pooled data: StandardScaler, then the mean in place of what is missing, its indicator, one-hot categories."""
    draws, size = rng(), 300
    numbers = draws.normal([50, 3, 1e4], [20, 0.5, 1e3], (size, 3)).round(3)
    numbers[draws.random((size, 3)) < [0.2, 0, 0.05]] = np.nan
    kinds = np.array(["a", "b", "c d", "è"])[draws.integers(4, size=size)]
    labels = draws.integers(2, size=size)
    lines = ["x,y,z,kind,label"] + [
        ",".join([*("" if value != value else repr(value) for value in row), kind, str(label)])
        for row, kind, label in zip(numbers.tolist(), kinds, labels, strict=True)
    ]
    path = table(tmp_path / "t.csv", "\n".join(lines))
    columns = {name: {"kind": "number", "missing": name != "y"} for name in "xyz"}
    columns |= {"kind": {"kind": "category", "categories": ["a", "b", "c d", "è"]}, "label": {"kind": "label"}}
    made = load(path, {"columns": columns}, test="t.csv")
    scaled = SimpleImputer(strategy="constant", fill_value=0.0).fit_transform(StandardScaler().fit_transform(numbers))
    expected = np.hstack([
        scaled,
        MissingIndicator(features="missing-only").fit_transform(numbers),
        OneHotEncoder(sparse_output=False).fit_transform(kinds[:, None]),
        np.zeros((size, 1)),
    ])  # fmt: skip
    np.testing.assert_allclose(made.inputs, expected, atol=1e-6)
    np.testing.assert_allclose(made.test_inputs, expected, atol=1e-6)
    scaler = StandardScaler().fit(numbers)
    np.testing.assert_allclose(made.mean, [*scaler.mean_, *[0.0] * 7], rtol=1e-12)
    np.testing.assert_allclose(made.std, [*scaler.scale_, *[1.0] * 7], rtol=1e-12)


@pytest.mark.parametrize("schema", [SCHEMA, None])
def test_columns_in_another_order_make_the_same_data(schema, tmp_path):
    """Today a site with shuffled columns trains, and ruins the model."""
    text = TABLE if schema else "a,b,label\n1,2,x\n3,5,y\n7,7,x\n9,1,y\n"
    rows = [line.split(",") for line in text.splitlines()]
    order = np.random.default_rng(3).permutation(len(rows[0]))
    shuffled = "\n".join(",".join(row[column] for column in order) for row in rows)
    straight = table(tmp_path / "straight.csv", text)
    table(tmp_path / "shuffled.csv", shuffled)
    made = data.load("csv", straight, test="shuffled.csv", **({"schema": schema} if schema else {}))
    assert torch.equal(made.inputs, made.test_inputs)


MISTAKES = [
    ("row,sex,dose,diagnosis\n1,f,2,ill\n", "line 1: no column 'age', which the schema has"),
    ("row,sex,Age,dose,diagnosis\n1,f,2,1,ill\n", "no column 'age', which the schema has (did you mean 'Age'?)"),
    ("row,diagnosis\n1,ill\n", "no column 'age', which the schema has; neither 'dose', 'sex'"),
    ("row,sex,age,dose,bmi,diagnosis\n1,f,2,1,20,ill\n", "line 1: the schema has no column 'bmi'; leave it out"),
    ("sex,age,dose\nf,2,1\n", "line 1: no column 'diagnosis' of labels"),
    ("sex,age,dose,diagnosis\nf,2,1,ill\nf,old,1,ill\n", "line 3, column 'age': 'old' is not a number"),
    ("sex,age,dose,diagnosis\nf,2,,ill\n", "line 2, column 'dose': empty, and no cell of this column may be missing"),
    ("sex,age,dose,diagnosis\nf,2,NA,ill\n", "line 2, column 'dose': 'NA' counts as missing, and no cell of this"),
    ("sex,age,dose,diagnosis\nf,2,inf,ill\n", "line 2, column 'dose': inf is not a finite number"),
    ("sex,age,dose,diagnosis\nf,30,1,ill\nf,310,1,ill\n",
     "line 3, column 'age': 310 is outside the schema's range, 0 to 120 years (1 of the column are)"),
    ("sex,age,dose,diagnosis\n" + "1,2,1,ill\n" * 10,
     "column 'sex': not one of its 10 cells is of a category of the schema: '1'; the schema has 'f', 'm'"),
    ("sex;age;dose;diagnosis\nf;2;1.234,5;ill\nf;2;1,234.5;ill\n", "writes decimals in two ways"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_table_that_does_not_fit_the_schema_is_refused_by_name(text, message, tmp_path):
    with refused(DataError, message, "t.csv"):
        load(table(tmp_path / "t.csv", text))


def test_a_category_that_nobody_knows_is_another_one_and_said(tmp_path):
    path = table(tmp_path / "t.csv", "sex,age,dose,diagnosis\nf,2,1,ill\nx,2,1,ill\nm,2,1,well\n")
    with pytest.warns(DataWarning, match=r"column 'sex': 1 cell is of no category of the schema, .* another one: 'x'"):
        _, values = TableSchema.of_plain(SCHEMA).read(path)
    assert values[:, -3:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_whole_numbers_written_as_floats_are_the_categories_that_they_are(tmp_path):
    columns = {"code": {"kind": "category", "categories": ["1", "2"], "missing": True},
               "label": {"kind": "label", "categories": ["0", "1"]}}  # fmt: skip
    schema = TableSchema.of_plain({"columns": columns})
    path = table(tmp_path / "t.csv", "code,label\n1.0,0.0\n,1\n2,1.00\n")
    assert schema.read(path)[1].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert schema.labels(path) == ["0", "1", "1"]
    with pytest.raises(DataError, match="line 3, column 'label': 'NaN' is no class"):
        schema.labels(table(path, "code,label\n1,0\n2,NaN\n"))


def test_numbers_with_decimal_commas_and_in_another_encoding(tmp_path):
    schema = TableSchema.of_plain(SCHEMA)
    path = tmp_path / "t.csv"
    path.write_bytes("sex;age;dose;diagnosis\nf;30;1.234,5;ill\nm;n/a;0,5;ill\n".encode("utf-16"))
    assert schema.read(path)[1][:, :2].tolist()[0] == [30, 1234.5]
    assert schema.read(path)[1][1, 1] == 0.5
    table(path, "sex;age;dose;diagnosis\nf;30;1,234;ill\n")
    with pytest.raises(DataError, match="'1,234' may be 1234 or 1.234"):
        schema.read(path)
    assert load(path, test="t.csv", decimal=",").mean[1] == 1.234


def test_labels_and_clients_that_look_like_numbers_show_no_decimal_sign(tmp_path):
    path = table(tmp_path / "t.csv", "age;ward;grade\n" + "".join(f"{age},5;1.5;{age % 3}.0\n" for age in range(9, 50)))
    with pytest.warns(DataWarning, match="are taken for whole numbers"):
        proposal = Proposal.of_files([path], "grade", "ward")
    assert "t.csv: its decimal sign is a comma" in "".join(proposal.unclear)
    assert proposal.schema.columns["age"].range == (0.0, 90.0)


def test_dates_are_days(tmp_path):
    columns = {"seen": {"kind": "date", "missing": True}, "label": {"kind": "label"}}
    path = table(tmp_path / "t.csv", "seen,label\n1970-01-02,a\n,a\n2026-11-26T12:00,b\n")
    values = TableSchema.of_plain({"columns": columns}).read(path)[1]
    days = (datetime.date(2026, 11, 26) - datetime.date(1970, 1, 1)).days
    np.testing.assert_array_equal(values, [[1, 0], [np.nan, 1], [days + 0.5, 0]])
    with pytest.raises(DataError, match="line 2, column 'seen': '3.4.2026' is no date such as 2024-12-31"):
        load(table(path, "seen,label\n3.4.2026,a\n"), {"columns": columns})


def test_one_file_per_site(tmp_path):
    """A pattern or a folder; each client is called as its file, and the test part is none of them."""
    sites = tmp_path / "sites"
    sites.mkdir()
    header = "sex,age,dose,diagnosis\n"
    table(sites / "north.csv", header + "f,1,1,ill\nm,2,1,well\n")
    table(sites / "south.csv", "dose,age,sex,diagnosis\n1,3,m,ill\n")
    table(sites / "test.csv", header + "f,4,1,ill\n")
    table(sites / "notes.md", "not a table")
    for root in (sites, sites / "*.csv"):
        made = load(root, test="test.csv")
        assert made.client_names == ("north", "south")
        assert made.clients.tolist() == [0, 0, 1]
        assert made.mean[0] == 2.0
    with pytest.raises(DataError, match=r"\*.tsv: there is no CSV or Parquet file"):
        load(sites / "*.tsv")


def test_parquet_and_frames_hold_what_csv_holds(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    schema = TableSchema.of_plain(SCHEMA)
    path = table(tmp_path / "t.csv", TABLE)
    frame = pandas.read_csv(path)  # ages are floats there, as one is missing
    frame.to_parquet(tmp_path / "t.parquet")
    rows = frame.to_dict("records")
    expected = schema.read(path)[1]
    for values in (schema.read(tmp_path / "t.parquet")[1], schema.encode(frame), schema.encode(rows)):
        np.testing.assert_array_equal(values, expected)
    assert load(tmp_path / "t.parquet", test="t.csv").classes == ("ill", "well")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="t.parquet: can't be read as Parquet"):
        load(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="rows, row 2, column 'dose': empty, and no cell"):
        schema.encode([{"sex": "f", "age": 1, "dose": 1}, {"sex": "f", "age": 1}])
    with pytest.raises(ArgumentError, match="rows: expected one dict a row"):
        schema.encode([])


def test_a_schema_survives_its_plain_values_and_toml(tmp_path):
    odd = {"columns": {**SCHEMA["columns"], 'a "quoted".name\t': {"kind": "ignored"}, "": {"kind": "ignored"}},
           "missing": ["", "-999"]}  # fmt: skip
    schema = TableSchema.of_plain(odd)
    assert encoder_of(schema.plain()) == schema
    assert TableSchema.read_toml(table(tmp_path / "schema.toml", schema.toml())) == schema
    assert list(tomllib.loads(schema.toml())["columns"]) == list(odd["columns"])


BAD_SCHEMAS = [
    ({"a": {"kind": "numeric"}}, "columns.a.kind: input should be 'number'"),
    ({"a": {"kind": "number", "unitt": "x"}}, "columns.a.unitt: no such parameter"),
    ({"a": {"kind": "category"}}, "categories: missing; list those of the column"),
    ({"a": {"kind": "category", "categories": ["x", "x"]}}, "categories: names one twice"),
    ({"a": {"kind": "number", "range": [2, 1]}}, "range: is [least, greatest] of a number"),
    ({"a": {"kind": "label"}}, "columns: none is a number, category or date"),
    (
        {"a": {"kind": "number"}, "b": {"kind": "label", "categories": ["x"]}, "c": {"kind": "label"}},
        "columns.b.categories: of several columns of labels each holds 0 and 1",
    ),
    ({"a": {"kind": "number"}, "b": {"kind": "client"}, "c": {"kind": "client"}}, "is the column of clients already"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_SCHEMAS)
def test_a_schema_with_a_mistake_is_refused_by_its_key(columns, message, tmp_path):
    with refused(ArgumentError, message):
        TableSchema.of_plain({"columns": columns})
    path = table(tmp_path / "s.toml", "missing = 3\n[columns]\na = {kind = 'number'}\n")
    with pytest.raises(ConfigError, match=r"s.toml: missing: "):
        TableSchema.read_toml(path)


# ---- the proposal


def messy(tmp_path):
    rows = range(40)
    north = [
        f"{row},P{row:04},{row % 50 + 20.5},{'fm'[row % 2]},{row % 4},2024-01-{row % 28 + 1:02},x,"
        f"{'NA' if row % 5 == 0 else row * 10},{row % 3}\n"
        for row in rows
    ]
    south = [
        f"{row},Q{row:04},{str(row % 50 + 20.25).replace('.', ',')};".replace(",", ";", 2).rstrip(";")
        + f";{'MF'[row % 2]};{row % 4};2024-02-01;x;-999;{row % 3}\n"
        for row in rows
    ]
    sites = tmp_path / "sites"
    sites.mkdir()
    table(sites / "north.csv", ",patient,age,sex,grade,seen,unit,lab,diagnosis\n" + "".join(north))
    table(sites / "south.csv", ";patient;age;sex;grade;seen;unit;lab;diagnosis\n" + "".join(south))
    return sites


def test_the_proposal_says_what_is_unclear(tmp_path):
    proposal = Proposal.of_files([messy(tmp_path)])
    kinds = {name: column.kind for name, column in proposal.schema.columns.items()}
    assert kinds == {
        "": "ignored", "patient": "ignored", "age": "number", "sex": "category", "grade": "number",
        "seen": "ignored", "unit": "ignored", "lab": "number", "diagnosis": "label",
    }  # fmt: skip
    said = "\n".join(proposal.unclear)
    for part in (
        "south.csv: its decimal sign is a comma",
        "'': a column without a name",
        "'patient': 80 different texts in as many rows",
        "'sex': 'F', 'M', 'f', 'm' are different categories",
        "'grade': 4 whole numbers, taken as amounts; if they are codes: kind = \"category\"",
        "'seen': dates, ignored",
        "'unit': is 'x' in every row",
        "'lab': 8 cells count as missing ('NA' 8)",
        "'lab': -999 may stand for a missing value",
    ):
        assert part in said
    assert proposal.schema.columns["diagnosis"].categories == ("0", "1", "2")
    assert proposal.schema.columns["lab"].missing
    assert proposal.schema.columns["age"].range == (0.0, 100.0)


def test_the_proposed_schema_reads_its_files(tmp_path):
    sites = messy(tmp_path)
    schema = tomllib.loads(Proposal.of_files([sites]).text())
    made = load(sites, schema)
    assert made.in_shape == (3 + 1 + 5,)
    assert made.client_names == ("north", "south")
    for text, message in (
        ("a,b\n1.5,2.5\n2.5,3\n", "no column is called label"),
        ("a,label\n1,x\n2,y\n3,y\n", "columns: none is a number.*'a': counts the rows from 1"),
    ):
        path = table(tmp_path / "t.csv", text)
        if "label" in text:
            with pytest.raises(DataError, match=message):
                Proposal.of_files([path])
        else:
            assert message in Proposal.of_files([path]).unclear[0]
    with pytest.raises(DataError, match=r"no column 'lable' of labels \(did you mean 'label'"):
        Proposal.of_files([path], label="lable")


def test_columns_of_two_kinds_or_in_one_file_only_are_said(tmp_path):
    table(tmp_path / "a.csv", "x,y,label\n1,2,a\n5,2.5,b\n")
    table(tmp_path / "b.csv", "x,label\nlow,a\nhigh,b\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposal = Proposal.of_files([tmp_path / "*.csv"])
    said = "\n".join(proposal.unclear)
    assert "'x': holds numbers and texts: text in " in said
    assert "'y': is in 1 of 2 files only" in said
    assert proposal.schema.columns["x"].categories == ("1", "5", "high", "low")
