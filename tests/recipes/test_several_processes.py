"""Every training recipe gives the same result on two processes, and by accumulating gradients, as on one."""

from pathlib import Path

import pytest
from accelerate.state import PartialState
from training_runs import TINY_BERT, assert_same_run, forget, load_recipe
from two_processes import run_two, sharding_accelerator

from hf_sphere.training import run

pytestmark = pytest.mark.slow

# Models without batch norm and dropout, and no augmentation, since that depends on the batch.
_DIGITS = ["--dataset_name", "digits", "--max_train_samples", "240", "--backbone", "linear_embedding"]
_DIGITS += ["--backbone_kwargs", "{width: 32}", "--embedding_dim", "8"]
_VALUES = ["--computed_value", "slant", "--out_of_range", "clip"]
_SUM = ["--loss_reduction", "sum", "--learning_rate", "0.002"]
_EPISODES = ["--train_classes", "6", "--way", "3", "--shot", "2", "--query", "5", "--episodes_per_epoch", "20"]
_TEXT = ["--model_name_or_path", str(TINY_BERT), "--from_scratch", "--spherized", "--dataset_name", "TEXTS"]
_TEXT += ["--max_seq_length", "32", "--max_train_samples", "80", "--max_eval_samples", "41"]

BATCH, EPISODES = "--per_device_train_batch_size", "--episodes_per_step"
# With the default scale, differences of rounding grow.
_ARCFACE = ["--head", "arcface", "--head_kwargs", "{log_temperature: -2.773}"]
RUNS = {
    "train_image_classification": ([*_DIGITS, "--head", "vmf"], BATCH, 24),
    "train_image_regression": ([*_DIGITS, *_VALUES], BATCH, 24),
    "train_joint_prediction": ([*_DIGITS, *_VALUES, "--head", "prototype", *_SUM], BATCH, 24),
    "train_image_retrieval": ([*_DIGITS, "--train_classes", "6", *_ARCFACE], BATCH, 24),
    "train_few_shot": ([*_DIGITS, *_EPISODES, "--eval_episodes", "21"], EPISODES, 2),
    "train_masked_lm": (_TEXT, BATCH, 8),
}
"""Command line, and the option for the examples per step with its value on one process; two epochs of ten steps."""


SHARDED = ["train_image_regression", "train_few_shot"]
"""Recipes whose model FSDP2 supports; they also run with it."""


def run_recipe(name: str, folder: Path, texts: Path, *, divisor: int = 1, accumulated: int = 1) -> None:
    words, option, size = RUNS[name]
    words = ["--learning_rate", "0.02", *(str(texts) if word == "TEXTS" else word for word in words)]
    words += [option, str(size // divisor), "--gradient_accumulation_steps", str(accumulated)]
    words += ["--optim", "sgd", "--num_train_epochs", "2", "--disable_tqdm"]
    load_recipe(name).main([*words, "--cache_dir", str(folder.parent / "decoded"), "--output_dir", str(folder)])


def run_all(rank: int, folder: Path, texts: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # so that the next recipe does not connect again
        patch.setattr(PartialState, "destroy_process_group", lambda self, group=None: None)
        for name in RUNS:
            run_recipe(name, folder / name, texts, divisor=2)
            forget()
        patch.setattr(run, "Accelerator", sharding_accelerator)
        for name in SHARDED:
            run_recipe(name, folder / "sharded" / name, texts, divisor=2)
            forget()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory, texts) -> Path:
    """A folder with the runs of all recipes on two processes."""
    folder = tmp_path_factory.mktemp("two_processes")
    run_two(run_all, folder, texts)
    return folder


@pytest.fixture(scope="module", params=RUNS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def of_one_process(name, run_alone, texts, tmp_path_factory) -> Path:
    """The folder of a run on one process."""
    folder = tmp_path_factory.mktemp("one_process") / name
    run_alone(run_recipe, name, folder, texts)
    return folder


def test_two_processes_match_one(name, of_two_processes, of_one_process):
    """The evaluation splits have odd sizes, so a repeated or missing example would change the metrics."""
    assert_same_run(of_two_processes / name, of_one_process, 20)


@pytest.mark.parametrize("name", SHARDED, indirect=True)
def test_two_processes_with_a_sharded_model_match_one(name, of_two_processes, of_one_process):
    assert_same_run(of_two_processes / "sharded" / name, of_one_process, 20)


def test_accumulated_gradients_match_one_batch(name, of_one_process, run_alone, texts, tmp_path):
    run_alone(run_recipe, name, tmp_path / name, texts, divisor=2, accumulated=2)
    assert_same_run(tmp_path / name, of_one_process, 20)
