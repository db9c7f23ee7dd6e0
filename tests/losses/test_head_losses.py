"""Heads as losses: in loops, in pytorch-metric-learning and in trainers."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from doubles import GivenEmbeddings
from peft.utils.other import ModulesToSaveWrapper
from pytorch_metric_learning import losses as metric_losses, miners, trainers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerState, TrainingArguments
from two_processes import run_two

from hf_sphere import losses
from hf_sphere.nn import HEADS, build_head

LABELS = torch.tensor([0, 3, 1, 2, 3])
NAMES = sorted(name for name in dir(losses) if name.endswith("Loss") and hasattr(getattr(losses, name), "head_name"))
FEW_SAMPLES = {"VMFSoftmaxLoss": {"num_samples": 2}}


def make(name, **options):
    return getattr(losses, name)(6, 4, **FEW_SAMPLES.get(name, {}), **options)


def named(name):
    """The name of a head by the class of its loss."""
    words = name.removesuffix("Loss").removesuffix("Softmax")
    return {"ProxyAnchor": "proxy_anchor", "SubCenterArcFace": "subcenter_arcface"}.get(words, words.lower())


def test_a_subclass_has_its_head_and_its_own_words_on_the_card():
    class Named(losses.HeadLoss, head="cosface", library_name="mine"):
        pass

    assert (Named(6, 4).head.name, Named(6, 4).generate_model_card().data.library_name) == ("cosface", "mine")


def test_a_first_batch_that_is_refused_leaves_the_initialization_to_the_next_one():
    loss, other = make("VMFSoftmaxLoss"), make("VMFSoftmaxLoss")
    x = torch.randn(5, 6)
    with pytest.raises(ValueError, match=r"must have shape \(B, 6\); got \(5, 7\)"):
        loss(100 * torch.randn(5, 7), LABELS)
    loss(x, LABELS), other(x, LABELS)
    assert loss.head.embedding_scale == other.head.embedding_scale != 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "HeadLoss"])
def test_saved_loss_has_the_same_value_and_names_its_head(name, tmp_path):
    loss, x = make(name), torch.randn(5, 6)
    loss(100 * x, LABELS)  # initializes the head that needs data, once
    assert not loss.head.needs_data_initialization
    scale = getattr(loss.head, "embedding_scale", torch.ones(())).clone()
    loss(x, LABELS)
    assert getattr(loss.head, "embedding_scale", 1.0) == scale
    empty = loss(torch.zeros(0, 6, requires_grad=True), LABELS[:0])
    empty.backward()
    assert empty == 0.0
    loss.save_pretrained(tmp_path)
    loaded = type(loss).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(x, LABELS), loss.eval()(x, LABELS))
    assert losses.HeadLoss.from_pretrained(tmp_path).head.name == getattr(losses, name).head_name == named(name)


@pytest.mark.parametrize("as_given", [list, np.array, torch.tensor])
def test_options_are_shown_and_saved_also_if_they_are_of_numpy_or_torch(as_given, tmp_path):
    weights, options = [0.5, 1.0, 2.0, 1.5], {"margin": 0.2, "scale": 20.0}
    sizes = np.int64(6), np.array([0, 3]).max() + 1
    losses.ArcFaceLoss(*sizes, class_weights=as_given(weights), **options).save_pretrained(tmp_path)
    loss = losses.ArcFaceLoss.from_pretrained(tmp_path)
    assert (loss.head.margin, loss.head.num_classes, loss.head.class_weights) == (0.2, 4, weights)
    assert loss.head.inverse_temperature().item() == pytest.approx(20.0)
    assert "scale=20.0" in repr(loss)
    with pytest.raises(ValueError, match="head must be cosface; got 'arcface'"):
        losses.CosFaceLoss.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", sorted(set(HEADS) - {"vmf"}))
def test_loss_of_any_head_is_that_of_the_head(name):
    torch.manual_seed(1)
    loss = losses.HeadLoss(6, 4, head=name)
    torch.manual_seed(1)
    head, x = build_head(name, 6, 4), torch.randn(5, 6)
    torch.testing.assert_close(loss(x, LABELS), head(x, LABELS).loss)
    assert [name for name, _ in loss.named_parameters()] == [f"head.{name}" for name, _ in head.named_parameters()]


class _OwnForward(HEADS["arcface"]):
    def forward(self, embeddings, labels=None):
        return super().forward(embeddings, labels)


def wrap_for_peft(head):
    return ModulesToSaveWrapper(head, "default")


@pytest.mark.parametrize("change", [lambda head: torch.compile(head, backend="eager"), wrap_for_peft, _OwnForward])
def test_the_head_of_a_loss_may_be_wrapped_or_have_its_own_forward_pass(change):
    x, loss = torch.randn(5, 6), losses.ArcFaceLoss(6, 4)
    expected = loss(x, LABELS)
    if change is _OwnForward:
        loss.head.__class__ = _OwnForward
    else:
        loss.head = change(loss.head)
    loss._is_initialized = False
    torch.testing.assert_close(loss(x, LABELS), expected)


def test_loss_with_a_part_of_the_classes_is_not_saved(tmp_path):
    loss = losses.ArcFaceLoss(6, 4)
    loss.head.shard_classes, loss.head.classes = True, range(2)  # as on one of two processes
    for save in (loss.save_pretrained, lambda _: losses.LossCheckpointCallback(loss)):
        with pytest.raises(ValueError, match="with shard_classes, each process has only a part"):
            save(tmp_path)


# pytorch-metric-learning


def same_weights(name, theirs):
    """Our loss with the class vectors of theirs, at the same scale and margin."""
    options = {} if name == "ProxyAnchorLoss" else {"scale": 64.0}
    if "ArcFace" in name:
        options["margin"] = torch.tensor(28.6).deg2rad().item()
    loss = make(name, **options)
    weight = theirs.proxies if name == "ProxyAnchorLoss" else theirs.W.T
    loss.head.weight.data = weight.detach().reshape(loss.head.weight.shape).clone()
    return loss


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss", "SubCenterArcFaceLoss", "ProxyAnchorLoss"])
def test_value_and_gradients_are_those_of_pytorch_metric_learning(name):
    theirs = getattr(metric_losses, name)(num_classes=4, embedding_size=6)
    ours, results = same_weights(name, theirs), []
    x = torch.randn(5, 6)
    for loss in (theirs, ours):
        inputs = x.clone().requires_grad_()
        value = loss(inputs, LABELS)
        value.backward()
        results.append((value.detach(), inputs.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_loss_trains_in_a_trainer_of_pytorch_metric_learning():
    x = F.one_hot(torch.arange(32) % 4, 6).float()
    data = torch.utils.data.TensorDataset(x, torch.arange(32) % 4)
    trunk, loss = torch.nn.Linear(6, 6), make("ArcFaceLoss")
    before = loss(trunk(x), torch.arange(32) % 4).item()
    optimizers = {
        "trunk_optimizer": torch.optim.Adam(trunk.parameters(), lr=0.05),
        "metric_loss_optimizer": torch.optim.Adam(loss.parameters(), lr=0.05),
    }
    trainer = trainers.MetricLossOnly(
        models={"trunk": trunk}, optimizers=optimizers, batch_size=16, dataset=data, dataloader_num_workers=0,
        loss_funcs={"metric_loss": loss},
    )  # fmt: skip
    trainer.train(num_epochs=3)
    assert loss(trunk(x), torch.arange(32) % 4).item() < before


def test_loss_and_miner_of_pytorch_metric_learning_skip_ignored_examples():
    loss = losses.MetricLearningLoss(metric_losses.TripletMarginLoss(), miners.BatchHardMiner())
    x, labels = torch.randn(6, 6).bfloat16(), torch.tensor([0, 0, 1, 1, -100, -100])
    kept = x[:4].float()
    plain = metric_losses.TripletMarginLoss()
    expected = plain(kept, labels[:4], miners.BatchHardMiner()(kept, labels[:4]))
    torch.testing.assert_close(loss(x, labels), expected)


def test_losses_of_pytorch_metric_learning_have_class_156_of_labels_of_8_bits():
    loss, x = losses.MetricLearningLoss(metric_losses.TripletMarginLoss()), torch.randn(6, 6)
    labels = torch.tensor([0, 156, 1, 0, 156, 1])
    torch.testing.assert_close(loss(x, labels.to(torch.uint8)), loss(x, labels))


# SphereTrainer


def test_sphere_trainer_minimizes_a_loss_of_embeddings(tmp_path):
    from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification

    config = SphereVisionConfig(backbone="linear_embedding", num_channels=1, image_size=6, head="cosine", num_labels=2)
    model = SphereVisionForImageClassification(config)
    data = [{"pixel_values": torch.randn(1, 6, 6), "labels": index % 2} for index in range(8)]
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", learning_rate=0.0, logging_steps=1,
    )  # fmt: skip
    loss = losses.SupConLoss()
    trainer = SphereTrainer(model, args, train_dataset=data, compute_loss_func=losses.trainer_loss(loss))
    values = []
    loss.register_forward_hook(lambda module, inputs, output: values.append(output.item()))
    found = trainer.train().training_loss
    assert found == pytest.approx(sum(values) / 2, rel=1e-4)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.loss, self.margins = nn.Linear(6, 6), losses.ArcFaceLoss(6, 4, margin_warmup_epochs=1), []

    def forward(self, x, labels):
        self.margins.append(self.loss.head.active_margin)
        return {"loss": self.loss(self.map(x), labels)}


def train_with_loss(folder, steps, data, resume=None, copies=1):
    """Train a model with its loss, and return the margins of the steps."""
    model = WithLoss()
    others = [losses.ArcFaceLoss(6, 4) for _ in range(copies - 1)]
    args = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    callbacks = [losses.LossCheckpointCallback(loss) for loss in (model.loss, *others)]
    Trainer(model, args, train_dataset=data, callbacks=callbacks).train(resume_from_checkpoint=resume)
    return model.margins


ROWS = [{"x": torch.randn(6), "labels": index % 4} for index in range(8)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_margin_of_a_loss_begins_after_its_warmup(streamed, tmp_path):
    assert train_with_loss(tmp_path, 6, Stream() if streamed else ROWS) == [0, 0, 0.5, 0.5, 0.5, 0.5]


def test_a_loss_of_another_run_is_not_loaded_when_training_resumes(tmp_path):
    for name in "ab":
        train_with_loss(tmp_path / name, 4, ROWS, copies=2)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    message = r"loss.safetensors in .*checkpoint-{} is of another run; set output_dir to the folder of the checkpoint"
    with pytest.raises(ValueError, match=message.format(4)):
        train_with_loss(tmp_path / "b", 6, ROWS, str(tmp_path / "a" / "checkpoint-4"), copies=2)
    for name in ("a", "copy"):  # two runs that are resumed from one
        train_with_loss(tmp_path / name, 6, ROWS, True, copies=2)
    with pytest.raises(ValueError, match=message.format(6)):
        train_with_loss(tmp_path / "copy", 8, ROWS, str(tmp_path / "a" / "checkpoint-6"), copies=2)
    train_with_loss(tmp_path / "a", 8, ROWS, True, copies=2)


# Two processes


def _train_in_two_processes(rank: int, folder: str) -> None:
    PartialState(cpu=True)  # as the arguments of a Trainer create it
    torch.manual_seed(rank)
    both = [losses.ArcFaceLoss(6, 4), losses.ArcFaceLoss(6, 4)]
    both[0].head.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    adapted = [losses.SentenceTransformerLoss(GivenEmbeddings(), loss) for loss in both]
    with pytest.raises(ValueError, match="needs the callback LossCheckpointCallback"):
        adapted[0]([{"x": torch.randn(5, 6)}], LABELS)
    callbacks = [losses.LossCheckpointCallback(loss) for loss in both]
    for callback in callbacks:
        callback.on_train_begin(SimpleNamespace(gradient_accumulation_steps=1), TrainerState(), None)
    optimizer = torch.optim.SGD([weight for loss in both for weight in loss.parameters()], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        # The processes can have batches of different datasets.
        adapted[(rank + step) % 2]([{"x": torch.randn(5, 6)}], LABELS).backward()
        for callback in callbacks:
            callback.on_pre_optimizer_step(None, None, None)
        optimizer.step()
    vmf = losses.VMFSoftmaxLoss(6, 4, num_samples=2)
    vmf((1 + rank) * torch.randn(5, 6), LABELS)
    results = [*(loss.head.weight.detach() for loss in both), vmf.head.embedding_scale]
    torch.save(results, f"{folder}/{rank}.pt")


def test_two_processes_train_and_initialize_the_same_loss(tmp_path):
    run_two(_train_in_two_processes, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(first[0], first[1])
