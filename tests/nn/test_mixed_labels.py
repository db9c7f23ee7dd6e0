"""Losses of mixed images, with two labels each."""

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import CutMix, MixUp
from transformers import Trainer, TrainingArguments

from hf_sphere import SphereTrainer
from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionForRegression
from hf_sphere.nn import HEADS, build_head

DIM, CLASSES = 8, 5
MIXABLE = [name for name, head in HEADS.items() if not head.compares_examples()]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(6, DIM, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    return embeddings, labels, labels.roll(1), torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)


def build(name, **options):
    torch.manual_seed(0)
    return build_head(name, DIM, CLASSES, **options).double()


def seeded(head, *arguments, **options):
    head.before_forward(3, torch.arange(6))
    return head(*arguments, **options).loss


@pytest.mark.parametrize("name", MIXABLE)
def test_the_loss_is_the_weighted_mean_of_those_of_both_labels(name, batch):
    embeddings, labels, others, share = batch
    head = build(name)
    if head.needs_data_initialization:
        head.initialize_from_data(embeddings)
    head.eval()  # the statistics of adaface and prototype do not change between the passes
    each = [
        torch.stack([head(embeddings[i : i + 1], classes[i : i + 1]).loss for i in range(6)])
        for classes in (labels, others)
    ]
    expected = ((1 - share) * each[0] + share * each[1]).mean()
    mixed = head(embeddings, labels, mixed_labels=others, mixed_share=share).loss
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["cosine", "arcface", "vmf", "prototype"])
def test_a_share_of_0_is_the_loss_without_mixing_in_training(name, batch):
    embeddings, labels, others, share = batch
    head = build(name).train()
    plain = seeded(head, embeddings, labels)
    head = build(name).train()
    mixed = seeded(head, embeddings, labels, mixed_labels=others, mixed_share=0 * share)
    torch.testing.assert_close(mixed, plain)


def test_class_weights_are_those_of_each_label_and_an_ignored_label_has_no_share_also_in_blocks(batch):
    embeddings, labels, others, share = batch
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    head = build("cosine", class_weights=weights.tolist())
    output = head(embeddings, labels, mixed_labels=others, mixed_share=share)
    first, second = (weights[y] * F.cross_entropy(output.logits, y, reduction="none") for y in (labels, others))
    torch.testing.assert_close(output.loss, ((1 - share) * first + share * second).mean())
    labels = labels.index_fill(0, torch.tensor(1), -100)
    output = build("cosine")(embeddings, labels, mixed_labels=others, mixed_share=share)
    first, second = (F.cross_entropy(output.logits, y, reduction="none") for y in (labels, others))
    used = (1 - share).index_fill(0, torch.tensor(1), 0.0)
    torch.testing.assert_close(output.loss, (used * first + share * second).sum() / (used + share).sum())
    mixed = {"mixed_labels": others, "mixed_share": share}
    losses = [build("arcface", blockwise=blockwise)(embeddings, labels, **mixed).loss for blockwise in (False, True)]
    torch.testing.assert_close(losses[1], losses[0])


def vision_model(head="arcface", problem_type="single_label_classification"):
    torch.manual_seed(0)
    config = SphereVisionConfig(
        backbone="lenet5", image_size=28, num_channels=1, num_labels=CLASSES, head=head, problem_type=problem_type
    )
    return SphereVisionForImageClassification(config).eval()


@pytest.mark.parametrize("transform", [MixUp, CutMix])
def test_soft_labels_of_torchvision_train_any_head_of_a_model(transform):
    images, labels = torch.rand(6, 1, 28, 28), torch.tensor([0, 1, 2, 3, 4, 0])
    mixed, soft = transform(num_classes=CLASSES)(images, labels)
    share = soft[1, 0].item()  # of the image before
    model = vision_model()
    first, second = (model(mixed, labels=y).loss for y in (labels, labels.roll(1)))
    torch.testing.assert_close(model(mixed, labels=soft).loss, (1 - share) * first + share * second)


def test_soft_labels_are_of_one_or_two_classes_and_need_a_problem_type():
    with pytest.raises(ValueError, match="one or two classes"):
        vision_model()(torch.rand(2, 1, 28, 28), labels=torch.full((2, CLASSES), 1 / CLASSES))
    soft = torch.tensor([[0.7, 0.3, 0.0, 0.0, 0.0]] * 2)
    model = vision_model("cosine", problem_type=None)
    with pytest.raises(ValueError, match="set problem_type"):
        model(torch.rand(2, 1, 28, 28), labels=soft)
    model(torch.rand(2, 1, 28, 28), labels=soft.round())  # classes of each image, as before


def test_models_require_both_mixed_labels_and_shares_and_those_of_values_refuse_them():
    mixed = {"mixed_labels": torch.tensor([1, 2]), "mixed_share": torch.full((2,), 0.5)}
    for name, value in mixed.items():
        with pytest.raises(ValueError, match="mixed images need labels, mixed_labels and mixed_share"):
            vision_model()(torch.randn(2, 1, 28, 28), labels=torch.tensor([0, 1]), **{name: value})
    options = {"backbone": "lenet5", "num_channels": 1, "embedding_dim": 4, "value_range": [0.0, 1.0]}
    regression = SphereVisionForRegression(SphereVisionConfig(**options, image_size=28))
    for model in (regression, vision_model("cosine", "regression")):
        with pytest.raises(ValueError, match="mixed images need a model with a head for classes"):
            model(torch.randn(2, 1, 28, 28), labels=torch.rand(2), **mixed)


# What the Trainer and other tasks see


def test_the_trainer_evaluates_images_that_are_not_mixed(tmp_path):
    rows = [{"pixel_values": torch.randn(1, 28, 28), "labels": n % CLASSES} for n in range(10)]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    for kind in (Trainer, SphereTrainer):
        count = {"compute_metrics": lambda found: {"n": len(found.label_ids)}}
        metrics = kind(vision_model(), args, eval_dataset=rows, **count).evaluate()
        assert metrics["eval_n"] == 10
        assert "eval_loss" in metrics


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16])
def test_soft_labels_can_be_of_any_dtype(dtype):
    pixels, model = torch.randn(3, 1, 28, 28), vision_model()
    shares = torch.tensor([1.0, 0.0, 1.0] if dtype == torch.int64 else [0.64, 0.81, 0.9])
    soft = shares[:, None] * torch.eye(CLASSES)[:3] + (1 - shares)[:, None] * torch.eye(CLASSES)[2:]
    expected = model(pixels, labels=torch.arange(3), mixed_labels=torch.arange(2, 5), mixed_share=1 - shares).loss
    torch.testing.assert_close(model(pixels, labels=soft.to(dtype)).loss, expected, rtol=1e-2, atol=1e-2)
