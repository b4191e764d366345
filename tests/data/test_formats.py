"""Readers on small files in exactly the format of the published ones."""

import csv
import gzip

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import train_test_split

from common import refused
from fedskew import data
from fedskew.errors import ArgumentError, DataError
from published_formats import CINIC_CLASSES, PACS_CLASSES, WRITERS, idx, image, write

MADE = {
    # samples written for each class (and domain): 4 train, 2 test
    "mnist": (40, 20, 10, (1, 28, 28)),
    "fashion_mnist": (40, 20, 10, (1, 28, 28)),
    "emnist_balanced": (188, 94, 47, (1, 28, 28)),
    "usps": (40, 20, 10, (1, 16, 16)),
    "cifar10": (40, 20, 10, (3, 32, 32)),
    "cifar100": (400, 200, 100, (3, 32, 32)),
    "svhn": (40, 20, 10, (3, 32, 32)),
    "syn_digits": (40, 20, 10, (3, 32, 32)),
    "digit_domains": (160, 80, 10, (3, 32, 32)),
    "cinic10": (40, 20, 10, (3, 32, 32)),
    "ag_news": (16, 8, 4, (200,)),
}
PAGES = {
    "emnist_balanced": "nist.gov",
    "cifar100": "cs.toronto.edu",
    "svhn": "ufldl.stanford.edu",
    "syn_digits": "yaroslav.ganin.net",
    "digit_domains": "yann.lecun.com",
    "cinic10": "datashare.ed.ac.uk",
    "tiny_imagenet": "cs231n.stanford.edu",
    "pacs": "domaingeneralization.github.io",
    "iwildcam": "wilds.stanford.edu",
    "ag_news": "zhangxiangxiao",
}


def load(name, root, **options):
    return data.load(name, root, verify=False, rng=np.random.default_rng(0), **options)


