"""Training arguments and loop of small models."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate import Accelerator
from small_runs import make_batches, make_model
from torch import nn
from two_processes import forget

from hf_sphere.data import ImagesInMemory
from hf_sphere.training import RecipeArguments, TrainingLoop, evaluate as evaluate_on


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """Exempt the objects of all imports from garbage collection, which the Trainer runs before training."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Forget the process-wide state of accelerate before and after a test."""
    forget()
    yield
    forget()


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., RecipeArguments]:
    """Make training arguments with an output folder below `tmp_path`."""

    def make(**options) -> RecipeArguments:
        options = {"output_dir": str(tmp_path / "run"), "disable_tqdm": True, "save_total_limit": 100} | options
        return RecipeArguments(**options)

    return make


@pytest.fixture
def make_loop(make_args: Callable[..., RecipeArguments]) -> Callable[..., TrainingLoop]:
    """Build a training loop with a new accelerator; other keywords are training arguments."""

    def make(
        model: nn.Module | None = None,
        batches: ImagesInMemory | None = None,
        *,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        loop: dict | None = None,
        **options,
    ) -> TrainingLoop:
        args = make_args(**options)
        accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
        held_out = make_batches(30, 16, shuffle=False, augment=False, seed=1)
        return TrainingLoop(
            make_model() if model is None else model,
            make_batches() if batches is None else batches,
            args,
            accelerator,
            evaluate=evaluate or (lambda model: evaluate_on(model, held_out, accelerator)),
            measure=lambda output, batch: {"correct": (output.logits.argmax(-1) == batch["labels"]).sum()},
            **(loop or {}),
        )

    return make
