"""Heads and pair losses in the trainer of sentence-transformers: for texts, images, columns and cut embeddings."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from doubles import GivenEmbeddings
from PIL import Image as Pictures
from torch import distributed
from transformers import ViTConfig, ViTImageProcessor, ViTModel
from two_processes import run_two

from hf_sphere import losses
from hf_sphere.nn import HEADS

st = pytest.importorskip("sentence_transformers")

from sentence_transformers.sentence_transformer.losses import Matryoshka2dLoss, MatryoshkaLoss  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

TEXTS = ["the cat", "the mountain", "a story", "the lamp", "a picture", "the nurse", "a relation", "the cat is"]
CLASSES = [0, 1, 2, 3] * 2
PAIR_LOSSES = {"SupConLoss": losses.SupConLoss, "InfoNCELoss": losses.InfoNCELoss}


@pytest.fixture
def model(root) -> Any:
    """A tiny text encoder with mean pooling."""
    torch.manual_seed(0)
    transformer = Transformer(str(root / "tests" / "golden" / "analogy" / "tiny-bert"))
    return st.SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")


@pytest.fixture
def vit(tmp_path) -> str:
    """Folder with a tiny ViT and its image processor."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    config = ViTConfig(**sizes, image_size=16, patch_size=8, num_channels=1)
    ViTModel(config).save_pretrained(tmp_path / "vit")
    size = {"height": 16, "width": 16}
    processor = ViTImageProcessor(size=size, image_mean=[0.5], image_std=[0.5], do_convert_rgb=False)
    processor.save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


def image_model(folder: str) -> Any:
    """A SentenceTransformer of images."""
    return st.SentenceTransformer(modules=[Transformer(folder), Pooling(16, "cls")], device="cpu")


def images() -> Dataset:
    """Eight gray images of four classes, which differ in the position of a stroke, as in Omniglot."""
    pixels = np.full((8, 20, 20), 255, np.uint8)
    for index, label in enumerate(CLASSES):
        pixels[index, 2 + 4 * label : 5 + 4 * label, index : index + 12] = 0
    features = Features({"image": Image(), "label": ClassLabel(4)})
    return Dataset.from_dict({"image": [Pictures.fromarray(each) for each in pixels], "label": CLASSES}, features)


def texts(**columns: Any) -> Dataset:
    return Dataset.from_dict({"sentence": TEXTS, **columns})


