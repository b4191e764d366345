"""A user's own data: a folder of images, arrays, a table."""

import numpy as np
import pytest
import torch
from PIL import Image

from common import refused, rng, save_image, table
from fedskew import data
from fedskew.data import Dataset
from fedskew.errors import ArgumentError, DataError, DataWarning


def pixels(dataset: Dataset, test: bool = False) -> torch.Tensor:
    """Levels of 0 to 255 before normalising, (samples, channels, height, width)."""
    inputs = dataset.test_inputs if test else dataset.inputs
    shape = (-1, *[1] * (inputs.dim() - 2))
    return (inputs * torch.tensor(dataset.std).view(shape) + torch.tensor(dataset.mean).view(shape)) * 255


def paint(path, value, size=(4, 5), mode="L"):
    """An image of one colour; size is (height, width)."""
    save_image(path, Image.new(mode, size[::-1], value))


# ---- a test part held out


def divided(folder, labels, share=0.2, generator=None):
    """The rows that are kept and held out of an .npz file with these labels."""
    np.savez(folder / "a.npz", x=np.arange(len(labels), dtype=np.float64)[:, None], y=np.array(labels))
    read = data.load("npz", folder / "a.npz", rng=generator, test_share=share)
    parts = (read.inputs * read.std[0] + read.mean[0], read.test_inputs * read.std[0] + read.mean[0])
    return [part.flatten().round().long().tolist() for part in parts]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_the_same_share_of_every_class_is_held_out(share, tmp_path):
    labels = ["a"] * 100 + ["b"] * 50 + ["c"]
    kept, held = divided(tmp_path, labels, share, rng())
    assert sorted([*kept, *held]) == list(range(151))
    assert np.all(np.diff(kept) > 0)
    assert np.all(np.diff(held) > 0)
    counts = {label: sum(labels[row] == label for row in held) for label in "abc"}
    assert counts == {"a": 100 * share, "b": 50 * share, "c": 0}


def test_what_is_held_out_depends_on_the_generator(tmp_path):
    labels = ["a", "b"] * 50
    first = divided(tmp_path, labels, generator=rng(1))
    assert divided(tmp_path, labels, generator=rng(1)) == first
    assert divided(tmp_path, labels, generator=rng(2)) != first


def test_holding_out_needs_a_generator_a_share_and_enough_samples(tmp_path):
    with pytest.raises(ArgumentError, match="rng:"):
        divided(tmp_path, ["a"] * 10)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ArgumentError, match="test_share:"):
            divided(tmp_path, ["a"] * 10, share, rng())
    with pytest.raises(DataError, match="too few samples"):
        divided(tmp_path, ["a", "b", "c"], generator=rng())


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["10", "9", "-1", "2"], ("-1", "2", "9", "10")), (["10", "9", "b", "a"], ("10", "9", "a", "b"))],
)
def test_names_are_in_order_of_value_where_they_are_numbers(names, expected, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(40.0)[:, None], y=np.array(names * 10))
    assert data.load("npz", tmp_path / "a.npz", rng=rng()).classes == expected


# ---- folder


def test_a_folder_of_class_folders(tmp_path):
    for index in range(10):
        paint(tmp_path / "cat" / f"{index}.png", 10 + index)
        paint(tmp_path / "dog" / f"{index}.JPG", 200)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "eel").mkdir()
    with pytest.warns(DataWarning, match=r"1 entry was left out, which is no image in a class folder: \.txt \(1\)"):
        made = data.load("folder", tmp_path, rng=rng())
    assert made.classes == ("cat", "dog", "eel")
    assert made.in_shape == (1, 4, 5)
    assert made.targets.bincount().tolist() == [8, 8]
    assert made.test_targets.bincount().tolist() == [2, 2]
    levels = torch.cat([pixels(made), pixels(made, test=True)])[:, 0, 0, 0].round()
    assert sorted(levels.tolist()) == [*range(10, 20), *[200] * 10]
    assert made.inputs.mean() == pytest.approx(0, abs=1e-6)
    assert made.inputs.std(correction=0) == pytest.approx(1, abs=1e-6)
    assert made.clients is None


