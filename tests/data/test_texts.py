"""Texts of a user's own: read, numbered by one vocabulary, and predicted by it."""

import json

import numpy as np
import pytest

import fedskew
from common import exported
from fedskew import data, experiment
from fedskew.errors import ArgumentError, DataError, DataWarning

GOOD = ["a fine day", "Fine, fine!", "a good day"]
BAD = ["rain again", "a wet day", "wet wet wet"]


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)
    return path


@pytest.fixture
def folder(tmp_path):
    for label, texts in (("good", GOOD), ("bad", BAD)):
        for number, text in enumerate(texts):
            write(tmp_path / "train" / label / f"{number}.txt", text)
        write(tmp_path / "test" / label / "0.txt", texts[0])
    return tmp_path


def test_a_folder_of_texts_becomes_ids_of_the_training_words(folder):
    made = data.load("folder", folder, length=4)
    # day, fine and wet occur... a 3, day 3, fine 3, wet 4; then ! , again good rain once: ties alphabetically
    assert made.encoder.words == ("wet", "a", "day", "fine", "!", ",", "again", "good", "rain")
    assert made.classes == ("bad", "good")
    assert made.inputs.tolist() == [[10, 8, 0, 0], [3, 2, 4, 0], [2, 2, 2, 0], [3, 5, 4, 0], [5, 7, 5, 6], [3, 9, 4, 0]]
    assert made.test_inputs.tolist() == [[10, 8, 0, 0], [3, 5, 4, 0]]
    assert made.mean == ()


def test_clients_and_a_test_part_that_is_drawn(tmp_path):
    for client in ("north", "south"):
        for label, texts in (("good", GOOD), ("bad", BAD)):
            for number, text in enumerate(texts):
                write(tmp_path / client / label / f"{number}.txt", text)
    made = data.load("folder", tmp_path, client_level=True, rng=np.random.default_rng(0), test_share=0.3)
    assert made.client_names == ("north", "south")
    assert (len(made.targets), len(made.test_targets)) == (8, 4)
    counts, clients, classes, _ = data.holdings(tmp_path)
    assert (counts.tolist(), clients, classes) == ([[3, 3], [3, 3]], ("north", "south"), ("bad", "good"))


def test_texts_that_can_not_be_read_are_in_one_list_or_left_out(folder):
    (folder / "train" / "good" / "3.txt").touch()
    write(folder / "train" / "bad" / "3.txt", "kühl", "latin-1")
    with pytest.raises(
        DataError, match=r"2 of 10 texts can't be read: .*3.txt: is not in UTF-8.*3.txt: the file is empty"
    ):
        data.load("folder", folder)
    with pytest.warns(DataWarning, match="They are left out"):
        made = data.load("folder", folder, skip_broken=True)
    assert (len(made.targets), len(made.skipped)) == (6, 2)


def test_texts_without_a_known_word_are_said(folder):
    write(folder / "test" / "good" / "0.txt", "ein schöner Tag")
    with pytest.warns(
        DataWarning, match="1 of 2 texts have not one of the 9 words of training, the first being number 2"
    ):
        data.load("folder", folder)


def test_what_texts_have_no_use_for_is_refused(folder):
    with pytest.raises(ArgumentError, match="size, window: are for images"):
        data.load("folder", folder, size=3)
    for option in ("length", "vocabulary_size"):
        with pytest.raises(ArgumentError, match=f"{option}: must be at least"):
            data.load("folder", folder, **{option: 0})