def build_trainer(model: Any, loss: Any, folder: Any, data: Dataset, wrap: Any = None, **options: Any) -> Any:
    """A trainer of a loss of ours, inside one of sentence-transformers if there is one."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "save_strategy": "no"} | options
    args = st.SentenceTransformerTrainingArguments(
        str(folder), report_to=[], use_cpu=True, learning_rate=0.01, lr_scheduler_type="constant", disable_tqdm=True,
        **options,
    )  # fmt: skip
    adapted = losses.SentenceTransformerLoss(model, loss)
    if wrap is not None:
        adapted = wrap[0](model, adapted, **wrap[1])
    callbacks = [losses.LossCheckpointCallback(loss)]
    return st.SentenceTransformerTrainer(
        model, args, train_dataset=data, eval_dataset=data, loss=adapted, callbacks=callbacks
    )


def build_loss(name: str, length: int) -> Any:
    """A pair loss by its name, or the loss of a head."""
    if name in PAIR_LOSSES:
        return PAIR_LOSSES[name]()
    return losses.HeadLoss(length, 4, head=name, **{"num_samples": 2} if name == "vmf" else {})


# Images


def test_image_model_and_class_vectors_are_trained_saved_and_resumed(vit, tmp_path):
    model, loss = image_model(vit), losses.ArcFaceLoss(16, 4)
    before = [loss.head.weight.detach().clone(), model.encode(images()["image"])]
    build_trainer(model, loss, tmp_path / "a", images(), max_steps=2, save_strategy="steps", save_steps=2).train()
    assert not torch.equal(loss.head.weight, before[0])
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    embeddings = loaded.encode(images()["image"])
    np.testing.assert_allclose(embeddings, model.encode(images()["image"]), rtol=1e-5, atol=1e-6)
    assert not np.allclose(embeddings, before[1], atol=1e-3)

    resumed, other = image_model(vit), losses.ArcFaceLoss(16, 4)
    build_trainer(resumed, other, tmp_path / "a", images(), max_steps=3).train(resume_from_checkpoint=True)
    straight, whole = image_model(vit), losses.ArcFaceLoss(16, 4)
    whole.head.weight.data = before[0].clone()
    build_trainer(straight, whole, tmp_path / "b", images(), max_steps=3).train()
    torch.testing.assert_close(other.head.weight, whole.head.weight, rtol=1e-4, atol=1e-5)


def _train_on_images(rank: int, vit: str, folder: str, processes: int) -> None:
    torch.manual_seed(rank)
    loss = losses.ArcFaceLoss(16, 4)
    if rank == 0:
        torch.manual_seed(0)
        torch.nn.init.normal_(loss.head.weight)
    model = image_model(vit)
    size = {"per_device_train_batch_size": 8 // processes}
    build_trainer(model, loss, folder, images(), max_steps=2, **size).train()
    state = [loss.head.weight.detach(), *(weight.detach() for weight in model.parameters())]
    torch.save(state, f"{folder}/{rank}-of-{processes}.pt")


@pytest.mark.slow
def test_two_processes_train_images_and_class_vectors_as_one_does(vit, tmp_path):
    run_two(_train_on_images, vit, str(tmp_path), 2)
    _train_on_images(0, vit, str(tmp_path), 1)
    first, second, alone = (torch.load(tmp_path / name) for name in ("0-of-2.pt", "1-of-2.pt", "0-of-1.pt"))
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    torch.testing.assert_close(first, alone, rtol=1e-3, atol=1e-4)


# Every head and pair loss


CASES = [*(("texts", name) for name in (*HEADS, *PAIR_LOSSES)), ("images", "vmf"), ("images", "SupConLoss")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_head_and_pair_loss_trains_in_the_trainer_whose_evaluation_changes_no_statistics(
    name, kind, model, vit, tmp_path
):
    model = image_model(vit) if kind == "images" else model
    data = images() if kind == "images" else texts(label=CLASSES)
    loss = build_loss(name, model.get_embedding_dimension())
    before = {name: value.detach().clone() for name, value in loss.state_dict().items()}
    weights = [weight.detach().clone() for weight in model.parameters()]
    trainer = build_trainer(model, loss, tmp_path, data)
    assert trainer.train().training_loss > 0
    assert any(not torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
    for key, parameter in loss.named_parameters():
        if key in ("head.weight", "log_temperature"):
            assert not torch.equal(parameter, before[key])
    trained = {key: value.clone() for key, value in loss.state_dict().items()}
    value = trainer.evaluate()["eval_loss"]
    assert all(torch.equal(value, trained[key]) for key, value in loss.state_dict().items())
    if name != "InfoNCELoss":  # which depends on the order of the examples, and needs pairs
        loss.eval()  # without a margin
        points = model.encode(data["image" if kind == "images" else "sentence"], convert_to_tensor=True).clone()
        assert value == pytest.approx(loss(points, torch.tensor(CLASSES)).item(), rel=1e-4)
        assert loss.train()(points, torch.full((8,), 2)).isfinite()  # of one class only


def test_the_margin_begins_after_its_warm_up_epochs(model, tmp_path):
    loss = losses.ArcFaceLoss(model.get_embedding_dimension(), 4, margin=0.3, margin_warmup_epochs=1)
    margins = []
    loss.head.register_forward_pre_hook(lambda head, _: margins.append(head.active_margin))
    data = texts(label=CLASSES)
    build_trainer(model, loss, tmp_path, data, max_steps=-1, num_train_epochs=2).train()
    assert sorted({*margins}) == [0.0, 0.3]
    assert margins == sorted(margins)


# Columns


SEVERAL = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]] * 4


@pytest.mark.settings(labels=lambda labels: {"several": labels is SEVERAL})
@pytest.mark.parametrize("labels", [CLASSES, SEVERAL], ids=["one class", "several"])
@pytest.mark.parametrize("column", ["label", "labels", "score", "scores"])
def test_labels_are_taken_from_each_column_of_the_trainer(column, labels, model, tmp_path):
    loss, seen = losses.HeadLoss(model.get_embedding_dimension(), 4, head="softmax"), []
    loss.register_forward_hook(lambda module, inputs, value: seen.append(inputs[1]))
    build_trainer(model, loss, tmp_path, texts(**{column: labels})).train()
    assert sorted(seen[0].tolist()) == sorted(labels)


def test_texts_of_a_row_share_its_label(model):
    columns = [model.preprocess(TEXTS[:4]), model.preprocess(TEXTS[4:])]
    loss = losses.SentenceTransformerLoss(model.eval(), losses.InfoNCELoss())
    embeddings = torch.cat([model(column)["sentence_embedding"] for column in columns])
    expected = losses.InfoNCELoss()(embeddings, torch.arange(4).repeat(2))
    for labels in (None, torch.tensor([3, 9, 4, 7])):
        torch.testing.assert_close(loss(columns, labels), expected)


def test_labels_of_another_number_and_losses_of_another_length_are_named(model):
    loss = losses.SentenceTransformerLoss(model, losses.ArcFaceLoss(32, 4))
    for labels in (torch.arange(3), torch.zeros(3, 4)):
        with pytest.raises(ValueError, match=r"one label per row; got .* labels for 4 rows"):
            loss([model.preprocess(TEXTS[:4])], labels)
    loss = losses.SentenceTransformerLoss(model, losses.ArcFaceLoss(64, 4))
    with pytest.raises(ValueError, match=r"embeddings must have shape \(B, 64\); got \(8, 32\)"):
        loss([model.preprocess(TEXTS)], torch.tensor(CLASSES))


def test_encoded_names_and_ignored_rows_are_class_numbers(model, tmp_path):
    data = texts(label=list("badcbadc")).class_encode_column("label")
    loss = losses.ArcFaceLoss(model.get_embedding_dimension(), 4)
    for each, rows in ((loss, data), (losses.SupConLoss(), texts(label=[-100, *CLASSES[1:]]))):
        assert build_trainer(model, each, tmp_path, rows).train().training_loss > 0


# Several datasets, and the best checkpoint


def test_losses_of_several_datasets_are_saved_and_resumed_each(model, tmp_path):
    data = DatasetDict(a=texts(label=CLASSES), b=texts(label=CLASSES))

    def train(steps: int, resume: bool | None = None) -> list[torch.Tensor]:
        heads = {name: losses.ArcFaceLoss(32, 4) for name in data}
        adapted = {name: losses.SentenceTransformerLoss(model, loss) for name, loss in heads.items()}
        args = st.SentenceTransformerTrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        callbacks = [losses.LossCheckpointCallback(loss) for loss in heads.values()]
        trainer = st.SentenceTransformerTrainer(model, args, train_dataset=data, loss=adapted, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return [loss.head.weight.detach() for loss in heads.values()]

    first = train(2)
    torch.testing.assert_close(train(2, resume=True), first, rtol=0.0, atol=0.0)


def test_class_vectors_are_those_of_the_best_model(model, tmp_path):
    loss, weights = losses.ArcFaceLoss(32, 4), []
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = build_trainer(model, loss, tmp_path, texts(label=CLASSES), **options)
    trainer.evaluate = lambda evaluate=trainer.evaluate, **_: (
        weights.append(loss.head.weight.detach().clone()) or evaluate()
    )
    trainer.train()
    best = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
    assert best < 3
    torch.testing.assert_close(loss.head.weight.detach(), weights[best - 1], rtol=0.0, atol=0.0)


# Matryoshka


def _compute_unlabeled(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo")
    parts = [part.chunk(2)[rank] for part in torch.load(f"{folder}/pairs.pt")]
    loss = losses.SentenceTransformerLoss(GivenEmbeddings(), losses.SupConLoss())
    torch.save(loss([{"x": part} for part in parts]), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_unlabeled_pairs_of_different_processes_are_different_classes(tmp_path):
    first, second = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    torch.save([first, second], tmp_path / "pairs.pt")
    run_two(_compute_unlabeled, str(tmp_path))
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected = losses.SupConLoss()(torch.cat([first, second]), torch.arange(6).repeat(2))
    torch.testing.assert_close(sum(both) / 2, expected)


def loss_of_length(length: int, name: str, x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a head for embeddings of a length, at embeddings and class vectors cut to it."""
    loss = losses.HeadLoss(length, len(w), head=name)
    return torch.func.functional_call(loss, {"head.weight": w[..., :length]}, (x[:, :length], labels))