def levels(dataset: data.Dataset, inputs: data.Inputs) -> torch.Tensor:
    """The images as whole numbers from 0 to 255."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    return ((inputs.index_select(0, torch.arange(len(inputs))) * std + mean) * 255).round()


@pytest.mark.parametrize("name", MADE)
def test_every_sample_of_every_class_is_read(name, tmp_path):
    write(name, tmp_path, train=4, test=2)
    dataset = load(name, tmp_path)
    train, test, classes, shape = MADE[name]
    assert dataset.inputs.shape == (train, *shape)
    assert dataset.test_inputs.shape == (test, *shape)
    assert dataset.num_classes == classes
    assert dataset.targets.bincount(minlength=classes).tolist() == [train // classes] * classes
    assert dataset.test_targets.bincount(minlength=classes).tolist() == [test // classes] * classes


@pytest.mark.parametrize("name", sorted(PAGES))
def test_without_files_the_first_that_is_missing_is_named_with_its_page(name, tmp_path):
    with refused(DataError, str(tmp_path), "is missing", PAGES[name]):
        load(name, tmp_path)


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"tiny_imagenet", "pacs", "iwildcam"}))
def test_a_part_of_a_data_set_does_not_pass_for_the_whole(name, tmp_path):
    write(name, tmp_path)
    with refused(DataError, match="is damaged"):
        data.load(name, tmp_path, rng=np.random.default_rng(0))


DAMAGED = [
    ("svhn", "svhn/test_32x32.mat", b"MATLAB 5.0 MAT-file", "it can't be read as a MATLAB file"),
    ("cifar100", "cifar-100-python/train", b"\x80\x02}q", "no pickle of arrays and plain values"),
    ("cifar100", "cifar-100-python/meta", b"\x80\x02J\x01\x00\x00\x00.", "holds what is of type int, not a dict"),
    ("cifar10", "cifar-10-batches-py/test_batch", b"\x80\x02}.", "has no 'data'"),
    ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", b"\0\0\x0d\x03", "it is no IDX file of uint8"),
    ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte.gz", b"\0\0\x08\1\0\0\0\5\1\2", "2 values follow"),
    ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte.gz", b"\0\0\x08\1\0\0\0\2\1\2", "it holds labels (2,)"),
    ("ag_news", "ag_news_csv/test.csv", b'"5","a","b"\n', "line 1 is no class from 1 to 4"),
    ("ag_news", "ag_news_csv/test.csv", b"\xff\xfe", "can't be read as CSV in UTF-8"),
    ("ag_news", "ag_news_csv/train.csv", b"", "it is empty"),
    ("usps", "usps/zip.test.gz", b"1 0.5 0.5\n", "3 values, not a digit and 256"),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), DAMAGED, ids=lambda value: str(value)[-20:])
def test_a_damaged_file_says_so_in_one_line(name, file, content, message, tmp_path):
    write(name, tmp_path)
    (tmp_path / file).write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    with refused(DataError, str(tmp_path / file).removesuffix(".gz"), "is damaged", message):
        load(name, tmp_path)


def test_emnist_s_characters_stand_upright(tmp_path):
    write("emnist_balanced", tmp_path)
    # an image is stored column by column: value 28 * column + row, cut to 8 bits
    columns, rows = np.meshgrid(np.arange(28), np.arange(28), indexing="ij")
    stored = np.broadcast_to((columns * 28 + rows) % 256, (94, 28, 28))
    idx(tmp_path / "EMNIST/raw/emnist-balanced-test-images-idx3-ubyte.gz", stored)
    emnist = load("emnist_balanced", tmp_path)
    pixels = levels(emnist, emnist.test_inputs)[0, 0]
    assert pixels[3, 7] == 7 * 28 + 3
    assert pixels[0].tolist() == [28 * column % 256 for column in range(28)]
    assert emnist.classes[10] == "A"
    assert emnist.classes[36:] == tuple("abdefghnqrt")


def test_emnist_is_normalised_by_its_own_pixels(tmp_path):
    write("emnist_balanced", tmp_path, train=40)
    emnist = load("emnist_balanced", tmp_path)
    assert emnist.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert emnist.inputs.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_svhn_calls_zero_ten_and_has_height_width_channel_sample(tmp_path):
    from scipy.io import savemat

    (tmp_path / "svhn").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for part in ("train", "test", "extra"):
        savemat(tmp_path / f"svhn/{part}_32x32.mat", {"X": pixels, "y": np.array([[10], [1], [9], [10]], np.uint8)})
    svhn = load("svhn", tmp_path)
    assert svhn.targets.tolist() == [0, 1, 9, 0]
    assert levels(svhn, svhn.inputs)[2, 1, 30, 4] == pixels[30, 4, 1, 2]
    whole = svhn.inputs.index_select(0, torch.arange(4))
    torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    assert len(load("svhn", tmp_path, extra=True).targets) == 8


def test_four_domains_of_digits_have_one_shape_and_say_whose_each_sample_is(tmp_path):
    write("digit_domains", tmp_path, train=4, test=2)
    digits = load("digit_domains", tmp_path)
    assert digits.domain_names == ("mnist", "usps", "svhn", "syn")
    assert np.bincount(digits.domains).tolist() == [40] * 4
    assert np.bincount(digits.test_domains).tolist() == [20] * 4
    single = load("svhn", tmp_path)
    pixels = levels(digits, digits.inputs)
    assert torch.equal(pixels[digits.domains == 2], levels(single, single.inputs))
    assert torch.equal(digits.targets[digits.domains == 2], single.targets)
    # grey images have three channels alike, and are resized as Pillow does it (FPL's code), to one level
    mnist = load("mnist", tmp_path)
    grey = pixels[digits.domains == 0]
    assert torch.equal(grey[:, 0], grey[:, 2])
    small = Image.fromarray(levels(mnist, mnist.inputs)[0, 0].numpy().astype(np.uint8))
    resized = np.asarray(small.resize((32, 32), Image.Resampling.BILINEAR), dtype=np.float32)
    assert np.abs(grey[0, 0].numpy() - resized).max() <= 1
    assert digits.mean == (0.485, 0.456, 0.406)


def test_some_domains_and_a_share_of_each_can_be_asked_for(tmp_path):
    write("digit_domains", tmp_path, train=4, test=2)
    digits = load("digit_domains", tmp_path, domains=["usps", "mnist"], share=0.3)
    assert digits.domain_names == ("usps", "mnist")
    assert np.bincount(digits.domains).tolist() == [12, 12]
    assert np.bincount(digits.test_domains).tolist() == [20, 20]
    for options, message in (({"domains": ["usps", "mars"]}, "domains: "), ({"share": 0.0}, "share: ")):
        with pytest.raises(ArgumentError, match=message):
            load("digit_domains", tmp_path, **options)


def test_cifar100_has_twenty_superclasses(tmp_path):
    write("cifar100", tmp_path)
    fine, coarse = load("cifar100", tmp_path), load("cifar100", tmp_path, superclasses=True)
    assert coarse.num_classes == 20
    # the writer puts fine class f into superclass f // 5
    assert torch.equal(coarse.targets, fine.targets // 5)
    assert torch.equal(coarse.inputs, fine.inputs)


def test_cinic10_is_packed_or_not_the_same(tmp_path):
    write("cinic10", tmp_path)
    packed, loose = load("cinic10", tmp_path), load("cinic10", tmp_path, packed=False)
    rows = torch.arange(40)
    assert torch.equal(packed.inputs.index_select(0, rows), loose.inputs.index_select(0, rows))
    path = tmp_path / "cinic-10/train/deer/cifar10-train-1.png"
    row = int(torch.nonzero(packed.targets == CINIC_CLASSES.index("deer"))[1])
    assert np.array_equal(levels(packed, packed.inputs)[row].numpy().transpose(1, 2, 0), np.asarray(Image.open(path)))


def test_cinic10_s_third_part_is_left_trained_on_or_set_aside(tmp_path):
    write("cinic10", tmp_path, train=3)
    assert len(load("cinic10", tmp_path, valid="train").targets) == 60
    assert load("cinic10", tmp_path, valid="own").validation.tolist() == list(range(30, 60))
    assert load("cinic10", tmp_path).validation is None


def test_a_class_that_lacks_a_image_is_named(tmp_path):
    write("cinic10", tmp_path, train=1)
    with pytest.raises(DataError, match=r"train/airplane is damaged: it holds 1 images, expected 9,000"):
        data.load("cinic10", tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    WRITERS["tiny_imagenet"](root, 2, 1, np.random.default_rng(0), classes=6)
    return root


def test_tiny_imagenet_s_test_part_is_its_annotated_val(tiny):
    dataset = load("tiny_imagenet", tiny)
    assert dataset.inputs.shape == (12, 3, 64, 64)
    ids = sorted((tiny / "tiny-imagenet-200/wnids.txt").read_text().split())
    assert dataset.classes == tuple(f"thing {wnid}" for wnid in ids)
    assert dataset.targets.tolist() == np.repeat(np.arange(6), 2).tolist()
    for row, line in enumerate((tiny / "tiny-imagenet-200/val/val_annotations.txt").read_text().splitlines()):
        file, wnid, *_ = line.split("\t")
        assert dataset.test_targets[row] == ids.index(wnid)
        pixels = np.asarray(Image.open(tiny / "tiny-imagenet-200/val/images" / file))
        assert np.array_equal(levels(dataset, dataset.test_inputs)[row].numpy().transpose(1, 2, 0), pixels)


def test_tiny_imagenet_is_held_to_its_classes_and_annotations(tiny, tmp_path):
    with pytest.raises(DataError, match=r"wnids.txt is damaged: it names 6 classes, expected 200"):
        data.load("tiny_imagenet", tiny)
    WRITERS["tiny_imagenet"](tmp_path, 1, 1, np.random.default_rng(0), classes=2)
    path = tmp_path / "tiny-imagenet-200/val/val_annotations.txt"
    path.write_text(path.read_text() + "val_2.JPEG\tn99999999\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations.txt is damaged: line 3 "):
        load("tiny_imagenet", tmp_path)


@pytest.fixture(scope="module")
def images_of_pacs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pacs")
    write("pacs", root, train=2, test=1)
    return root


@pytest.mark.slow
def test_pacs_trains_on_two_domains_sets_one_aside_and_tests_on_the_last(images_of_pacs):
    pacs = load("pacs", images_of_pacs, size=16, leave_out=["giraffe"])
    assert pacs.domain_names == ("art_painting", "cartoon", "photo", "sketch")
    trained = np.setdiff1d(np.arange(len(pacs.targets)), pacs.validation)
    assert np.bincount(pacs.domains[trained], minlength=4).tolist() == [0, 21, 0, 21]
    assert np.bincount(pacs.domains[pacs.validation], minlength=4).tolist() == [18, 0, 0, 0]
    assert np.bincount(pacs.test_domains, minlength=4).tolist() == [0, 0, 18, 0]
    assert pacs.test_targets.bincount(minlength=7).tolist() == [3, 3, 0, 3, 3, 3, 3]
    assert pacs.target.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6])
    assert pacs.classes == PACS_CLASSES


def test_pacs_s_own_folds(images_of_pacs):
    pacs = load("pacs", images_of_pacs, size=16, kfold=True, validation_domain=None, train=["photo"], test="sketch")
    # of each class the writer's first two images train, the third is for validation, and all are the test part
    assert len(pacs.targets) == 21
    assert pacs.validation.tolist() == list(range(14, 21))
    assert len(pacs.test_targets) == 21
    assert load("pacs", images_of_pacs, size=16, validation_domain=None).validation is None


BAD_PACS = [
    ({"train": ["photo"]}, "train, validation_domain, test: expected domains among"),
    ({"test": "paint"}, "train, validation_domain, test: "),
    ({"leave_out": ["cow"]}, "leave_out: got 'cow'"),
    ({"size": 0}, "size: input should be greater than or equal to 1 .got 0."),
]


@pytest.mark.parametrize(("options", "message"), BAD_PACS)
def test_domains_classes_and_sizes_that_do_not_exist_are_named(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        load("pacs", tmp_path, **options)


def test_pacs_is_held_to_its_number_of_images(images_of_pacs):
    with pytest.raises(DataError, match=r"sketch is damaged: it holds 21 images, expected 3,929"):
        data.load("pacs", images_of_pacs)


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    root = tmp_path_factory.mktemp("traps")
    WRITERS["iwildcam"](root, 6, 2, np.random.default_rng(0), classes=5, cameras=3)
    return root


def test_iwildcam_s_training_cameras_are_natural_clients(traps):
    wild = load("iwildcam", traps, size=8)
    assert wild.client_names == ("camera 0", "camera 1", "camera 2")
    assert wild.classes == tuple(f"species {label}" for label in range(5))
    assert len(wild.targets) == 5 * 6 + 5 * 2
    assert wild.validation.tolist() == list(range(30, 40))
    assert (wild.clients[wild.validation] == -1).all()
    with (traps / "iwildcam_v2.0/metadata.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] == "train"]
    assert wild.clients[:30].tolist() == [int(row["location_remapped"]) for row in rows]
    assert wild.targets[:30].tolist() == [int(row["y"]) for row in rows]
    assert wild.target.tolist() == [0.2] * 5


def test_iwildcam_s_other_splits(traps):
    wild = load("iwildcam", traps, size=8, validation_split="id_val", test="id_test")
    assert len(wild.validation) == 5
    assert len(wild.test_targets) == 5
    assert load("iwildcam", traps, size=8, validation_split=None).validation is None
    with pytest.raises(ArgumentError, match="test: "):
        load("iwildcam", traps, test="train")


def test_iwildcam_is_held_to_its_splits_and_columns(traps, tmp_path):
    with pytest.raises(DataError, match=r"iwildcam_v2.0 is damaged: it holds 30 images, expected 129,809"):
        data.load("iwildcam", traps)
    (tmp_path / "iwildcam_v2.0").mkdir()
    (tmp_path / "iwildcam_v2.0/metadata.csv").write_text("split,y,filename\ntrain,1,a.jpg\n")
    with pytest.raises(DataError, match=r"metadata.csv is damaged: line 2 lacks one of split, location_remapped"):
        load("iwildcam", tmp_path)


def test_a_image_that_is_missing_is_named_when_images_are_packed(tmp_path):
    WRITERS["iwildcam"](tmp_path, 1, 1, np.random.default_rng(0), classes=2, cameras=1)
    (tmp_path / "iwildcam_v2.0/train/00000001.jpg").unlink()
    with pytest.raises(DataError, match=r"00000001.jpg is missing"):
        load("iwildcam", tmp_path, size=8, packed=True)


def test_ag_news_is_token_ids_of_a_vocabulary_of_the_training_text(tmp_path):
    folder = tmp_path / "ag_news_csv"
    folder.mkdir()
    (folder / "train.csv").write_text('"1","War, war","ends; not ""yet"""\n"4","Web","war (web)"\n')
    (folder / "test.csv").write_text('"2","Peace","in the web"\n')
    news = load("ag_news", tmp_path, length=6)
    # words: war , war ends not yet / web war ( web ) -> war 3, web 2, then ties alphabetically: ( ) , ends not yet
    war, web, opening, closing, comma, ends, no, yet = range(2, 10)
    assert news.inputs.tolist() == [[war, comma, war, ends, no, yet], [web, war, opening, web, closing, 0]]
    assert news.targets.tolist() == [0, 3]
    assert news.test_inputs.tolist() == [[1, 1, 1, web, 0, 0]]
    assert news.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert news.inputs.dtype == torch.int64


