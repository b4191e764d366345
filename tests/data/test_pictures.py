"""Pictures as cameras, scanners and people leave them."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import fedskew
from common import refused, save_image, task
from fedskew import data
from fedskew.errors import ArgumentError, DataError, DataWarning, MissingPackageError

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (6, 8), dtype=np.uint8)


def read(folder, **options) -> data.Dataset:
    return data.load("folder", folder, **options)


def shown(dataset: data.Dataset, test: bool = False) -> torch.Tensor:
    """Values in [0, 1] before normalising."""
    inputs = dataset.test_inputs if test else dataset.inputs
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    return inputs * std + mean


@pytest.fixture
def folder(tmp_path):
    """Two classes of two pictures each, and a test part, all of noise."""
    for part in ("train", "test"):
        for label in "ab":
            for number in range(2):
                save_image(tmp_path / part / label / f"{number}.png", np.roll(NOISE, number))
    return tmp_path


# ---- turned by EXIF


@pytest.mark.parametrize(("orientation", "turn"), [(1, 0), (3, 2), (6, 3), (8, 1)])
@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_pictures_stand_upright_in_training_and_prediction(orientation, turn, suffix, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation  # as the camera was held; 6: a quarter to the right
    upright = np.rot90(NOISE, turn)
    for name, values in (("0", NOISE), ("1", NOISE[::-1])):
        path = save_image(tmp_path / "train" / "a" / f"{name}{suffix}", values, exif=exif)
    save_image(tmp_path / "test" / "a" / "0.png", upright)
    made = read(tmp_path)
    assert made.in_shape == (1, *upright.shape)
    torch.testing.assert_close(shown(made)[0], shown(made, test=True)[0])
    (new,) = data.unlabelled([path.with_name(f"0{suffix}")], made.in_shape)
    torch.testing.assert_close(new.inputs[0], shown(made)[0])
    assert new.resized == 0


# ---- more than 8 bits


def deep(values, dtype=np.uint16):
    return np.resize(np.array(values, dtype=dtype), (6, 8))


@pytest.mark.parametrize(
    ("most", "white"), [(100, 255), (255, 255), (256, 511), (3000, 4095), (4095, 4095), (65535, 65535)]
)
def test_white_is_what_the_bits_of_the_brightest_pixel_hold(most, white, folder):
    path = save_image(folder / "train" / "a" / "0.png", deep([0, most // 2]))
    save_image(folder / "test" / "a" / "0.png", deep([0, most]))
    made = read(folder)
    assert made.window == (white,)
    torch.testing.assert_close(shown(made)[0, 0, 0, :2], torch.tensor([0, most // 2]) / white)
    torch.testing.assert_close(shown(made, test=True)[0, 0, 0, :2], torch.tensor([0, most]) / white)
    torch.testing.assert_close(shown(made)[1, 0], torch.from_numpy(np.roll(NOISE, 1) / np.float32(255)))
    (new,) = data.unlabelled([path], made.in_shape, made.window)
    torch.testing.assert_close(new.inputs[0], shown(made)[0])


def test_a_window_of_ones_own_clips_what_lies_beyond_it(folder):
    for mode, values in (("I", [-1024, -160, 40, 240, 3000]), ("F", [-1024.5, -160, 40, 240, 3000.5])):
        path = save_image(folder / "train" / "a" / "0.tif", Image.fromarray(deep(values, np.float32)).convert(mode))
        made = read(folder, window=[-160, 240])
        expected = torch.tensor([0, 0, 0.5, 1, 1])
        torch.testing.assert_close(shown(made)[0 if len(made.inputs) == 4 else 1, 0, 0, :5], expected)
        (new,) = data.unlabelled([path], made.in_shape, made.window)
        torch.testing.assert_close(new.inputs[0, 0, 0, :5], expected)
    save_image(folder / "train" / "a" / "0.tif", Image.fromarray(deep([0, np.nan], np.float32)))
    with pytest.raises(DataError, match="a/0.tif: has a pixel that is NaN"):
        read(folder, window=[-160, 240])


@pytest.mark.parametrize(
    ("mode", "values", "words"),
    [
        ("I", [-5, 70], "has values from -5 to 70, and black is 0 and white 65535: set window = "),
        ("I", [0, 70000], "has values from 0 to 70000"),
        ("F", [0.25, 1], "holds fractions: set window"),
    ],
)
def test_values_without_a_white_of_their_own_ask_for_a_window(mode, values, words, folder):
    save_image(folder / "train" / "a" / "0.tif", Image.fromarray(deep(values, np.float32)).convert(mode))
    with pytest.raises(DataError, match=words):
        read(folder)
    with pytest.raises(DataError, match="set window"):
        read(folder, skip_broken=True)  # it is not broken


def test_a_picture_in_other_units_than_those_of_training_is_refused(folder):
    path = save_image(folder / "train" / "a" / "0.png", deep([0, 5000]))
    with pytest.raises(DataError, match="has more than 8 bits, and the pictures of training have 8"):
        list(data.unlabelled([path], (1, 6, 8)))
    with pytest.raises(DataError, match="has values from 0 to 5000, and black is 0 and white 4095"):
        list(data.unlabelled([path], (1, 6, 8), (4095,)))


@pytest.mark.parametrize("window", [[1, 1], [5, 2], [0], [1, 2, 3], [0, float("inf")], [0, float("nan")]])
def test_a_window_that_is_none_is_refused(window, folder):
    with pytest.raises(ArgumentError, match="window: must be"):
        read(folder, window=window)


def test_a_window_for_pictures_of_8_bits_is_said_to_do_nothing(folder):
    with pytest.warns(DataWarning, match="window: no picture has more than 8 bits"):
        assert read(folder, window=[0, 100]).window == (0, 100)


# ---- broken files


def spoil(folder):
    """Four files that are no pictures, each in its way; return their names."""
    (folder / "train" / "a" / "empty.png").touch()
    (folder / "train" / "a" / "words.png").write_text("not a picture\n")
    whole = save_image(folder / "train" / "b" / "cut.jpg", np.tile(NOISE, (50, 50))[:6, :8])
    whole.write_bytes(whole.read_bytes()[:-40])
    part = save_image(folder / "test" / "b" / "cut.png", RNG.integers(0, 256, (6, 8), dtype=np.uint8))
    part.write_bytes(part.read_bytes()[:60])
    return ["empty.png", "words.png", "cut.jpg", "cut.png"]


def test_all_broken_files_are_in_one_list(folder):
    names = spoil(folder)
    said = "empty.png: the file is empty", "words.png: what it holds is in no format of images"
    advice = "--skip-broken (data.skip_broken = true)"
    with refused(DataError, *names, *said, advice, match=r"^4 of 12 pictures can't be read: "):
        read(folder)


def test_training_goes_without_broken_files_where_asked_and_records_which(folder):
    names = spoil(folder)
    with pytest.warns(DataWarning, match="4 of 12 pictures can't be read.* They are left out"):
        made = read(folder, skip_broken=True)
    assert (len(made.targets), len(made.test_targets)) == (4, 4)
    assert made.targets.tolist() == [0, 0, 1, 1]
    assert [name for name, said in zip(names, made.skipped, strict=True) if name not in said] == []
    torch.testing.assert_close(shown(made)[2, 0], torch.from_numpy(NOISE / np.float32(255)))


def test_nothing_is_left_to_skip_where_all_is_broken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").touch()
    with pytest.raises(DataError, match="1 of 1 picture can't be read"):
        read(tmp_path, skip_broken=True, rng=RNG)


def test_prediction_lists_all_broken_files_or_goes_without(folder):
    spoil(folder)
    with pytest.raises(DataError, match="3 of 7 pictures can't be read"):
        list(data.unlabelled([folder / "train"], (1, 6, 8)))
    with pytest.warns(DataWarning, match="They are left out"):
        (new,) = data.unlabelled([folder / "train"], (1, 6, 8), skip_broken=True)
    assert (len(new.names), new.inputs.shape) == (4, (4, 1, 6, 8))


# ---- kinds of files


def test_of_a_file_with_several_images_the_first_is_read_and_that_is_said(folder):
    frames = [Image.fromarray(np.full((6, 8), level, np.uint8)) for level in (10, 200)]
    save_image(folder / "train" / "a" / "x.gif", frames[0], save_all=True, append_images=frames[1:])
    with pytest.warns(DataWarning, match=r"1 file, such as .*x.gif: several images .* the first one is read"):
        made = read(folder)
    assert shown(made)[2].mean().item() == pytest.approx(10 / 255, abs=1e-4)
    spoil(folder)
    with pytest.warns(DataWarning, match="several"), pytest.raises(DataError, match="^4 of 13 pictures can't be"):
        read(folder)


def test_cmyk_palettes_and_transparency_become_colours(tmp_path):
    palette = Image.new("P", (8, 6), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    pictures = {"0.jpg": Image.new("CMYK", (8, 6), (0, 0, 0, 0)), "1.png": palette}
    for name, image in pictures.items():
        save_image(tmp_path / "train" / "a" / name, image, **({"transparency": 0} if image is palette else {}))
    save_image(tmp_path / "test" / "a" / "0.png", Image.new("RGBA", (8, 6), (1, 2, 3, 0)))
    made = read(tmp_path)
    assert made.in_shape == (3, 6, 8)
    levels = (255 * torch.cat([shown(made), shown(made, test=True)])[:, :, 0, 0]).round().int().tolist()
    assert levels == [[255, 255, 255], [200, 100, 50], [1, 2, 3]]


def test_a_picture_of_one_pixel_is_one(tmp_path):
    for part in ("train", "test"):
        save_image(tmp_path / part / "a" / "0.png", np.array([[7]], np.uint8))
    assert read(tmp_path).in_shape == (1, 1, 1)


def test_images_in_a_table_are_read_by_the_same_rules(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    spoil(folder)
    files = sorted((folder / "train").rglob("*.*g"))
    exif = Image.Exif()
    exif[0x0112] = 6
    save_image(files[1], np.rot90(NOISE), exif=exif)
    table = datasets.Dataset.from_dict({"image": list(map(str, files)), "label": [path.parent.name for path in files]})
    table = table.cast_column("image", datasets.Image())
    parts = datasets.DatasetDict({"train": table, "test": table})
    with pytest.raises(DataError, match="6 of 14 pictures can't be read.*in row 4: .*truncated|broken"):
        data.from_huggingface(parts)
    with pytest.warns(DataWarning, match="They are left out"):
        made = data.from_huggingface(parts, skip_broken=True)
    assert len(made.targets) == len(made.test_targets) == 4
    assert len(made.skipped) == 6
    torch.testing.assert_close(shown(made)[1, 0], torch.from_numpy(NOISE / np.float32(255)))


# ---- DICOM

HU = np.resize(np.array([-1024, -160, 40, 240, 2000], dtype=np.int16), (6, 8))


def scan(path, stored, **tags):
    """Write a DICOM file of 12 bits stored in 16."""
    pydicom = pytest.importorskip("pydicom", reason="the extra dicom is not installed")
    made = pydicom.Dataset()
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", pydicom.uid.generate_uid(entropy_srcs=["x"])
    made.Rows, made.Columns, made.SamplesPerPixel, made.PhotometricInterpretation = 6, 8, 1, "MONOCHROME2"
    made.BitsAllocated, made.BitsStored, made.HighBit = 16, 12, 11
    made.PixelRepresentation = int(stored.dtype.kind == "i")
    for name, value in tags.items():
        setattr(made, name, value)
    made.PixelData = stored.tobytes()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path


SCANS = [  # stored values, tags, a user's window, what the first five pixels show
    ((HU + 1024).astype(np.uint16), {"RescaleSlope": 1, "RescaleIntercept": -1024}, [-160, 240], [0, 0, 0.5, 1, 1]),
    # PS3.3 C.11.2.1.2: centre 40, width 401 is -160.5 - ... : from 39.5 - 200 to 39.5 + 200
    (HU, {"WindowCenter": 40, "WindowWidth": 401}, [], [0, 0.5 / 400, 200.5 / 400, 1, 1]),
    (HU, {"WindowCenter": [40, 600], "WindowWidth": [400, 9], "VOILUTFunction": "LINEAR_EXACT"}, [], [0, 0, 0.5, 1, 1]),
    (HU, {"PhotometricInterpretation": "MONOCHROME1"}, [-160, 240], [1, 1, 0.5, 0, 0]),
    # no window: 12 bits from -2048 to 2047
    (HU, {}, [], [1024 / 4095, 1888 / 4095, 2088 / 4095, 2288 / 4095, 4048 / 4095]),
    ((HU + 1024).astype(np.uint16), {"RescaleSlope": 2, "RescaleIntercept": -7}, [],
     [0, 864 / 4095, 1064 / 4095, 1264 / 4095, 3024 / 4095]),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "tags", "window", "expected"), SCANS)
@pytest.mark.parametrize("name", ["0.dcm", "IM0001", "1.2.840.5"])
def test_a_scan_is_rescaled_and_shown_by_its_window(name, stored, tags, window, expected, tmp_path):
    path = scan(tmp_path / "train" / "a" / name, stored, **tags)
    scan(tmp_path / "test" / "a" / "0.dcm", stored, **tags)
    made = read(tmp_path, window=window)
    assert made.in_shape == (1, 6, 8)
    np.testing.assert_allclose(shown(made)[0, 0, 0, :5], expected, atol=1e-6)
    (new,) = data.unlabelled([path.parent], made.in_shape, made.window)
    np.testing.assert_allclose(new.inputs[0, 0, 0, :5], expected, atol=1e-6)


def test_a_scan_of_several_frames_a_damaged_one_and_colours(tmp_path):
    path = scan(tmp_path / "train" / "a" / "0.dcm", np.stack([HU, HU]), NumberOfFrames=2)
    colours = np.tile(np.array([10, 20, 30], np.uint8), (6, 8, 1))
    plain = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    scan(tmp_path / "test" / "a" / "0.dcm", colours, **plain, BitsAllocated=8, BitsStored=8, HighBit=7)
    with pytest.warns(DataWarning, match="the first one is read"):
        made = read(tmp_path)
    assert made.in_shape == (3, 6, 8)
    assert (255 * shown(made, test=True)[0, :, 0, 0]).round().tolist() == [10, 20, 30]
    path.write_bytes(path.read_bytes()[:400])
    (path.parent / "1.dcm").write_bytes(bytes(128) + b"DICM")
    (path.parent / "2.dcm").write_text("not a scan")
    with pytest.raises(DataError, match=r"3 of 4 pictures can't be read: .*0.dcm: .*1.dcm: Unable to.*2.dcm: "):
        read(tmp_path)


def test_without_pydicom_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.dcm").touch()
    with pytest.raises(MissingPackageError, match=r"0.dcm: is DICOM.*pip install 'fedskew\[dicom\]'"):
        read(tmp_path, skip_broken=True, rng=RNG)


# ---- a model takes along how its pictures are read


def test_a_run_records_what_was_skipped_and_its_model_reads_as_it_was_trained(folder, monkeypatch):
    spoil(folder)
    path = save_image(folder / "train" / "a" / "0.png", deep([0, 3000]))
    given = {"name": "folder", "root": str(folder), "skip_broken": True}
    with pytest.warns(DataWarning, match="They are left out"):
        done = fedskew.simulate(task(2, rounds=1), data=given, out=folder / "runs")
    notes = json.loads((done.folder / "task.json").read_text())["notes"]
    assert len(re.findall(r"empty.png|words.png|cut.jpg|cut.png", notes[0])) == 4
    model = fedskew.load(done.folder)
    assert model.info.window == (4095,)
    (new,) = data.unlabelled([path], model.in_shape, model.info.window)
    assert new.inputs.max().item() == pytest.approx(3000 / 4095)
    assert "divided by 4095" in model.info.before
