import dataclasses
import itertools
import json
import math
import os
import shlex
from pathlib import Path

import pytest
from reproduction.old_options import rename_options, restore_options
from transformers import HfArgumentParser, TrainingArguments

from hf_sphere.data import Episodes
from hf_sphere.data.options import AugmentationOptions, ImageSourceOptions, OpenSetOptions, ValueOptions
from hf_sphere.evaluation import EvaluationOptions
from hf_sphere.training import RecipeArguments, arguments, find_task, task_names
from hf_sphere.training.tasks.classification import ImageDataArguments, ModelArguments
from hf_sphere.utils import configs
from hf_sphere.utils.arguments import given_arguments, parse_arguments


def config(tmp_path: Path, text: str, name: str = "config.yaml") -> str:
    """Write a YAML file and return its path."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def parse(*words: str) -> tuple[ModelArguments, ImageDataArguments, RecipeArguments]:
    return parse_arguments((ModelArguments, ImageDataArguments, RecipeArguments), [*words, "--output_dir", "out"])


def refusal(capsys, *words: str) -> str:
    """Parse invalid arguments, which must be a usage error, and return the message."""
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_docstring_describes_every_argument_once():
    described = [
        line.split(":")[0].strip() for line in ImageDataArguments.__doc__.split("Args:")[1].strip().splitlines()
    ]
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(ImageDataArguments))


def test_output_dir_is_required_and_looked_for_in_mistyped_options(capsys):
    for words, message in (
        ([], "--output_dir"),
        (["--outputdir", "out", "--seed", "1"], "unknown argument '--outputdir'. Did you mean output_dir or"),
        (["--help"], "--early_stopping_patience"),
    ):
        with pytest.raises(SystemExit) as stop:
            parse_arguments((RecipeArguments,), words)
        assert message in "".join(capsys.readouterr())
        assert stop.value.code == (0 if words == ["--help"] else 2)


def test_command_line_overrides_yaml_in_either_order_and_a_later_file_an_earlier_one(tmp_path):
    file, word = ["--config", config(tmp_path, "learning_rate: 0.5\nmomentum: 0.3")], ["--learning_rate", "0.25"]
    later = ["--config", config(tmp_path, "learning_rate: 0.25", "later.yaml")]
    for words in (file + word, word + file, file + later):
        args = parse(*words)[2]
        assert (args.learning_rate, args.momentum) == (0.25, 0.3)


VALUES = {
    "learning_rate": {"0.5": 0.5, "null": 1e-3, "1e-3": 1e-3, "2E-4": 2e-4, "1.0e-3": 1e-3, "3": 3.0},
    "nesterov": {"true": True, "false": False, "yes": True, "no": False},
    "head_kwargs": {f"{{delta: {text}}}": {"delta": 1e-6} for text in ("1e-6", "1.0e-6", "1E-06", "0.000001")},
    "freeze_batch_norm": {"true": True, "false": False, "null": None},
}
VALUES["head_kwargs"]["{scaling: 5.0, learn_scaling: false, widths: [1, 2]}"] = {
    "scaling": 5.0, "learn_scaling": False, "widths": [1, 2],
}  # fmt: skip


def test_values_of_yaml_and_of_the_command_line_have_their_types_and_null_is_the_default(tmp_path):
    for name, values in VALUES.items():
        for text, value in values.items():
            file = config(tmp_path, f"{name}: {text}")
            for words in (["--config", file], [f"--config={file}"], *[[f"--{name}", text]] * (text != "null")):
                parsed = parse(*words)
                assert getattr(parsed[0] if hasattr(parsed[0], name) else parsed[2], name) == value
    assert parse("--config", config(tmp_path, "# nothing yet\n")) == parse()
    assert parse("--nesterov")[2].nesterov is True
    assert parse("--head_kwargs", json.dumps({"a": [1.5, None]}))[0].head_kwargs == {"a": [1.5, None]}


def test_settings_with_old_names_have_the_digest_of_before():
    settings = {"optimizer": "sgd", "lr_scheduler_type": "plateau", "seed": 3}
    for settings["mixed_precision"] in ("bf16", "fp16", "no", None):
        assert restore_options(rename_options(settings)) == settings
    old = {"calibrate": True, "calibration_tokens": 9}
    assert restore_options(rename_options(old)) == old
    assert rename_options({"calibrate": "temperature"}) == {"calibrate": "temperature"}  # of image classification
    assert restore_options({"bf16": True}) == {"mixed_precision": "bf16"}


def test_options_that_transformers_has_have_its_defaults_where_no_result_depends_on_them():
    kinds = RecipeArguments, TrainingArguments
    ours, theirs = ({field.name: field.default for field in dataclasses.fields(kind)} for kind in kinds)
    differ = {name for name in ours.keys() & theirs if name != "output_dir" and ours[name] != theirs[name]}
    documented = {name for name in differ if f"`{name}`" in (arguments.__doc__ or "")}
    # The same by another value: no tracker, no additional checkpoints, and the batch sizes of the page.
    assert differ - documented == {
        *("report_to", "save_steps", "disable_tqdm", "per_device_train_batch_size", "per_device_eval_batch_size")
    }


def test_no_precision_is_that_of_the_launcher_and_no_tracker_and_no_clipping_are_none():
    for options, precision in (({}, None), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16"), ({"bf16": False}, "no")):
        assert RecipeArguments(output_dir="out", **options).mixed_precision == precision
    with pytest.raises(ValueError, match="fp16 and bf16 exclude each other"):
        RecipeArguments(output_dir="out", bf16=True, fp16=True)
    args = RecipeArguments(output_dir="out", report_to=["none"], max_grad_norm=0.0)
    assert (args.report_to, args.max_grad_norm) == (None, None)
    assert RecipeArguments(output_dir="out", report_to=["tensorboard"]).report_to == ["tensorboard"]


TASKS = [find_task(name) for name in task_names()]
OPTIONS = {kind for task in TASKS for kind in task.arguments} | {ImageSourceOptions, AugmentationOptions}
OPTIONS |= {OpenSetOptions, ValueOptions, EvaluationOptions}


@pytest.mark.parametrize("kind", sorted(OPTIONS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_options_are_parsed_by_the_parser_of_transformers(kind):
    required = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory]
    words, given = [word for name in required for word in (f"--{name}", "given")], dict.fromkeys(required, "given")
    if kind is ModelArguments:
        words += ["--head_kwargs", "{scaling: 5.0}", "--class_weights", "balanced", "--embedding_dim", "3"]
        given |= {"head_kwargs": {"scaling": 5.0}, "class_weights": "balanced", "embedding_dim": 3}
    parser = HfArgumentParser(kind)
    (parsed,) = parser.parse_args_into_dataclasses(words)
    assert parsed == kind(**given)
    assert parser.format_help()


def test_list_in_yaml_may_be_a_single_value_and_is_replaced_on_the_command_line(tmp_path):
    for text, value in {"[2, 4]": [2, 4], "3": [3]}.items():
        words = ["--config", config(tmp_path, f"lr_milestones: {text}"), "--lr_scheduler_type", "multistep"]
        assert parse(*words)[2].lr_milestones == value
        assert parse(*words, "--lr_milestones", "5", "6", "7")[2].lr_milestones == [5, 6, 7]
        assert parse(*words[:2], "--lr_scheduler_type", "cosine")[2].lr_milestones is None  # idle there


def test_values_in_yaml_are_not_parsed_as_words_of_a_command_line(tmp_path, capsys):
    args = parse("--config", config(tmp_path, "report_to: [tensorboard, --overwrite_output_dir]\nweight_decay: 1"))[2]
    assert (args.report_to, args.overwrite_output_dir) == (["tensorboard", "--overwrite_output_dir"], False)
    assert isinstance(args.weight_decay, float)
    for text in ("seed: '1'", "seed: 1.0", "nesterov: 1", "learning_rate: true", "optim: [sgd]", "lr_milestones: []"):
        file = config(tmp_path, text)
        assert f"{file}: {text.partition(':')[0]} must be o" in refusal(capsys, "--config", file)


def test_dashes_of_names_are_underscores_but_not_those_of_texts():
    args = parse("--label-column-name", "--two-words of-it", "--cache-dir=a-b/c-d")[1]
    assert (args.label_column_name, str(args.cache_dir)) == ("--two-words of-it", "a-b/c-d")


UNCLEAR = {
    "head_kwargs: &a {scaling: 5.0}": "anchors and aliases are not supported",
    "seed: 1\nmomentum: 0.5\nseed: 2": "the key 'seed' occurs twice at line 3",
    "head_kwargs: {no: 1}": "a key is not a text",
    "seed: 010": "010 would be a number of base 8 or 60; write it without leading zeros, or quote it at line 1",
    "lr_milestones: [5, -0_12]": "-0_12 would be a number of base 8 or 60",
    "learning_rate: 1:30": "1:30 would be a number of base 8 or 60",
    "head_kwargs: {scale: 1:30.5}": "1:30.5 would be a number of base 8 or 60",
    "just words": "the configuration {file} must be a mapping",
    "learning_rate: [0.1": "cannot read the configuration {file}",
    "leraning_rate: 0.1": "unknown key 'leraning_rate' in {file}. Did you mean learning_rate",
    "zzzzzz: 0.1": "unknown key 'zzzzzz' in {file}. The keys are: ",
    "num_train_epochs: many": "num_train_epochs must be of type int; got 'many'",
    "lr_scheduler_type: cosine\nlr_milestones: [5, 6]": "lr_milestones [5, 6] has no effect without lr_scheduler_type",
}


@pytest.mark.parametrize("text", UNCLEAR, ids=list(UNCLEAR.values()))
def test_a_configuration_that_is_unclear_is_refused_by_its_name(tmp_path, capsys, text):
    file = config(tmp_path, text)
    assert UNCLEAR[text].format(file=file) in refusal(capsys, "--config", file)


@pytest.fixture
def tables(tmp_path, monkeypatch) -> Path:
    """Folder of tables, without any, in place of that of the library."""
    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.setattr(configs, "TABLES", folder)
    return folder


TABLE = "base: {seed: 1}\nmnist: {momentum: 0.5, runs: {mnist-a: {}, mnist-b: {momentum: 0.2, base: %s}}}\n"
FILE = "hf_sphere/configs/d.yaml"
NONE = "there is no configuration or file"


WRONG_TABLES = [
    ("mnist-c", TABLE % "mnist-a", f"{NONE} 'mnist-c'; the nearest are d/mnist-b, d/mnist-a."),
    ("mnist-b", TABLE % "mnist-x", f"run mnist-b of {FILE}, base: {NONE} 'mnist-x'; the nearest are d/mnist"),
    ("mnist-b", TABLE % "[1]", f"run mnist-b of {FILE}: base must be the name of a configuration; got [1]."),
    ("a", "base: {}\ng: {runs: {a: {seed: b}}}", f"run a of {FILE}: seed must be of type int; got 'b'."),
    ("a", "base: {seed: -1}\ng: {runs: {a: {}}}", f"group base of {FILE}: seed must be at least 0"),
    ("mnist-b", TABLE % "d/mnist-b", f"run mnist-b of {FILE}: its base leads back to itself."),
    ("a", "g: {base: h}\nh: {base: g, runs: {a: {}}}", f"group h of {FILE}: its base leads back to itself."),
    ("a", "g: {runs: {a: {}}}", f"group g of {FILE}, base: {NONE} 'base'"),
    ("a", "g: {runs: {a: 3}}", f"run a of {FILE} must be a mapping of arguments to values; got 3."),
    ("a", "base: {}\ng: {runs: {a: {sed: 1}}}", f"unknown key 'sed' in run a of {FILE}. Did you mean seed"),
    ("a", "base: {lr: 1, recipe: x}\ng: {runs: {a: {}}}", f"key 'lr' in group base of {FILE}, which is for x."),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG_TABLES)
def test_a_wrong_name_or_table_is_refused(tables, capsys, name, text, message):
    (tables / "d.yaml").write_text(text)
    assert message in refusal(capsys, "--config", name)


def test_a_name_in_two_tables_is_ambiguous_and_neither_a_missing_file_nor_a_pipe_is_read(tables, capsys, tmp_path):
    for table in ("d", "e"):
        (tables / f"{table}.yaml").write_text(TABLE % "mnist")
    assert "'mnist-a' is ambiguous: d/mnist-a or e/mnist-a." in refusal(capsys, "--config", "mnist-a")
    assert parse("--config", "e/mnist-b")[2].momentum == 0.2
    assert f"{NONE} '{tmp_path / 'none.yaml'}'" in refusal(capsys, "--config", str(tmp_path / "none.yaml"))
    os.mkfifo(tmp_path / "config.yaml")  # reading it would wait for a writer
    assert "is not a regular file" in refusal(capsys, "--config", str(tmp_path / "config.yaml"))


def test_a_file_starts_from_its_base_and_writes_to_a_folder_of_its_own_name(tables, capsys, tmp_path, monkeypatch):
    (tables / "d.yaml").write_text(TABLE % "mnist-a")
    for base in ("mnist-b", config(tmp_path, "base: d/mnist-b\nmomentum: null", "first.yaml")):
        file = config(tmp_path, f"base: {base}\nlearning_rate: 2.0", "own.yaml")
        args = parse_arguments((RecipeArguments,), ["--config", file])[0]
        assert (args.seed, args.learning_rate, args.output_dir) == (1, 2.0, "outputs/own")
        assert args.momentum == (0.2 if base == "mnist-b" else RecipeArguments("out").momentum)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")  # a base is relative to the file that names it
    config(tmp_path, "base: mnist-b", "first.yaml")
    config(tmp_path, "base: first.yaml\nlearning_rate: 2.0", "own.yaml")
    assert parse("--config", "../own.yaml")[2].momentum == 0.2
    config(tmp_path, "rotation: 5.0", "first.yaml")
    without_output = parse_arguments((AugmentationOptions,), ["--config", config(tmp_path, "base: first.yaml")])
    assert without_output[0].rotation == 5.0
    file = config(tmp_path, "base: ./missing.yaml")
    assert f"{file}, base: there is no configuration or file './missing.yaml'" in refusal(capsys, "--config", file)


@pytest.mark.parametrize("configs", [("first", "own"), ("own", "first")])
def test_the_output_dir_of_one_configuration_is_not_replaced_by_the_name_of_another(tables, tmp_path, configs):
    (tables / "d.yaml").write_text(TABLE % "mnist-a")
    files = {
        "first": config(tmp_path, "output_dir: there", "first.yaml"),
        "own": config(tmp_path, "base: mnist-b", "own.yaml"),
    }
    words = [word for name in configs for word in ("--config", files[name])]
    assert parse_arguments((RecipeArguments,), words)[0].output_dir == "there"


def test_a_recipe_refuses_the_configurations_of_others(tables, tmp_path, capsys):
    (tables / "d.yaml").write_text("base: {recipe: train_few_shot}\ng: {runs: {a: {}}}")
    with pytest.raises(SystemExit):
        parse_arguments((RecipeArguments,), ["--config", "a"], recipe="train_c")
    assert f"error: run a of {FILE} is for hf-sphere train few-shot." in capsys.readouterr().err
    file = config(tmp_path, "base: a\nrecipe: null")
    for words, recipe in ((["a"], "train_few_shot"), (["a"], None), ([file], "train_c")):
        parse_arguments((RecipeArguments,), ["--config", *words], recipe=recipe)


@pytest.mark.parametrize("text", ["1e-3", "Infinity", "no", "null", "{a: 1}"])
def test_the_printed_configuration_is_the_whole_and_can_be_read_again(tables, tmp_path, capsys, text):
    (tables / "d.yaml").write_text(TABLE % "mnist-a")
    options = f"{{scaling: 1e-3, text: '{text}', infinite: .inf}}"
    words = ["--config", "mnist-b", "--image_size", "8", "9", "--head_kwargs", options, "--backbone", text]
    with pytest.raises(SystemExit) as stop:
        parse(*words, "--print_config")
    assert not stop.value.code
    assert parse("--config", config(tmp_path, capsys.readouterr().out)) == parse(*words)


MAPPINGS = ("abc", "[1, 2]", "[]", "[ab]", "{scaling: 5", "{a: 1, a: 2}", "{1: 2}")
FORM = "expected a mapping such as '{scaling: 5.0}'"
USAGE_ERRORS = {
    "--leraning-rate 0.1": "unknown argument '--leraning_rate'. Did you mean learning_rate",
    "--diagnostics_steps 10": "diagnostics_steps 10 has no effect without report_to",
    "--learning 0.1": "unknown argument '--learning'",
    "stray": "unknown argument 'stray'",
    "--num_train_epochs many": "error: argument --num_train_epochs: invalid int value: 'many'",
    **{f"--head_kwargs '{word}'": f"argument --head_kwargs: {FORM}; got '{word}'" for word in MAPPINGS},
    "--eval_split test --eval_fraction 0.3": "eval_fraction and eval_split exclude each other",
    "--eval_split test --eval_seed 1": "eval_seed and eval_split exclude each other",
    f"--learning_rate {10**400}": "learning_rate must be",
    "--optim=adamm": "invalid choice: 'adamm'",
    "--optim adamm": "Did you mean adam?",
    "--head arcfase": "Did you mean arcface?",
    "--lr_scheduler_type multistep": "multistep needs lr_milestones",
    "--lr_scheduler_type reduce_lr_on_plateau --warmup_epochs 1": "and lr_scheduler_type reduce_lr_on_plateau exclude",
}


@pytest.mark.parametrize("words", USAGE_ERRORS)
def test_usage_error_names_the_argument_and_the_remedy(capsys, words):
    message = refusal(capsys, *shlex.split(words))
    assert [part for part in ("error: ", USAGE_ERRORS[words]) if part not in message] == []
    assert "usage:" not in message


def test_invalid_value_error_names_the_argument():
    for name, value in {"save_steps": 0, "num_train_epochs": -1, "ema_decay": 1.0, "learning_rate": math.nan}.items():
        with pytest.raises(ValueError, match=rf"^{name} must .* got {value}"):
            RecipeArguments(output_dir="out", **{name: value})


# Episodes

EPISODES = {"episode_classes": 32, "episode_examples": 4, "episodes_per_epoch": 100}


def test_episodes_are_optional_and_whole_and_those_that_lack_numbers_are_rejected(tmp_path):
    assert parse()[1].episodes is None
    data = parse("--config", config(tmp_path, "\n".join(f"{name}: {value}" for name, value in EPISODES.items())))[1]
    assert data.episodes == Episodes(classes=32, examples=4, count=100)
    for given in (names for n in (1, 2) for names in itertools.combinations(EPISODES, n)):
        with pytest.raises(ValueError, match=f"({'|'.join(given)}) .* has no effect without episode"):
            ImageDataArguments(**{name: EPISODES[name] for name in given})


def test_given_arguments_include_those_equal_to_the_default(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 0\nlabel_noise: 0.0\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--image-size", "8", "--eval_split=test", "--no_horizontal_flip"]
    assert given_arguments(words) == {"config", "seed", "label_noise", "image_size", "eval_split", "horizontal_flip"}


def test_an_output_in_the_folder_of_the_data_is_refused_and_beside_it_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "a").mkdir(parents=True)
    kinds = (ImageDataArguments, RecipeArguments)
    for output in ("photos2/run", "run", "photos/../run"):
        assert parse_arguments(kinds, ["--dataset_name", "photos", "--output_dir", output])[1].output_dir == output
    for output in ("photos/run", "photos", "photos/../photos/a/run"):
        with pytest.raises(SystemExit):
            parse_arguments(kinds, ["--dataset_name", "photos", "--output_dir", output])
        assert f"--output_dir {output} is in the folder of the data, photos" in capsys.readouterr().err


def test_an_option_that_only_another_one_reads_is_refused_without_it(capsys):
    for words, others in {
        ("--lr_milestones", "2", "4"): "lr_scheduler_type multistep",
        ("--lr_step_epochs", "2"): "lr_scheduler_type step",
        ("--lr_gamma", "0.5"): "lr_scheduler_type step or lr_scheduler_type multistep or lr_scheduler_type reduce_lr",
        ("--lr_patience", "2"): "lr_scheduler_type reduce_lr_on_plateau",
        ("--corruption_seed", "2"): "sample_classes or label_noise or shuffled_pixels",
    }.items():
        said = refusal(capsys, *words, "--lr_scheduler_type", "cosine")
        assert f"{words[0][2:]} " in said
        assert f" has no effect without {others}" in said
    assert parse("--lr_scheduler_type", "step", "--lr_gamma", "0.5")[2].lr_gamma == 0.5
    assert parse("--lr_scheduler_type", "cosine", "--lr_gamma", "0.1")[2].lr_gamma == 0.1  # the default
