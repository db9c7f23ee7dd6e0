import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL.Image import fromarray
from training_runs import output_on_digits
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    ConvNextImageProcessor,
    Dinov2Config,
    Dinov2Model,
    TimmWrapperConfig,
    TimmWrapperModel,
    ViTImageProcessor,
)
from two_processes import run_two

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionForRegression,
    SphereVisionImageProcessor,
    SphereVisionModel,
    SphereViTConfig,
    SphereViTForImageClassification,
)
from hf_sphere.commands.extract import main
from hf_sphere.data import sources
from hf_sphere.data.sources import load_splits
from hf_sphere.ood import fit_rejection
from hf_sphere.search import extract as extraction
from hf_sphere.search.extract import finished_batches
from hf_sphere.search.store import read_embeddings

RECIPE = "extract"

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COLUMNS = ["embedding", "label", "prediction", "confidence", "logits", "index", "row_id"]

Extract = Callable[..., Path]


def config_of(**options) -> SphereVisionConfig:
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    kind = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 7}, "num_channels": 1, "image_size": 8}
    return SphereVisionConfig(**(kind | names | options))


@pytest.fixture(scope="module")
def save(tmp_path_factory) -> Callable[..., Path]:
    """Save a model, with an image processor by default."""

    def save_model(model, *, processor: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("models") / "model"
        model.save_pretrained(folder)
        if processor:
            made = SphereVisionImageProcessor(
                num_channels=1, size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.4]
            )
            made.save_pretrained(folder)
        return folder

    return save_model


@pytest.fixture(scope="module")
def classifier(save) -> Path:
    """A digit classifier whose class names differ from those of the data."""
    torch.manual_seed(1)
    return save(SphereVisionForImageClassification(config_of(head="spherized")))


@pytest.fixture(scope="module")
def extract_in(recipe, run_main, cache, classifier) -> Extract:
    """Run the recipe on the bundled digits into a given folder."""

    def run(folder: Path, *argv: object, model: Path = classifier) -> Path:
        quick = ["--model_name_or_path", str(model), "--dataset_name", "digits", "--disable_tqdm", *cache]
        run_main(recipe, [*quick, "--output_dir", str(folder), *map(str, argv)])
        return folder

    return run


@pytest.fixture
def extract(extract_in, tmp_path) -> Extract:
    """Run the recipe into a folder below `tmp_path`."""
    return lambda *argv, name="embedded", **options: extract_in(tmp_path / name, *argv, **options)


@pytest.fixture(scope="module")
def extracted(extract_in, tmp_path_factory) -> Path:
    """The embeddings of the test split; read only."""
    return extract_in(tmp_path_factory.mktemp("extracted") / "digits-test")


@pytest.fixture
def made_up(monkeypatch) -> Callable[..., str]:
    """Register images (8, 8), or bytes that are not images, as a dataset and return its name."""

    def offer(*images, **columns) -> str:
        cells = [{"bytes": i, "path": None} if isinstance(i, bytes) else fromarray(i) for i in images]
        kinds = {name: ClassLabel(names=["a", "b"]) for name in columns}
        rows = Dataset.from_dict({"image": cells, **columns}, features=Features({"image": Image(), **kinds}))
        monkeypatch.setitem(sources.BUNDLED, "made_up", lambda: DatasetDict(test=rows))
        return "made_up"

    return offer


def gray(value: int) -> np.ndarray:
    return np.full((8, 8), value, dtype=np.uint8)


def rows_of(folder: Path, split: str = "test") -> Dataset:
    return load_dataset(str(folder))[split].with_format("torch")


# Models


def test_the_encoder_of_a_few_shot_model_is_used(extract, save):
    few_shot = SphereVisionForFewShotClassification(config_of(head=None, spherization={}))
    folder = save(few_shot)
    rows = rows_of(extract(model=folder))
    assert set(rows.column_names) == {"embedding", "label", "index", "row_id"}
    pixels = AutoImageProcessor.from_pretrained(folder)(load_splits("digits")["test"]["image"][:4], return_tensors="pt")
    with torch.no_grad():
        expected = few_shot.eval().base_model(**pixels).embeddings
    assert torch.allclose(rows[:4]["embedding"], expected, atol=1e-6)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def color_digits() -> list:
    return [image.convert("RGB") for image in load_splits("digits")["test"]["image"][:4]]