@pytest.mark.filterwarnings("ignore:.*have not one of the 3 words of training:fedskew.errors.DataWarning")
def test_ag_news_s_vocabulary_and_length_are_options(tmp_path):
    write("ag_news", tmp_path, train=20)
    news = load("ag_news", tmp_path, vocabulary_size=5, length=3)
    assert news.inputs.shape == (80, 3)
    # ids: padding, unknown, and the three most frequent words
    assert int(news.inputs.max()) == 4
    for options, message in (({"vocabulary_size": 2}, "vocabulary_size: "), ({"length": 0}, "length: ")):
        with pytest.raises(ArgumentError, match=message):
            load("ag_news", tmp_path, **options)


def test_the_subset_of_ag_news_is_asked_for_and_called_so(tmp_path):
    write("ag_news", tmp_path)
    assert load("ag_news", tmp_path, subset=True).name == "AG News (8.8k-row training subset)"
    assert load("ag_news", tmp_path).name == "ag_news"
    (tmp_path / "ag_news_csv/train.csv").unlink()
    with pytest.raises(DataError, match=r"train.csv is missing .*set subset = true"):
        load("ag_news", tmp_path)


def test_images_of_the_wrong_suffix_are_passed_over(tmp_path):
    write("cinic10", tmp_path, train=1, test=1)
    (tmp_path / "cinic-10/train/cat/notes.txt").write_text("")
    image(tmp_path / "cinic-10/train/cat/other.PNG", np.random.default_rng(0), 32, 32)
    assert load("cinic10", tmp_path).targets.bincount().tolist() == [1, 1, 1, 2, 1, 1, 1, 1, 1, 1]


