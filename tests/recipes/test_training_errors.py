"""What the training tasks refuse before they train."""

import re
import shlex

import pytest
from case_selection import each
from huggingface_hub.errors import StrictDataclassError
from training_runs import QUICK_RUNS

REFUSED = {
    "classification": {
        "--backbone lenet6": "unknown backbone 'lenet6'.*lenet5",
        "--backbone facebook/no-such-model": "facebook/no-such-model is no file or folder",
        "--head spherized --head_kwargs '{scalling: 5.0}'": "'spherized' has no option scalling; .*scaling",
        "--backbone_kwargs '{breadth: 5}'": "breadth",
        "--image_column_name picture": "no image column 'picture'",
        "--label_column_name lable": "no label column 'lable'; the data has",
        "--train_split training": "no split 'training'.*train, test.*--train_split",
        "--eval_split validation": "no split 'validation'.*train, test.*--eval_split",
        "--model_name_or_path nowhere": "nowhere",
        "--train_class 4": "Did you mean train_",
        "--head_kwargs '{bias: null}'": "option bias of head 'softmax' must be of type bool; got None",
        "--head vmf --head_kwargs '{num_samples: null}'": "num_samples of head 'vmf' must be of type int; got None",
        "--label_column_name image": "class labels are integers or names",
        "--image_size 100000": "image_size must be at least 1 and at most 16384; got 100000",
        "--warmup_epochs inf": "warmup_epochs must be at least 0 and finite; got inf",
        "--lr_gamma=-1": "lr_gamma must be at least 0",
        "--lr_patience=-3": "lr_patience must be at least 0; got -3",
        "--num_train_epochs 0": "num_train_epochs 0 only evaluates a saved model",
        "--num_train_epochs=-1": "num_train_epochs must be at least 0; got -1",
        "--stop_after_steps 99999999999": "stop_after_steps must be .* at most 2147483647; got 99999999999",
        "--crop_padding 9": "crop_padding 9 exceeds what images of 8 x 8 pixels allow, 8",
        "--occlusion 9": "occlusion 9 exceeds what images of 8 x 8 pixels allow, 8",
        "--backbone conv4": "conv4",
    },
    "regression": {
        "--head softmax": "head softmax has no effect in this task",
        "--head_kwargs '{scaling: 2.0}'": "head_kwargs {'scaling': 2.0} has no effect in this task",
        "--class_weights balanced": "class_weights balanced has no effect in this task",
        "--label_smoothing_factor 0.1": "label_smoothing_factor 0.1 has no effect in this task",
        "--embedding_dim 1": "embedding_dim must be an integer of at least 2; got 1",
        "--label_column_name label": "--label_column_name label does not apply to regression",
        "--computed_value beauty": "beauty",
        "--value_column_name year": "value_column_name and computed_value exclude each other",
        "--value_range 10 -10": r"value_range must be two finite numbers, the lower one first; got \[10.0, -10.0\]",
    },
    "joint": {
        "--head softmax --loss_reduction sum": "reduction",
        "--embedding_dim 2 --head prototype": "embedding_dim .*must be an integer of at least",
        "--prototypes_file nowhere.safetensors --head prototype": r"nowhere\.safetensors",
    },
    "few_shot": {
        "--way 7": "an episode of 7 different classes cannot be drawn from 6.*--way 7 is the number",
        "--way 5": "an episode of 5 different classes cannot be drawn from 4",
        "--way 4 --validation_fraction 0.5": "an episode of 4 different classes cannot be drawn from 3",
        "--shot 50 --query 50": "100 different images of a class, but .*--shot 50 and --query 50 count images",
        "--max_eval_samples 20": "an episode takes 7 different images of a class.*use at most",
        "--validation_episodes 9": "validation_episodes 9 needs --validation_split or --validation_fraction",
        "--per_device_train_batch_size 20": "20 does not match episodes of 3 classes and 7 images",
        "--loss_reduction sum": "loss_reduction sum has no effect in this task",
        "--sample_classes 4": "--sample_classes 4 does not apply to few_shot",
        "--spherization '{scale: 5.0}'": "spherization has no option scale.*scaling",
        "--validation_split test": "all classes are divided",
        "--head vmf": "unknown argument '--head'",
    },
    "retrieval": {
        "--train_classes 10": "--train_classes 10 does not divide 10 classes.*at most 9",
        "--train_classes 1 --validation_fraction 0.5": "holds out whole classes",
        "--episode_classes 4 --episode_examples 6 --episodes_per_epoch 9": "20 does not match episodes of 4 .* of 24",
        "--episode_classes 10 --episode_examples 2 --episodes_per_epoch 1": "10 different classes cannot be drawn from",
        "--episode_classes 4": "episode_classes 4 has no effect without episode_examples",
        "--head_kwargs '{kappa: 0.7}'": "no option kappa.*kappa_confidence",
        "--head_kwargs '{kappa_confidence: 1.0}'": r"'auto', must be a number in \(0, 1\)",
        "--label_smoothing_factor 0.1": "'vmf' has no option label_smoothing",
        "--head arcface --head_kwargs '{margin: 30}'": "margin, of a cosine or an angle.*got 30",
        "--head hyperbolic --head_kwargs '{curvature: -1}'": r"curvature must be a number in \(0, inf\).*got -1",
        "--max_eval_samples 1": "each class of the evaluation images .* has a single one",
    },
    "masked_lm": {
        "--max_seq_length 65": "max_seq_length 65 exceeds the maximum of the model, 64 tokens",
        "--max_seq_length 2": "max_seq_length 2 without special tokens must be an integer of at least 1",
        "--spherization_kwargs '{scale: 1}'": "no option scale; its options are: scaling",
        "--spherized_layers 2": r"spherized_layers are \[2\], but the encoder has 2",
        "--text_column_name words": "no text column 'words'",
        "--loss_reduction sum": "loss_reduction sum has no effect in this task",
        "--layer_decay 0.5": "layer_decay 0.5 has no effect in this task",
        "--fit_spherization": "fit_spherization and from_scratch exclude each other",
        "--spherized false --spherized_layers 0": r"spherized_layers \[0\] has no effect without spherized",
        "--from_scratch false --fit_spherization --max_train_samples 2": "needs at least 65 tokens in 5 texts",
        "--objective reconstruction --mask_probability 0.3": "has no effect without objective masked",
    },
}
"""Messages by task and arguments."""


@each("words")
@pytest.mark.parametrize(("task", "words"), [(task, words) for task, table in REFUSED.items() for words in table])
def test_arguments_that_do_not_fit_are_refused(task, words, load_recipe, run_quickly, tmp_path, capsys):
    train = run_quickly(load_recipe(QUICK_RUNS[task].recipe), QUICK_RUNS[task].argv)
    with pytest.raises((ValueError, OSError, StrictDataclassError, SystemExit)) as refusal:
        train(tmp_path / "run", *shlex.split(words))
    text = " ".join(f"{refusal.value} {capsys.readouterr().err}".split())
    assert re.search(REFUSED[task][words], text), text
    assert not [*tmp_path.rglob("run.json")]