@pytest.mark.parametrize("resample", [2, 3], ids=["bilinear", "bicubic"])
@pytest.mark.parametrize("center_crop", [False, True], ids=["whole image", "center crop"])
def test_an_image_encoder_of_transformers_needs_no_training(extract, tmp_path, color_digits, center_crop, resample):
    encoder = Dinov2Model(Dinov2Config(**TINY, image_size=16, patch_size=4)).eval()
    if center_crop:
        processor = ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=0.5, resample=resample)
    else:
        processor = ViTImageProcessor(size={"height": 16, "width": 16}, resample=resample)
    for part in (encoder, processor):
        part.save_pretrained(tmp_path / "dinov2")
    rows = rows_of(extract(model=tmp_path / "dinov2"))
    assert set(rows.column_names) == {"embedding", "label", "index", "row_id"}
    with torch.no_grad():
        expected = encoder(**processor(color_digits, return_tensors="pt")).pooler_output
    torch.testing.assert_close(rows[:4]["embedding"], expected, rtol=0.01, atol=0.01)  # pixels are rounded once more


def test_an_encoder_of_timm_in_the_format_of_the_hub_is_embedded(extract, tmp_path):
    about = {"input_size": (3, 40, 48), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    config = TimmWrapperConfig(architecture="test_resnet", num_classes=0, pretrained_cfg=about)
    TimmWrapperModel(config).save_pretrained(tmp_path / "timm")
    rows = rows_of(extract("--max_samples", 4, model=tmp_path / "timm"))
    assert rows[:4]["embedding"].shape == (4, TimmWrapperModel(config).timm_model.num_features)


def test_the_embeddings_of_a_model_such_as_clip_are_those_it_compares_with_texts(extract, tmp_path, color_digits):
    parts = {"vision_config": TINY | {"image_size": 8, "patch_size": 4}, "text_config": TINY | {"vocab_size": 6}}
    clip = CLIPModel(CLIPConfig(**parts, projection_dim=6)).eval()
    processor = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, resample=2)
    for part in (clip, processor):
        part.save_pretrained(tmp_path / "clip")
    rows = rows_of(extract(model=tmp_path / "clip"))
    with torch.no_grad():
        expected = clip.get_image_features(**processor(color_digits, return_tensors="pt")).pooler_output
    torch.testing.assert_close(rows[:4]["embedding"], expected, rtol=0.01, atol=0.01)


def test_a_spherized_encoder_stores_the_predictions_of_its_head(extract, tmp_path):
    config = SphereViTConfig(**TINY, image_size=8, patch_size=4, head="spherized", num_labels=10)
    SphereViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    folder = extract(model=tmp_path / "vit")
    assert set(rows_of(folder).column_names) == set(COLUMNS)
    about = json.loads((folder / "embeddings.json").read_text())
    assert (about["backbone"], about["head"]) == ("sphere_vit", "spherized")


# Output


def test_the_columns_are_the_model_outputs_for_the_raw_images_in_split_order(extracted, classifier):
    test, rows = load_splits("digits")["test"], rows_of(extracted)
    output, labels = output_on_digits(classifier)
    torch.testing.assert_close(rows["embedding"][:], output.embeddings)
    torch.testing.assert_close(rows["logits"][:], output.logits)
    assert torch.equal(rows["prediction"][:], output.logits.argmax(-1))
    torch.testing.assert_close(rows["confidence"][:], output.logits.softmax(-1).amax(-1))
    assert rows.column_names == COLUMNS
    assert rows["index"][:].tolist() == list(range(355))
    assert torch.equal(rows["label"][:], labels)
    assert rows.features["label"] == test.features["label"]
    assert rows.features["prediction"] == ClassLabel(names=NAMES)
    expected = {"model": str(classifier), "backbone": "linear_embedding", "head": "spherized", "dataset": "digits"}
    expected |= {"split": "test", "distance": "cosine", "embedding_dim": 8, "num_images": 355}
    unset = ["dataset_config_name", "train_classes", "train_split", "image_column_name", "image_mean", "image_std"]
    assert json.loads((extracted / "embeddings.json").read_text()) == expected | dict.fromkeys(unset)