# ---- a model takes along its words


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on texts, eight of each class, a quarter of them held out."""
    top = tmp_path_factory.mktemp("texts")
    for label, texts in (("good", GOOD), ("bad", BAD)):
        for number in range(32):
            write(top / "mine" / label / f"{number}.txt", texts[number % 3])
    data = {"name": "folder", "root": str(top / "mine"), "length": 5, "validation": 0.4}
    model = {"name": "fasttext", "vocabulary": 11, "dim": 4}
    task = {"partition": {"rule": "iid", "clients": 2}, "training": {"rounds": 4, "lr": 1.0, "epochs": 5}}
    return fedskew.simulate(data=data, model=model, **task, out=top)


def test_texts_are_predicted_as_they_were_trained_on(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    model = fedskew.load(run.folder)
    expected = model.predict(["a fine day", "wet, wet"])
    assert [model.classes[label] for label in expected.argmax(1)] == ["good", "bad"]
    encoder = model.encoder
    np.testing.assert_array_equal(model.predict(encoder.encode(["a fine day", "wet, wet"])), expected)
    write(tmp_path / "all" / "0.txt", "a fine day")
    write(tmp_path / "all" / "1.txt", "wet, wet")
    table = 'text;author\n"a fine\nday";x\n"wet, wet";y\n'
    sources = [tmp_path / "all", write(tmp_path / "new.csv", table)]
    sources.append(write(tmp_path / "one.csv", 'words\n"a fine day"\n"wet, wet"\n'))
    saved = datasets.Dataset.from_dict({"author": ["x", "y"], "text": ["a fine day", "wet, wet"]})
    saved.save_to_disk(tmp_path / "saved")
    for source in [*sources, tmp_path / "saved"]:
        np.testing.assert_array_equal(model.predict(source), expected)
    with pytest.raises(DataError, match="a fine day: there is no such file or folder; texts themselves are .* a list"):
        model.predict("a fine day")
    with pytest.raises(DataError, match=r"new.csv, line 1: no column 'text', as texts .* trained on .*words, author"):
        model.predict(write(tmp_path / "new.csv", table.replace("text", "words")))
    with pytest.warns(DataWarning, match="1 of 1 text have not one of the"):
        model.predict(["Regenwetter"])


def test_an_exported_model_says_what_to_do_with_a_text_before(run, tmp_path):
    model = fedskew.load(run.folder)
    ids = model.encoder.encode(["A fine"])
    found, notes = exported(model, tmp_path / "model.pt", "torchscript", ids)
    np.testing.assert_allclose(found, model.predict(["A fine"]), atol=1e-6)
    words = json.loads(notes["encoder"])["words"]
    assert [words.index(word) + 2 for word in ("a", "fine")] == ids[0, :2].tolist()
    assert "an id is a word's place in `words` of `encoder` plus 2" in notes["samples"]


def test_a_model_is_moved_to_the_texts_of_another_place(run, tmp_path):
    for label, texts in (("good", GOOD), ("bad", BAD)):
        for number in range(30 if label == "bad" else 10):
            write(tmp_path / "new" / label / f"{number}.txt", texts[number % 3])
    model = fedskew.load(run.folder)
    (new,) = data.unlabelled([tmp_path / "new"], model.in_shape, encoder=model.encoder)
    found = experiment.Adaptation.of(model, new.inputs, model.held_out(), normalised=True)
    assert found.estimate.mix[0] == pytest.approx(0.75, abs=0.1)
    inputs, labels = experiment.Adaptation.read_labelled(tmp_path / "new", model)
    assert (inputs.shape, np.bincount(labels).tolist()) == ((40, 5), [30, 10])


def test_columns_of_a_saved_table_are_read_by_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    table = datasets.Dataset.from_dict(
        {"age": rng.normal(size=20), "lab": rng.normal(size=20), "label": ["a", "b"] * 10}
    )
    table.save_to_disk(tmp_path / "mine")
    data = {"name": "huggingface", "root": str(tmp_path / "mine")}
    task = {"partition": {"rule": "iid", "clients": 2}, "model": "logistic", "training": {"rounds": 1}}
    model = fedskew.load(fedskew.simulate(data=data, **task, out=tmp_path / "runs").folder)
    expected = model.predict(np.stack([table["age"][:], table["lab"][:]], axis=1))
    table.select_columns(["lab", "label", "age"]).save_to_disk(tmp_path / "turned")
    np.testing.assert_allclose(model.predict(tmp_path / "turned"), expected, atol=1e-7)
    table.remove_columns("lab").save_to_disk(tmp_path / "less")
    with pytest.raises(DataError, match="less: no column 'lab', which the schema has"):
        model.predict(tmp_path / "less")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "parts")
    with pytest.raises(DataError, match="parts: holds several parts; give one: .*parts/train or .*parts/test"):
        model.predict(tmp_path / "parts")