OF_DIRECTIONS = ["cosine", "arcface", "cosface", "proxy_anchor", "subcenter_arcface"]


@pytest.mark.parametrize("name", OF_DIRECTIONS)
def test_matryoshka_loss_is_the_sum_over_cut_and_normalized_embeddings_and_class_vectors(name):
    torch.manual_seed(0)
    x, labels = torch.randn(6, 384, requires_grad=True), torch.tensor([0, 3, 1, 2, 3, 0])
    loss, dims = losses.HeadLoss(384, 5, head=name), [384, 128, 64]
    model = GivenEmbeddings()
    wrapped = MatryoshkaLoss(model, losses.SentenceTransformerLoss(model, loss), dims, [1, 0.5, 0.25])
    value = wrapped([{"x": x}], labels)
    w = loss.head.weight
    expected = sum(f * loss_of_length(dim, name, x, w, labels) for dim, f in zip(dims, [1, 0.5, 0.25], strict=True))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, [x, w]), torch.autograd.grad(expected, [x, w]))
    assert loss.head.embedding_dim == 384


def test_every_head_of_a_loss_with_several_parts_is_cut():
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.arc, self.cos = losses.ArcFaceLoss(8, 4), losses.CosFaceLoss(8, 4)

        def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.arc(embeddings, labels) + self.cos(embeddings, labels)

    torch.manual_seed(0)
    x, labels, loss, model = torch.randn(3, 8), torch.tensor([0, 3, 1]), Both(), GivenEmbeddings()
    value = MatryoshkaLoss(model, losses.SentenceTransformerLoss(model, loss), [4])([{"x": x}], labels)
    parts = {"arcface": loss.arc, "cosface": loss.cos}
    expected = sum(loss_of_length(4, name, x, part.head.weight, labels) for name, part in parts.items())
    torch.testing.assert_close(value, expected)
    assert {loss.arc.head.embedding_dim, loss.cos.head.embedding_dim} == {8}