def test_the_columns_have_the_decisions_of_a_model_with_a_rejection(extract, classifier, tmp_path):
    kinds = (AutoModelForImageClassification, AutoImageProcessor)
    model, processor = (kind.from_pretrained(classifier) for kind in kinds)
    pixels = processor(load_splits("digits")["test"]["image"][:], return_tensors="pt")["pixel_values"]
    fit_rejection(model, [(pixels[255:], torch.arange(100) % 10)], 0.2, "max_logit")
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    folder = extract(model=tmp_path / "model")
    rows = rows_of(folder)
    with torch.no_grad():
        output = model.eval()(pixels)
    for name in ("known", "p_value", "class_p_values"):  # the others are equal to those of the fit, up to rounding
        torch.testing.assert_close(rows[name][:][:255], output[name][:255])
    assert read_embeddings(str(folder)).predictions.tolist() == output.logits.argmax(1).tolist()


def test_the_stored_distance_is_that_of_the_head(extract, save, classifier, monkeypatch):
    model = SphereVisionForImageClassification(config_of(head="hyperbolic", head_kwargs={"curvature": 0.5}))
    about = json.loads((extract("--max_samples", 5, model=save(model)) / "embeddings.json").read_text())
    assert (about["distance"], about["curvature"]) == ("hyperbolic", 0.5)
    head = SphereVisionForImageClassification.from_pretrained(classifier).head
    monkeypatch.setattr(type(head), "metric", lambda self: {"distance": "euclidean"})
    about = json.loads((extract("--max_samples", 5, name="euclidean") / "embeddings.json").read_text())
    assert about["distance"] == "euclidean"
    assert "curvature" not in about


def test_an_open_set_has_all_images_of_the_unseen_classes(extract, extracted, capsys):
    folder = extract("--train_classes", 6)
    assert "data      digits, split train+test: 714 images, 4 classes" in capsys.readouterr().out
    rows, splits = rows_of(folder, "train_test"), load_splits("digits")
    labels = torch.tensor([*splits["train"]["label"], *splits["test"]["label"]])
    assert rows.features["label"] == ClassLabel(names=["6", "7", "8", "9"])
    assert rows["index"][:].tolist() == (labels >= 6).nonzero()[:, 0].tolist()
    assert torch.equal(rows["label"][:] + 6, labels[labels >= 6])
    of_test = rows_of(extracted)
    behind = rows["index"][:] >= len(splits["train"])
    torch.testing.assert_close(rows["embedding"][:][behind], of_test["embedding"][:][of_test["label"][:] >= 6])
    about = json.loads((folder / "embeddings.json").read_text())
    assert (about["split"], about["train_classes"], about["num_images"]) == ("train+test", 6, 714)


@pytest.mark.parametrize(("selection", "names"), [("known", "1357"), ("unknown", "024689")])
def test_images_can_be_selected_by_whether_the_model_knows_their_class(extract, save, selection, names):
    known = {"id2label": dict(enumerate("1357")), "label2id": {name: index for index, name in enumerate("1357")}}
    model = save(SphereVisionForImageClassification(config_of(head="spherized", **known)))
    rows = rows_of(extract("--classes", selection, model=model))
    labels = load_splits("digits")["test"]["label"]
    assert rows.features["label"] == ClassLabel(names=list(names))
    assert rows["index"][:].tolist() == [index for index, label in enumerate(labels) if str(label) in names]


def test_the_batch_size_does_not_matter_and_half_precision_is_written_as_float32(extracted, extract):
    rows, others = rows_of(extracted), rows_of(extract("--batch_size", 50, name="batches"))
    torch.testing.assert_close(rows["embedding"][:], others["embedding"][:])
    assert torch.equal(rows["index"][:], others["index"][:])
    half = rows_of(extract("--bf16"))["embedding"][:]
    assert half.dtype == torch.float32
    assert not torch.equal(half, rows["embedding"][:])
    torch.testing.assert_close(half, rows["embedding"][:], rtol=0.05, atol=0.05)


def test_the_concentration_of_the_head_is_written_and_without_a_head_only_embeddings(extract, save):
    head = save(SphereVisionForImageClassification(config_of(head="vmf")))
    rows = rows_of(extract("--max_samples", 5, model=head, name="vmf"))
    assert rows.column_names == [*COLUMNS[:-2], "concentration", *COLUMNS[-2:]]
    assert rows["concentration"][:].dtype == torch.float32
    assert (rows["concentration"][:] > 0).all()
    folder = extract("--max_samples", 5, model=save(SphereVisionModel(config_of())))
    assert rows_of(folder).column_names == ["embedding", "label", "index", "row_id"]
    assert json.loads((folder / "embeddings.json").read_text())["head"] is None