def test_what_a_folder_holds_beside_images_is_said_and_never_a_class(tmp_path):
    for client in ("north", "south"):
        for index in range(5):
            paint(tmp_path / client / "Covid" / f"{index}.png", index)
            paint(tmp_path / client / "flu" / f"{index}.png", index)
    paint(tmp_path / "south" / "covid" / "0.png", 0)
    (tmp_path / "south" / "flu" / "scan.nii").touch()
    (tmp_path / "south" / "flu" / "Thumbs.db").touch()
    (tmp_path / "__MACOSX" / "north").mkdir(parents=True)
    (tmp_path / "README").touch()
    with pytest.warns(DataWarning) as said:
        made = data.load("folder", tmp_path, rng=rng(), client_level=True)
    assert made.client_names == ("north", "south")
    assert made.classes == ("Covid", "covid", "flu")
    left_out, alike = (str(warning.message) for warning in said)
    assert "3 entries were left out" in left_out
    for name in ("the folder __MACOSX", ".nii (1)", "files without a suffix"):
        assert name in left_out
    assert "'Covid' and 'covid'; they are counted as 2 classes" in alike


def test_train_and_test_folders_are_kept_apart(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", 0)
    paint(tmp_path / "train" / "b" / "1.png", 100)
    paint(tmp_path / "test" / "b" / "1.png", 200)
    paint(tmp_path / "test" / "c" / "1.png", 50)
    made = data.load("folder", tmp_path)
    assert made.classes == ("a", "b", "c")
    assert made.targets.tolist() == [0, 1]
    assert made.test_targets.tolist() == [1, 2]
    # mean and deviation are those of the training part: 0 and 100
    assert made.mean == pytest.approx([50 / 255])
    assert made.std == pytest.approx([50 / 255])
    assert pixels(made, test=True)[:, 0, 0, 0].tolist() == pytest.approx([200, 50], abs=1e-3)


def test_the_first_level_names_clients_where_asked(tmp_path):
    for client in ("site 10", "site 2"):
        for label in ("a", "b"):
            for index in range(5):
                paint(tmp_path / client / label / f"{index}.png", index)
    (tmp_path / "site 3").mkdir()
    made = data.load("folder", tmp_path, rng=rng(), client_level=True)
    assert made.client_names == ("site 10", "site 2", "site 3")
    assert np.bincount(made.clients, minlength=3).sum() == len(made.targets) == 16
    assert set(made.clients) == {0, 1}
    with refused(DataError, match=r"site 10.* holds folders and no images.* client_level = true"):
        data.load("folder", tmp_path, rng=rng())


def test_colour_and_grey_together_are_colour(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", (10, 20, 30), mode="RGB")
    paint(tmp_path / "train" / "a" / "2.png", 40)
    paint(tmp_path / "train" / "a" / "3.png", (50, 60, 70, 0), mode="RGBA")
    paint(tmp_path / "test" / "a" / "1.png", 1)
    made = data.load("folder", tmp_path)
    assert made.in_shape == (3, 4, 5)
    assert pixels(made)[:, :, 0, 0].flatten().tolist() == pytest.approx([10, 20, 30, 40, 40, 40, 50, 60, 70], abs=1e-3)


def test_images_of_different_sizes_are_refused_or_resized(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", 10, size=(4, 5))
    paint(tmp_path / "train" / "a" / "2.png", 20, size=(8, 8))
    paint(tmp_path / "test" / "a" / "1.png", 30, size=(4, 5))
    with pytest.raises(DataError, match=r"2 sizes: 4 x 5 \(2, such as .*1.png\), 8 x 8 \(1, .*2.png\); set size"):
        data.load("folder", tmp_path)
    assert data.load("folder", tmp_path, size=6).in_shape == (1, 6, 6)
    made = data.load("folder", tmp_path, size=[3, 7])
    assert made.in_shape == (1, 3, 7)
    assert pixels(made)[:, 0, 0, 0].tolist() == pytest.approx([10, 20], abs=1e-3)
    for size in (0, -1, (3, 4, 5), (2.5, 2)):
        with pytest.raises(ArgumentError, match="size:"):
            data.load("folder", tmp_path, size=size)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="x.png: is no folder"):
        data.load("folder", table(tmp_path / "x.png", "no image"), rng=rng())


# ---- npz


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_arrays_of_features_with_a_test_part(tmp_path):
    path = save(
        tmp_path / "d.npz",
        x=np.array([[1.0, 5.0], [3.0, 5.0]]), y=np.array([7, 3]),
        x_test=np.array([[5.0, 6.0]]), y_test=np.array([9]), client=np.array(["n", "s"]),
    )  # fmt: skip
    made = data.load("npz", path)
    assert made.classes == ("3", "7", "9")
    assert made.targets.tolist() == [1, 0]
    assert made.test_targets.tolist() == [2]
    # mean 2 and deviation 1; a feature that never varies is only centred
    assert made.inputs.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert made.test_inputs.tolist() == [[3.0, 1.0]]
    assert (made.mean, made.std) == ((2.0, 5.0), (1.0, 1.0))
    assert made.clients.tolist() == [0, 1]
    assert made.client_names == ("n", "s")


@pytest.mark.parametrize(("shape", "in_shape"), [((20, 4, 5), (1, 4, 5)), ((20, 3, 4, 5), (3, 4, 5)), ((20, 6), (6,))])
def test_arrays_without_a_test_part(shape, in_shape, tmp_path):
    x = rng().integers(0, 256, shape).astype(np.uint8)
    made = data.load("npz", save(tmp_path / "d.npz", x=x, y=np.arange(20) % 2), rng=rng(1), test_share=0.3)
    assert made.in_shape == in_shape
    assert (len(made.targets), len(made.test_targets)) == (14, 6)
    channels = x.reshape(20, 1, -1) if len(shape) == 3 else x.reshape(*shape[:2], -1)
    assert len(made.mean) == channels.shape[1]
    found = pixels(made).flatten(1).round().long().tolist()
    assert all(row in x.reshape(20, -1).tolist() for row in found)


def test_a_feature_that_never_varies_is_only_centred_whatever_its_rounding(tmp_path):
    x, x_test = np.full((1001, 1), 0.1), np.full((1, 1), 0.6)
    y = np.zeros(1001, int)
    made = data.load("npz", save(tmp_path / "d.npz", x=x, y=y, x_test=x_test, y_test=y[:1]))
    assert made.std == (1.0,)
    assert made.test_inputs.item() == pytest.approx(0.5)


def test_large_features_keep_their_digits(tmp_path):
    x = 1_600_000_000.0 + np.arange(10.0)[:, None]
    made = data.load("npz", save(tmp_path / "d.npz", x=x, y=np.zeros(10, int), x_test=x, y_test=np.zeros(10, int)))
    expected = (np.arange(10) - 4.5) / np.arange(10).std()
    np.testing.assert_allclose(made.inputs[:, 0], expected, rtol=1e-6)


BAD_ARRAYS = [
    ({"y": np.zeros(3)}, "has no array 'x'"),
    ({"x": np.zeros((3, 2))}, "has no array 'y'"),
    ({"x": np.zeros((3, 2)), "y": np.zeros(3) + 0.5}, "the label '0.5' is a measurement"),
    ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, r"'y' must be .*\(3,\)"),
    ({"x": np.zeros((3, 2)), "y": np.zeros(3, int), "client": np.zeros(2, int)}, "'client' must be"),
    ({"x": np.zeros(3), "y": np.zeros(3, int)}, "'x' must be numbers"),
    ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2, int)}, "'x' must be numbers"),
    ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "'x' must be numbers"),
    ({"x": np.array([[1.0], [np.nan]]), "y": np.zeros(2, int)}, "'x' has an empty value, NaN"),
    ({"x": np.zeros((3, 8, 8, 3)), "y": np.zeros(3, int)}, "channels last"),
    ({"x": np.zeros((3, 2)), "y": np.zeros(3, int), "x_test": np.zeros((3, 2))}, "only one of 'x_test' and 'y_test'"),
    (dict.fromkeys(["x", "y_test", "x_test"], np.eye(3)) | {"y": np.arange(3)}, "'y_test' is .3, 3. and 'y' .3,."),
    (
        {"x": np.zeros((3, 2)), "y": np.zeros(3, int), "x_test": np.zeros((3, 4)), "y_test": np.zeros(3, int)},
        r"training samples are \(2,\), those of the test part \(4,\)",
    ),
    (
        {"x": np.array([[1], [{}]], dtype=object), "y": np.zeros(2, int)},
        "plain arrays: an array is of Python objects",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_named(arrays, message, tmp_path):
    with refused(DataError, "d.npz", match=message):
        data.load("npz", save(tmp_path / "d.npz", **arrays), rng=rng())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"text"])
