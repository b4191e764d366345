"""What pictures and texts of all sites look like, as sums, in the cells that `deploy init` writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import FOUR, NAMES, federate, fedskew, init, tree

from fedskew.data import Profile, in_own_units, load
from fedskew.deploy import Agreement, Disclosure, SiteData
from fedskew.deploy._moments import PROFILE_FORM, encoded_profile
from fedskew.errors import ConfigError

DIGITS = load("digits", rng=np.random.default_rng(0))
CELLS = {"brightness": (0.3, 0.03), "contrast": (0.37, 0.02)}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_pictures_of_all_sites_are_those_of_one_place_and_watch_compares_with_them(
    tmp_path: Path, masked: bool
) -> None:
    agreed: dict[str, Any] = {"updates": "masked", "round_timeout": 0.5} if masked else {"input_profile": "summed"}
    config = {**tree("fedavg", rounds=1, weight_limit=0.5), "engine": {"updates": agreed.get("updates", "plain")}}
    federation = federate(tmp_path, config, FOUR if masked else NAMES, input_cells=CELLS, **agreed)
    federation.run(federation.grid()).run(resume=True)
    pixels = torch.from_numpy(np.load(tmp_path / "whole.npz")["x"])
    expected = Profile.of(Profile.columns(pixels.reshape(-1, *federation.agreement.shape)), CELLS)
    found = Profile.of_plain(json.loads((federation.run_folder / "inputs.json").read_text()))
    assert (found.samples, found.cells) == (len(pixels), CELLS)
    moved = sum(abs(np.subtract(found.counts[name], expected.counts[name])).sum() for name in CELLS)
    assert moved <= 4  # by rounding, as sites take them back from normalised ones
    np.testing.assert_allclose(found.products, expected.products, rtol=0.01)
    federation.config.write(federation.run_folder / "config.toml")
    np.savez(tmp_path / "new.npz", x=np.minimum(pixels[:80].numpy() * 1.6, 1.0))
    code, said = fedskew("watch", federation.run_folder, tmp_path / "new.npz")
    assert code == 0, said
    assert "Not the samples of training" in said
    (what,) = [
        one.what for one in Disclosure.all_of(federation.config, federation.agreement) if "ten cells" in one.what
    ]
    assert "each of ten cells of each of brightness, contrast, and how each two numbers go together" in what


@pytest.mark.slow
def test_cells_are_those_of_the_samples_that_init_reads(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / "raw" / kind).mkdir(parents=True)
        for at in range(6):
            (tmp_path / "raw" / kind / f"{at}.txt").write_text("one two three " * (at + 1) + kind)
    texts = {"data": {"name": "folder", "root": str(tmp_path / "raw"), "length": 20}, "model": {"name": "fasttext"}}
    partition, arrays, features = {"rule": "iid", "clients": 2}, tmp_path / "all.npz", np.random.default_rng(0)
    np.savez(arrays, x=features.normal([1, 5], [2, 0.1], (40, 2)), y=np.arange(40) % 2)
    for name, given, columns in (
        ("pictures", {"data": {"name": "digits"}, "partition": partition}, {"brightness", "contrast"}),
        (
            "features",
            {"data": {"name": "npz", "root": str(arrays)}, "partition": partition},
            {"feature 0", "feature 1"},
        ),
        ("texts", {**texts, "partition": partition}, {"words", "share of unknown words"}),
    ):
        agreement, _ = init(tmp_path / name, {**tree("fedavg", rounds=1), **given}, "--sites", "north,south")
        assert {*agreement.input_cells} == columns
        assert not agreement.sums_profile  # plain, and not asked for
        if name == "pictures":
            own = Profile.columns(DIGITS.inputs)
            mean, std = agreement.input_cells["brightness"]
            assert (mean, std) == pytest.approx((own["brightness"].mean(), own["brightness"].std()), rel=1e-3)
            continue
        place = tmp_path / name / "sites" / "north"
        shutil.copy(arrays, place / "samples.npz") if name == "features" else (tmp_path / "raw").rename(place / "texts")
        agreement = agreement.model_copy(update={"input_profile": "summed"})
        held = SiteData.load(place / "data.toml", agreement).inputs
        found = PROFILE_FORM.decode(encoded_profile(agreement, held))
        raw = in_own_units(held, agreement.mean, agreement.std)
        np.testing.assert_allclose(found, Profile.of(Profile.columns(raw), agreement.input_cells).flat(), atol=1e-3)


WRONG = [
    ({"input_cells": {"brightness": [0.5, 0.1]}}, "input_cells: expected brightness, contrast, each with a mean and a"),
    ({"input_cells": {"brightness": [0.5, 0.0], "contrast": [1.0, 1.0]}}, "input_cells: input should be greater"),
    ({"input_profile": "summed"}, "or the cells of pictures or texts"),
    ({"input_cells": CELLS, "input_profile": "summed", "label_counts": "noisy", "epsilon": 1.0}, "has no noise"),
]


@pytest.mark.parametrize(("more", "words"), WRONG, ids=[words for _, words in WRONG])
def test_cells_that_can_not_be_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Agreement.resolve({"sites": ["a", "b"], "classes": ["x", "y"], "shape": [1, 4, 4], **more})
    assert words in str(raised.value)