def test_data_without_labels_gives_no_labels(extract, made_up, capsys):
    folder = extract("--dataset_name", made_up(gray(10), gray(200)))
    assert rows_of(folder).column_names == [name for name in COLUMNS if name != "label"]
    printed = capsys.readouterr().out
    assert "2 images, no labels" in printed
    assert f"next step hf-sphere visualize --embeddings {folder}" in printed


def test_sampled_images_keep_their_index_in_a_split_or_in_all(extracted, extract, tmp_path, capsys):
    (tmp_path / "my embeddings").mkdir()  # an empty folder is used
    folder = extract("--max_samples", 20, "--seed", 3, name="my embeddings")
    assert f"--embeddings '{folder}'" in capsys.readouterr().out
    some, rows = rows_of(folder), rows_of(extracted)
    chosen = some["index"][:]
    assert len(chosen) == 20
    torch.testing.assert_close(some["embedding"][:], rows["embedding"][:][chosen])
    assert len(rows_of(extract("--split", "all", "--max_samples", "3", name="all"), "all_splits")) == 3


def test_a_corrupt_image_is_named_or_skipped_with_the_index_of_the_others(extract, made_up, tmp_path):
    name = made_up(gray(10), b"not an image", gray(200), label=[0, 0, 1])
    with pytest.raises(ValueError, match=r"image 1 of the split cannot be decoded.*--skip_invalid"):
        extract("--dataset_name", name)
    assert not (tmp_path / "embedded").exists()
    rows = rows_of(extract("--dataset_name", name, "--skip_invalid"))
    assert rows["index"][:].tolist() == [0, 2]
    assert rows["label"][:].tolist() == [0, 1]


def test_a_summary_and_the_next_step_are_printed(extract, classifier, capsys):
    folder = extract()
    assert capsys.readouterr().out.splitlines() == [
        f"model     {classifier}: linear_embedding, spherized head, 10 classes, on cpu",
        "data      digits, split test: 355 images, 10 classes",
        f"wrote     {folder}: 355 rows of {', '.join(COLUMNS)}",
        f"next step hf-sphere evaluate --embeddings {folder}",
    ]


# Preprocessing


def test_a_model_without_image_processor_uses_its_configured_size(extract, save):
    encoder = SphereVisionModel(config_of(image_size=[6, 4]))
    argv = ["--image_mean", 0.5, "--image_std", 0.25]
    first = rows_of(extract(*argv, model=save(encoder, processor=False)))
    processor = SphereVisionImageProcessor(
        num_channels=1, size={"height": 6, "width": 4}, image_mean=[0.5], image_std=[0.25]
    )
    images = load_splits("digits")["test"]["image"][:]
    with torch.no_grad():
        expected = encoder.eval()(**processor(images, return_tensors="pt")).embeddings
    torch.testing.assert_close(first["embedding"][:], expected)


# Errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--split", "validation"], "no split 'validation'; the data has train, test. Choose one with --split"),
        (["--image_column_name", "picture"], "no image column 'picture'"),
        (["--label_column_name", "lable"], "no label column 'lable'; the data has"),
        (["--train_classes", "10"], "--train_classes 10 does not divide 10 classes"),
        (["--model_name_or_path", "nowhere"], "nowhere"),
        (["--train_split", "train", "--model_name_or_path", "nowhere"], "train has no effect without train_classes"),
        *(
            ([f"--{name}", "0"], f"{name} must be at least 1; got 0.")
            for name in ("max_samples", "batch_size", "train_classes")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_and_leave_no_folder(extract, tmp_path, argv, message, capsys):
    with pytest.raises((ValueError, OSError, SystemExit)) as refusal:
        extract(*argv)
    assert message in f"{refusal.value} {capsys.readouterr().err}"
    assert not (tmp_path / "embedded").exists()


def overflowing() -> SphereVisionModel:
    model = SphereVisionModel(config_of())
    with torch.no_grad():
        next(model.parameters()).fill_(3e38)
    return model


@pytest.mark.parametrize(
    ("make", "argv", "message"),
    [
        (None, ["--image_mean", 0.5], "has an image processor, which sets --image_mean; leave it out"),
        (
            lambda: SphereVisionForRegression(config_of(head=None, embedding_dim=2, value_range=[0.0, 1.0])),
            [],
            "the class of the model must be one of SphereVisionForImageClassification, .*; got 'SphereVisionForRegr",
        ),
        (
            lambda: SphereVisionModel(config_of(head=None)),
            ["--classes", "known"],
            "--classes known needs a model with classes",
        ),
        (lambda: BertModel(BertConfig(**TINY)), [], "BertModel is no image encoder"),
        (config_of, [], "the class of the model must be one of .*; got None"),
        (overflowing, [], "embedding of image 0 is not finite"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(make, argv, message, extract, save, classifier):
    model = classifier if make is None else save(make())
    with pytest.raises(ValueError, match=message):
        extract(*argv, model=model)


def test_a_model_without_an_image_processor_is_refused_unless_its_pixels_are_known(extract, save):
    model = save(SphereVisionModel(config_of()), processor=False)
    with pytest.raises(ValueError, match=r"has no image processor.* Give --image_mean and --image_std"):
        extract("--image_mean", 0.5, model=model)
    encoder = save(Dinov2Model(Dinov2Config(**TINY, image_size=16, patch_size=4)), processor=False)
    with pytest.raises(ValueError, match=r"has no image processor.* is unknown\. Save the one of its training"):
        extract("--image_mean", 0.5, "--image_std", 0.5, model=encoder)


# Existing output folders


def test_embeddings_are_replaced_and_their_evaluation_removed_only_on_request(extract):
    folder = extract("--max_samples", 5)
    (folder / "evaluation").mkdir()
    with pytest.raises(FileExistsError, match=r"contains embeddings.*--overwrite_output_dir"):
        extract()
    assert rows_of(folder).num_rows == 5
    assert rows_of(extract("--max_samples", 6, "--overwrite_output_dir")).num_rows == 6
    assert not (folder / "evaluation").exists()


@pytest.mark.parametrize("argv", [[], ["--overwrite_output_dir"]], ids=["", "overwrite"])
def test_folders_with_other_contents_are_never_replaced(extract, tmp_path, argv):
    (tmp_path / "embedded").mkdir()
    (tmp_path / "embedded" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"it has other files, such as thesis\.tex"):
        extract(*argv)
    assert (tmp_path / "embedded" / "thesis.tex").exists()


def test_an_interrupted_run_keeps_the_old_embeddings_and_continues(extract, extracted, tmp_path, monkeypatch, caplog):
    folder = extract("--max_samples", 5)
    before = sorted(tmp_path.rglob("*"))
    embed, embedded = extraction.embed, []

    def interrupt(model, names, **inputs):
        if len(embedded) == 300:
            raise KeyboardInterrupt
        embedded.extend(names)
        return embed(model, names, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "embed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            extract("--overwrite_output_dir", "--batch_size", 150)
    kept = finished_batches(folder)
    assert [path for path in sorted(tmp_path.rglob("*")) if not path.is_relative_to(kept)] == before
    rows, expected = rows_of(extract("--overwrite_output_dir", "--batch_size", 40)), rows_of(extracted)
    for name in COLUMNS:
        torch.testing.assert_close(rows[name][:], expected[name][:])
    assert "Continuing after 300 of 355 images" in caplog.text
    assert not kept.exists()


# Several processes


def extract_in_one_of_two(rank: int, words: list[str]) -> None:
    if torch.accelerator.is_available():
        main(words)
    else:  # the processes are a group without this setting, too
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ACCELERATE_USE_CPU")
            main(words)


@pytest.mark.slow
def test_two_processes_write_the_same_as_one(extracted, classifier, tmp_path):
    """The 355 images split unevenly, as 44 batches of 4 per process, then 2 and 1."""
    words = ["--model_name_or_path", classifier, "--dataset_name", "digits", "--output_dir", tmp_path / "embedded"]
    words += ["--cache_dir", tmp_path / "decoded", "--batch_size", "4", "--disable_tqdm"]
    printed = run_two(extract_in_one_of_two, [*map(str, words)])
    rows, expected = rows_of(tmp_path / "embedded"), rows_of(extracted)
    for name in COLUMNS:
        torch.testing.assert_close(rows[name][:], expected[name][:])
    assert "".join(printed).count("wrote     ") == 1
