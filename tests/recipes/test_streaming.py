"""Training from the shards of a stream, on one process and on two."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training_runs import assert_same_run, load_recipe
from two_processes import run_two

pytestmark = pytest.mark.slow

# Without random changes of batches, since these depend on the process.
_WORDS = """--streaming --eval_split train --image_size 16 --num_channels 3 --image_mean 0.5 --image_std 0.25
--class_names 0 1 2 --max_train_samples 48 --max_eval_samples 47 --backbone linear_embedding --embedding_dim 8
--optim sgd --learning_rate 0.01 --random_resized_crop 0.3 --horizontal_flip --rand_augment 1 5
--dataloader_num_workers 0 --num_train_epochs 2 --disable_tqdm"""


def train(shards: Path, output: Path, batch_size: int, *more: str) -> None:
    words = [*_WORDS.split(), "--backbone_kwargs={width: 32}", f"--dataset_name={shards}", f"--output_dir={output}"]
    recipe = load_recipe("train_image_classification")
    recipe.main([*words, "--per_device_train_batch_size", str(batch_size), *more])


def train_in_parallel(rank: int, shards: Path, output: Path) -> None:
    train(shards, output, 6)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A folder of three tar files of different sizes with 48 images of three classes."""
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for shard, numbers in enumerate(np.split(np.arange(48), [20, 27])):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as archive:
            for number in numbers:
                buffer = io.BytesIO()
                pixels = random.integers(0, 150, (24, 20, 3)) + 50 * (number % 3)
                Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
                for suffix, content in (("png", buffer.getvalue()), ("cls", str(number % 3).encode())):
                    entry = tarfile.TarInfo(f"{number:03d}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return folder


@pytest.fixture(scope="module")
def of_one_process(shards, run_alone, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    run_alone(train, shards, folder, 12)
    return folder


def test_two_processes_match_one(shards, of_one_process, tmp_path):
    run_two(train_in_parallel, shards, tmp_path / "run")
    assert_same_run(tmp_path / "run", of_one_process, 8)


def test_a_run_resumed_in_the_middle_of_an_epoch_matches_one(shards, of_one_process, run_alone, tmp_path):
    run_alone(train, shards, tmp_path / "run", 12, "--stop_after_steps", "6", "--save_steps", "3")
    run_alone(train, shards, tmp_path / "run", 12, "--resume_from_checkpoint", "latest")
    assert_same_run(tmp_path / "run", of_one_process, 8)


def test_what_needs_all_labels_is_refused(shards, run_alone, tmp_path):
    for words, error, message in (
        (["--class_weights", "balanced"], ValueError, "class_weights balanced needs all labels"),
        (["--calibrate", "vector", "--validation_split", "train"], ValueError, "validation images of all classes"),
    ):
        with pytest.raises(error, match=message):
            run_alone(train, shards, tmp_path / "run", 12, *words)
