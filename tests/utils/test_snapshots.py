import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER, list_snapshots, read_snapshot, save_snapshot


def test_a_snapshot_contains_every_parameter_and_buffer_its_epoch_and_metadata_and_tied_weights_once(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    snapshot = read_snapshot(save_snapshot(model, tmp_path, 12, {"seed": "5"}))
    assert (snapshot.path.name, snapshot.epoch, snapshot.metadata["seed"]) == ("epoch-0012.safetensors", 12, "5")
    written = load_file(snapshot.path)
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())
    model = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    model["second"].weight = model["first"].weight
    assert len(load_file(save_snapshot(model, tmp_path, 0))) == 1


@pytest.mark.parametrize("inner", [".", SNAPSHOT_FOLDER])
def test_snapshots_of_a_run_or_folder_are_sorted_by_epoch(inner, tmp_path):
    for epoch in (10, 0, 10_000, 2):
        save_snapshot(nn.Linear(1, 1), tmp_path / inner, epoch)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [snapshot.epoch for snapshot in list_snapshots(tmp_path)] == [0, 2, 10, 10_000]


def test_without_metadata_the_epoch_is_parsed_from_the_file_name(tmp_path):
    save_file({"weight": torch.ones(1)}, tmp_path / "epoch-7.safetensors")
    assert read_snapshot(tmp_path / "epoch-7.safetensors").epoch == 7


def test_a_failed_write_keeps_the_old_snapshot(tmp_path, monkeypatch):
    path = save_snapshot(nn.Linear(1, 1), tmp_path, 1)
    before = path.read_bytes()

    def fail(model, file, metadata):
        open(file, "wb").close()
        raise OSError("no space left on device")

    monkeypatch.setattr("hf_sphere.utils.snapshots.save_model", fail)
    with pytest.raises(OSError, match="no space"):
        save_snapshot(nn.Linear(1, 1), tmp_path, 1)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_snapshot_that_is_missing_damaged_or_without_a_valid_epoch_is_named(tmp_path):
    for metadata in (None, *({"epoch": epoch} for epoch in ("-1", "1.5", "²"))):
        save_file({"weight": torch.ones(1)}, tmp_path / "some.safetensors", metadata)
        with pytest.raises(ValueError, match=r"the epoch of .*some\.safetensors is unknown"):
            read_snapshot(tmp_path / "some.safetensors")
    with pytest.raises(FileNotFoundError, match=r"epoch-0003"):
        read_snapshot(tmp_path / "epoch-0003.safetensors")
    (tmp_path / "epoch-0003.safetensors").write_bytes(b"nothing")
    with pytest.raises(SafetensorError):
        read_snapshot(tmp_path / "epoch-0003.safetensors")
