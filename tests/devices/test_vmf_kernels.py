"""Kernels of the vMF head: how many, and whether a CUDA graph could capture a training step."""

from collections.abc import Callable

import pytest
import torch

from hf_sphere.nn import Head, build_head

BATCH, DIM, CLASSES = 16, 32, 10


@pytest.fixture
def head(pretend) -> Head:
    head = build_head("vmf", DIM, CLASSES)
    head.initialize_from_data(torch.randn(64, DIM))
    return head.to(pretend.NAME)


@pytest.fixture
def step(head: Head, pretend) -> Callable[[], None]:
    embeddings = torch.randn(BATCH, DIM).to(pretend.NAME).requires_grad_()
    labels = torch.tensor([*range(CLASSES), *[-100] * (BATCH - CLASSES)]).to(pretend.NAME)

    def train() -> None:
        head.zero_grad()
        embeddings.grad = None
        head(embeddings, labels).loss.backward()

    train()  # computes constants
    train()
    pretend.reset()
    return train


def test_a_training_step_has_few_kernels(step, pretend):
    step()
    assert pretend.kernels() <= 297


def test_a_prediction_has_few_kernels(head, step, pretend):
    head.eval()
    with torch.no_grad():
        for _ in range(2):
            pretend.reset()
            head(torch.randn(BATCH, DIM).to(pretend.NAME))
    assert pretend.kernels() <= 150


def test_two_training_steps_have_the_same_kernels_and_read_no_values(step, pretend):
    sequences = []
    for _ in range(2):
        with pretend.capturable(), pretend.recorded_kernels() as kernels:
            step()
        sequences.append(kernels)
    assert sequences[0] == sequences[1]
