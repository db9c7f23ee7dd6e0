import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from doubles import Marker
from small_runs import make_model

from hf_sphere.training import CheckpointError, RunState
from hf_sphere.training.checkpoints import find_checkpoint, load_checkpoint, save_checkpoint, write_model_files
from hf_sphere.training.optimization import AVERAGE_FILE, start_average
from hf_sphere.training.output_dir import list_checkpoints, prepare_output_dir
from hf_sphere.utils.files import write_manifest


@pytest.fixture
def accelerator() -> Accelerator:
    """An accelerator with a prepared model and optimizer."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    return accelerator


@pytest.fixture
def save(accelerator, tmp_path) -> Callable[..., Path]:
    """Save checkpoints of the given steps below `tmp_path`; return the last one."""

    def save_steps(*steps: int, keep: int = 100) -> Path:
        return [save_checkpoint(accelerator, tmp_path, RunState(step=step), keep) for step in steps][-1]

    return save_steps


def remove_half(folder: Path) -> None:
    """Remove the first file of a folder, and end."""
    (folder / "manifest.json").unlink()
    raise KeyboardInterrupt


@pytest.fixture
def full_disk(accelerator, monkeypatch) -> None:
    """Simulate a full disk halfway through a checkpoint."""

    def write_half(folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", write_half)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_state_weights_and_random_numbers_round_trip(accelerator, tmp_path):
    state = RunState(step=7, epoch=1, batch=2, totals={"batches": 2.0, "loss": 0.1 + 0.2}, best_metric=1 / 3)
    state.best_epoch, state.seconds, state.scheduler = 1, 1.5, {"best": float("-inf"), "last_epoch": 7}
    state.history = [{"epoch": 1.0, "train_loss": 2 / 3}]
    (model,) = accelerator._models
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint = save_checkpoint(accelerator, tmp_path, state, 1)
    expected = torch.rand(3)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    torch.manual_seed(99)
    assert load_checkpoint(accelerator, checkpoint) == state
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rotation_keeps_the_newest_checkpoints_and_the_one_just_written_despite_later_steps(save, tmp_path):
    assert save(8, 9, 10, 11, keep=2) == tmp_path / "checkpoint-11"
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]
    save(10, 20)
    save(15, keep=1)  # as after resuming from checkpoint-10
    assert names(tmp_path) == ["checkpoint-15"]


@pytest.mark.parametrize("step", [1, 4])
def test_full_disk_leaves_the_earlier_checkpoints_unchanged(save, request, tmp_path, step):
    before = contents(save(1, 3).parent)
    request.getfixturevalue("full_disk")
    with pytest.raises(CheckpointError, match=rf"could not write {tmp_path}/checkpoint-{step}; .*No space left"):
        save(step, keep=1)
    assert contents(tmp_path) == before


def test_a_run_killed_while_it_removes_a_checkpoint_leaves_nothing_of_it_after_it_is_resumed(
    save, tmp_path, monkeypatch
):
    save(1, 2)
    monkeypatch.setattr("shutil.rmtree", remove_half)
    with pytest.raises(KeyboardInterrupt):
        save(3, keep=1)
    monkeypatch.undo()
    prepare_output_dir(tmp_path, overwrite=False, resume=True)
    assert {path.name for path in tmp_path.glob("*checkpoint-*")} == {"checkpoint-3"} | {
        path.name for path in list_checkpoints(tmp_path)
    }


def test_only_complete_checkpoints_are_listed_by_step_and_the_error_names_them(save, tmp_path):
    (save(5) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"latest is not a complete checkpoint .* there is none in {tmp_path}"):
        find_checkpoint("latest", tmp_path)
    (tmp_path / "checkpoint-3").touch()
    for name in (".checkpoint-2.unfinished", "checkpoint-best", "checkpoint-999"):
        (tmp_path / name).mkdir()
    save(9, 20, 100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-100"
    assert find_checkpoint(str(tmp_path / "checkpoint-9"), tmp_path / "another run") == tmp_path / "checkpoint-9"
    with pytest.raises(CheckpointError, match=rf"checkpoint-8 is not a complete checkpoint.*{tmp_path}/checkpoint-9, "):
        find_checkpoint(str(tmp_path / "checkpoint-8"), tmp_path)


def test_missing_or_damaged_files_are_reported_with_their_checkpoint(accelerator, save):
    checkpoint = save(3)
    for file in ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "trainer_state.json", "manifest.json"]:
        whole = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=f"cannot load {checkpoint}: {file} is"):
            load_checkpoint(accelerator, checkpoint)
        (checkpoint / file).write_bytes(whole)
    flip_bit(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: it does not match its checksum"):
        load_checkpoint(accelerator, checkpoint)
    flip_bit(checkpoint / "model.safetensors")
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=f"cannot load {checkpoint}"):
        load_checkpoint(other, checkpoint)
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save_checkpoint(accelerator, checkpoint.parent, RunState(best_metric=torch.tensor(0.5)), keep=1)


def test_averaged_weights_are_not_unpickled_as_code(accelerator, tmp_path):
    start_average(make_model(), 0.9, accelerator)
    checkpoint = save_checkpoint(accelerator, tmp_path, RunState(), keep=1)
    torch.save(Marker(tmp_path / "executed"), checkpoint / AVERAGE_FILE)
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError, match="cannot load"):
        load_checkpoint(accelerator, checkpoint)
    assert not (tmp_path / "executed").exists()


def test_model_files_are_written_to_the_folder_and_a_failed_write_leaves_them_unchanged(tmp_path):
    def write(text: str) -> None:
        with write_model_files(tmp_path / "model") as unfinished:
            (unfinished / "a").write_text(text)
            if text == "new":
                raise OSError(28, "No space left on device")

    write("old")
    with pytest.raises(CheckpointError, match=r"earlier files are unchanged: .*No space left"):
        write("new")
    assert contents(tmp_path) == {"model/a": b"old"}