def test_a_file_that_is_no_npz_is_refused(content, tmp_path):
    (tmp_path / "d.npz").write_bytes(content)
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("d.npz", "one.npy"):
        with pytest.raises(DataError, match="can't be read as an .npz file of plain arrays: it is none"):
            data.load("npz", tmp_path / name, rng=rng())


# ---- csv


def test_a_table_with_clients_and_a_test_file(tmp_path):
    path = table(tmp_path / "d.csv", '\ufeffage,site,height,kind\n1,north,10,x\n3,south,10,y\n\n5,north,10,"x"\n')
    table(tmp_path / "t.csv", "age,site,height,kind\n3,west,12,y\n")
    made = data.load("csv", path, label="kind", client="site", test="t.csv")
    assert made.classes == ("x", "y")
    assert made.targets.tolist() == [0, 1, 0]
    # ages 1, 3, 5: mean 3, deviation sqrt(8/3); height never varies
    assert made.mean == (3.0, 10.0)
    np.testing.assert_allclose(made.inputs, [[-((3 / 2) ** 0.5), 0], [0, 0], [(3 / 2) ** 0.5, 0]], rtol=1e-6)
    assert made.test_inputs.tolist() == [[0.0, 2.0]]
    assert made.clients.tolist() == [0, 1, 0]
    assert made.client_names == ("north", "south")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_columns_may_be_apart_by_another_sign(separator, tmp_path):
    text = "age,label,client\n1,x,a\n3,y,b\n5,x,b\n"
    read = [
        data.load("csv", table(tmp_path / "d.csv", text.replace(",", sign)), rng=rng(), test_share=0.4)
        for sign in (",", separator)
    ]
    assert torch.equal(read[0].inputs, read[1].inputs)
    assert read[1].classes == ("x", "y")
    assert data.load("csv", table(tmp_path / "d.csv", "age;label\n1,5;x\n2,5;y\n"), test="d.csv").mean == (2.0,)


