"""Training on one loss of all examples of an optimizer step, whose batches are encoded one by one."""

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_runs import random_images, run_loop, small_model
from torch import Tensor, nn
from transformers import TrainingArguments
from two_processes import run_two

from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification, SphereVisionForRegression
from hf_sphere.losses import SupConLoss, trainer_loss
from hf_sphere.nn import HEADS
from hf_sphere.training import RecipeArguments, TrainingLoop
from hf_sphere.training.pair_batch import add_supcon, backward_together

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def make_model(head: str = "proxy_anchor", **options: Any) -> Any:
    return small_model(head, num_labels=4, **options)


make_batches = partial(random_images, 48, classes=4, shuffle=True)


def train(
    folder: Any, size: int, pair_batch: int | None, model: Any = None, rank: int = 0, processes: int = 1, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """Return weights and last metrics after six steps of the loop of the recipes on 16 examples each."""
    batches = make_batches(batch_size=size, process_index=rank, num_processes=processes)
    options = {"learning_rate": 0.05, "pair_batch": pair_batch} | options
    loop = run_loop(model or make_model(), batches, folder, **options)
    assert loop.state.step == 6
    weights = {name: value.clone() for name, value in loop.trained_model.state_dict().items()}
    return weights, {name: value for name, value in loop.state.history[-1].items() if name.startswith("train_")}


@pytest.mark.parametrize("head", [*HEADS, "prototype summed"])
@pytest.mark.settings(head=lambda head: {"head": head})
def test_a_recipe_with_any_head_trains_as_with_one_large_batch(head, tmp_path):
    summed = {"head_kwargs": {"reduction": "sum"}} if "summed" in head else {}
    rate = {"learning_rate": 0.005} if summed else {}
    whole, parts = (
        train(tmp_path / str(size), size, pairs, make_model(head.split()[0], **summed), **rate)
        for size, pairs in ((16, None), (4, 16))
    )
    torch.testing.assert_close(parts, whole, **TOLERANCE)


def test_a_loss_of_pairs_is_added_to_that_of_the_head(tmp_path):
    models = [make_model("cosine") for _ in range(3)]
    supcon = {"supcon_weight": 0.5}
    whole = train(tmp_path / "whole", 16, None, models[0], **supcon)
    torch.testing.assert_close(train(tmp_path / "parts", 4, 16, models[1], **supcon), whole, **TOLERANCE)
    train(tmp_path / "alone", 16, None, models[2])
    batch = next(make_batches(batch_size=16).epoch(0))
    models[2].load_state_dict(models[0].state_dict())
    output, plain = (models[index].train()(**batch) for index in (0, 2))
    expected = plain.loss + 0.5 * SupConLoss()(plain.embeddings, batch["labels"])
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(models[0].eval()(**batch).loss, models[2].eval()(**batch).loss)


def test_models_losses_and_options_that_do_not_fit_are_rejected_before_training(tmp_path):
    for options, message in (
        ({"pair_batch": 15}, r"multiple of the batches of 4 examples, on 1 process\(es\); got 15"),
        ({"pair_batch": 3}, "multiple of the batches of 4 examples"),
        ({"pair_batch": 16, "gradient_accumulation_steps": 2}, "cannot be combined with gradient_accumulation_steps"),
        ({"pair_batch": 16, "torch_compile": True}, "cannot be combined with .*torch_compile"),
        ({"pair_batch": None, "supcon_weight": 1.0, "gradient_accumulation_steps": 2}, "use pair_batch to accumulate"),
    ):
        with pytest.raises(ValueError, match=message):
            train(tmp_path, 4, **options)
    start = lambda model, data, args: TrainingLoop(model, data, args, Accelerator(cpu=True), evaluate=lambda _: {})  # noqa: E731
    for make in (
        lambda: nn.ModuleList([make_model(), make_model()]),
        lambda: nn.Linear(36, 4),
    ):
        with pytest.raises(ValueError, match="pair_batch is for models with the loss of one head"):
            start(make(), make_batches(batch_size=4), RecipeArguments(str(tmp_path), pair_batch=16, disable_tqdm=True))
    model = make_model("prototype", head_kwargs={"reduction": "sum"})
    with pytest.raises(ValueError, match="supcon_weight is for a mean loss"):
        train(tmp_path, 16, None, model, supcon_weight=1.0)
    regression = small_model(None, kind=SphereVisionForRegression, embedding_dim=4, value_range=[0.0, 1.0])
    with pytest.raises(ValueError, match="for models with the loss of one head"):
        fit(tmp_path, regression, 4, 16)


# The Trainer


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(1, 6, 6, generator=generator), "labels": n % 4} for n in range(40)]