@pytest.mark.parametrize("name", sorted(set(HEADS) - {*OF_DIRECTIONS}))
@pytest.mark.parametrize("dims", [[384], [384, 64]], ids=["whole", "cut"])
def test_heads_that_compare_more_than_directions_are_refused_in_matryoshka_loss(name, dims):
    model = GivenEmbeddings()
    wrapped = MatryoshkaLoss(model, losses.SentenceTransformerLoss(model, build_loss(name, 384)), dims)
    with pytest.raises(ValueError, match=f"head '{name}' compares more than directions.*Use arcface, cosface"):
        wrapped([{"x": torch.randn(4, 384)}], torch.arange(4))


@pytest.mark.parametrize("wrapper", [MatryoshkaLoss, Matryoshka2dLoss])
@pytest.mark.parametrize("name", ["arcface", "SupConLoss"])
def test_losses_train_in_the_trainer_inside_matryoshka_loss(wrapper, name, model, tmp_path):
    length = model.get_embedding_dimension()
    loss = build_loss(name, length)
    before = [weight.detach().clone() for weight in (*model.parameters(), *loss.parameters())]
    wrap = wrapper, {"matryoshka_dims": [length, length // 2]}
    build_trainer(model, loss, tmp_path, texts(label=CLASSES), wrap).train()
    after = [*model.parameters(), *loss.parameters()]
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert len(after) == len(list(model.parameters())) or not torch.equal(before[-1], after[-1])