def test_a_column_called_client_is_taken_for_one(tmp_path):
    path = table(tmp_path / "d.csv", "client,a,label\n" + "".join(f"{k % 3},{k},{k % 2}\n" for k in range(30)))
    with pytest.warns(DataWarning, match="column 'a' counts the rows from 0: the model learns from it all the same"):
        made = data.load("csv", path, rng=rng())
    assert made.in_shape == (1,)
    assert made.client_names == ("0", "1", "2")
    assert len(made.targets) == 24
    # the sample k is of client k mod 3 and class k mod 2
    k = np.rint(made.inputs[:, 0].numpy() * made.std[0] + made.mean[0]).astype(int)
    assert (made.clients == k % 3).all()
    assert (made.targets.numpy() == k % 2).all()


BAD_TABLES = [
    ("", "the file is empty"),
    ("a,a,label\n1,2,x\n", "line 1: the column 'a' occurs twice"),
    ("a,b\n1,2\n", "line 1: no column 'label'; set data.label"),
    ("label\nx\n", "line 1: no column is left for features"),
    ("a,label\n", "nothing below the header"),
    ("a,b,label\n1,2,x\n1,x\n", "line 3: 2 cells where the header has 3"),
    (
        "a,b,label\n1,2,x\n\n1,two,x\n",
        "line 4, column 'b': 'two' is not a number; a schema says .*: fedskew schema .*d.csv",
    ),
    ("client,b,label\n,2,x\n", "line 2, column 'client': empty"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TABLES)
def test_a_table_that_does_not_fit_is_refused_with_its_line(text, message, tmp_path):
    with refused(DataError, "d.csv", match=message):
        data.load("csv", table(tmp_path / "d.csv", text), rng=rng())


def test_files_of_a_table_that_are_not_there_or_differ_are_named(tmp_path):
    path = table(tmp_path / "d.csv", "a,label\n1,x\n2,x\n")
    with pytest.raises(DataError, match=r"t.csv: can't be read"):
        data.load("csv", path, test="t.csv")
    with pytest.raises(DataError, match="no column 'sit'; set data.client"):
        data.load("csv", path, client="sit", rng=rng())
    path.write_bytes(b"a,label\n1,\xff\n")
    with pytest.raises(DataError, match="line 2: not UTF-8 text"):
        data.load("csv", path, rng=rng())


def test_arrays_are_predicted_from_a_saved_table_as_from_an_npz_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    x = np.arange(12.0).reshape(4, 3)
    datasets.Dataset.from_dict({"x": x.tolist(), "label": [0, 1, 0, 1]}).save_to_disk(str(tmp_path / "saved"))
    np.savez(tmp_path / "own.npz", x=x, y=[0, 1, 0, 1])
    for place in ("saved", "own.npz"):
        (found,) = data.unlabelled([tmp_path / place], (3,))
        np.testing.assert_array_equal(found.inputs.numpy(), x)
    datasets.Dataset.from_dict({"label": ["a", "b"]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"holds no column of images or arrays \(found: label\)"):
        next(data.unlabelled([tmp_path / "none"], (3,)))