def test_mnist_and_fashion_are_one_task_of_twenty_classes(tmp_path):
    for name in ("mnist", "fashion_mnist"):
        write(name, tmp_path, 4, 2, seed=1)
    whole, digits, garments = (load(name, tmp_path) for name in ("mnist_and_fashion", "mnist", "fashion_mnist"))
    assert whole.targets.tolist() == [*digits.targets.tolist(), *(garments.targets + 10).tolist()]
    assert whole.test_targets.bincount().tolist() == [2] * 20
    assert whole.classes == digits.classes + garments.classes
    assert torch.equal(levels(whole, whole.inputs[40:]), levels(garments, garments.inputs))
    assert abs(float(whole.inputs.mean())) < 1e-3


def clients_by_the_authors_code(labels: np.ndarray, clients: int, beta: float, smallest: float) -> list[list[int]]:
    """The rows of each client as FedVLS's generate_mnist.py draws them; NumPy's global generator there is `legacy`."""
    legacy = np.random.RandomState(1)
    kept, _ = train_test_split(np.arange(len(labels)), train_size=0.75, shuffle=True, random_state=legacy)
    own, held, fair = labels[kept], 0, len(kept) / clients
    while held < smallest:
        batches: list[list[int]] = [[] for _ in range(clients)]
        for label in range(10):
            rows = np.where(own == label)[0]
            legacy.shuffle(rows)
            shares = legacy.dirichlet(np.repeat(beta, clients))
            shares = np.array([p * (len(batch) < fair) for p, batch in zip(shares, batches, strict=True)])
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            batches = [batch + part.tolist() for batch, part in zip(batches, np.split(rows, cuts), strict=True)]
        held = min(map(len, batches))
    return [sorted(kept[batch].tolist()) for batch in batches]