def fit(folder: Any, model: Any, size: int, pair_batch: int | None, data: Any = None, **options: Any) -> Any:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=size, learning_rate=0.05, optim="sgd", num_train_epochs=2,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, max_grad_norm=0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = SphereTrainer(model, args, train_dataset=data or rows(), pair_batch=pair_batch, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


@pytest.mark.parametrize("head", ["proxy_anchor", "arcface", "adaface", "vmf"])
def test_the_trainer_trains_as_with_one_large_batch(head, tmp_path, caplog):
    whole = fit(tmp_path, make_model(head), 16, None)  # 40 examples: the last step of an epoch has 8
    parts = fit(tmp_path, make_model(head), 4, 16)
    torch.testing.assert_close(parts, whole, **TOLERANCE)
    assert "where it is divided" not in caplog.text
    if head == "proxy_anchor":  # also on image batches
        whole = fit(tmp_path, make_model(), 1, None, make_batches(batch_size=16))
        torch.testing.assert_close(fit(tmp_path, make_model(), 1, 16, make_batches(batch_size=4)), whole, **TOLERANCE)
    if head == "vmf":  # and by a loss of pairs
        loss = {"compute_loss_func": trainer_loss(SupConLoss())}
        whole = fit(tmp_path, make_model("cosine"), 16, None, **loss)
        torch.testing.assert_close(fit(tmp_path, make_model("cosine"), 4, 16, **loss), whole, **TOLERANCE)


def test_batches_of_an_interrupted_step_are_not_in_the_next_run(tmp_path):
    class Interrupted(SphereTrainer):
        steps = 0

        def training_step(self, *args: Any) -> Tensor:
            self.steps += 1
            if self.steps == 3:
                raise KeyboardInterrupt
            return super().training_step(*args)

    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, optim="sgd", lr_scheduler_type="constant",
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    weights = []
    for kind in (Interrupted, SphereTrainer):
        trainer = kind(make_model(), args, train_dataset=rows(), pair_batch=16)
        if kind is Interrupted:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    torch.testing.assert_close(weights[0], weights[1])
    assert args.gradient_accumulation_steps == 1  # those of the next trainer


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_trainer_computes_the_loss_of_the_problem_type(problem_type, tmp_path):
    data = rows()
    for row in data:
        row["labels"] = torch.tensor([0.3, 0.7, 0.0, 0.0]).roll(row["labels"])
    whole = fit(tmp_path, make_model("cosine", problem_type=problem_type), 16, None, data)
    torch.testing.assert_close(
        fit(tmp_path, make_model("cosine", problem_type=problem_type), 4, 16, data), whole, **TOLERANCE
    )


def test_batch_norm_in_training_is_warned_of():
    model = SphereVisionForImageClassification(
        SphereVisionConfig(backbone="resnet18", num_channels=1, image_size=32, num_labels=4, head="cosine")
    )
    batches = [{"pixel_values": torch.randn(4, 1, 32, 32), "labels": torch.arange(4)} for _ in range(2)]
    with pytest.warns(UserWarning, match="Batch norm in training has the statistics of chunks"):
        backward_together(model.train(), batches, Accelerator(cpu=True), seed=0, together=1)


# Two processes


def _run(rank: int, folder: str) -> None:
    weights, metrics = train(f"{folder}/recipe", 2, 16, make_model("cosine"), rank, 2, supcon_weight=0.5)
    torch.save((weights, metrics["train_loss"]), f"{folder}/{rank}.pt")


def test_two_processes_train_as_one(tmp_path):
    run_two(_run, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, second)
    weights, metrics = train(tmp_path / "one", 16, None, make_model("cosine"), supcon_weight=0.5)
    torch.testing.assert_close(first, (weights, metrics["train_loss"]), rtol=1e-3, atol=1e-5)


def mixed_batches() -> list[dict[str, Tensor]]:
    """Two batches of mixed images."""
    batches = [*make_batches(batch_size=8).epoch(0)][:2]
    share = {"mixed_share": torch.full((8,), 0.3)}
    return [{**batch, "mixed_labels": batch["labels"].roll(1), **share} for batch in batches]


def test_mixed_images_have_both_labels_in_the_loss_of_all_and_none_of_pairs():
    batches, model, accelerator = mixed_batches(), make_model("arcface"), Accelerator(cpu=True)
    expected = model(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
    output, _ = backward_together(model, batches, accelerator, seed=0, together=1)
    torch.testing.assert_close(output.loss, expected.loss)
    with pytest.raises(ValueError, match="leave out mixup and cutmix"):
        backward_together(model, batches, accelerator, 0, 1, loss_func=trainer_loss(SupConLoss()))
    add_supcon(model, 0.5)
    with pytest.raises(ValueError, match="leave out mixup and cutmix"):
        model(**batches[0])