def test_fedvls_mnist_is_divided_as_the_authors_code_divides_it(tmp_path):
    write("mnist", tmp_path, 30, 10)
    plain = load("mnist", tmp_path)
    pooled = torch.cat([plain.inputs, plain.test_inputs]), torch.cat([plain.targets, plain.test_targets])
    expected = clients_by_the_authors_code(pooled[1].numpy(), 4, 0.5, 20)
    made = load("fedvls_mnist", tmp_path, beta=0.5, clients=4, smallest=20)
    assert made.clients is not None
    pixels = levels(plain, pooled[0]).flatten(1)
    for client, rows in enumerate(expected):
        own = levels(made, made.inputs[torch.from_numpy(made.clients == client)]).flatten(1)
        # the code keeps another order within a client, which each epoch shuffles anyway
        assert sorted(map(tuple, own.tolist())) == sorted(map(tuple, pixels[rows].tolist()))
    assert torch.equal(made.test_inputs, made.inputs)
    aside = load("fedvls_mnist", tmp_path, beta=0.5, clients=4, smallest=20, measured="held-out")
    assert torch.equal(aside.inputs, made.inputs)
    assert len(aside.test_targets) == 100
    assert (made.mean, made.std) == ((0.5,), (0.5,))
    with pytest.raises(ArgumentError, match="beta: input should be greater than 0 .got 0.0."):
        load("fedvls_mnist", tmp_path, beta=0.0)
