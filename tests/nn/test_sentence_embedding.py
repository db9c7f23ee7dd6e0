"""Spherized encoders and embeddings in sentence-transformers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from hf_sphere import SphereBertModel
from hf_sphere.geometry import spherize

SENTENCES = ["the cat is to the nurse", "the mountain", "a story is the relation between lamp and picture"]


@pytest.fixture
def sentence_transformers():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def encoder(root, tmp_path):
    """Folder with a spherized BERT and its tokenizer."""
    source = root / "tests" / "golden" / "analogy" / "tiny-bert"
    torch.manual_seed(0)
    SphereBertModel.from_pretrained(source).save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder")


@pytest.fixture
def model(sentence_transformers, encoder):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    from hf_sphere.nn import Spherize

    transformer = Transformer(encoder)
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    spherize = Spherize(pooling.get_embedding_dimension(), scaling=2.0, radius=3.0, delta=0.1, learn_radius=True)
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling, spherize], device="cpu")


def test_embeddings_are_the_spherized_pooled_states_with_gradients_of_encoder_and_scaling(model):
    assert type(model[0].model) is SphereBertModel
    pooled = torch.nn.Sequential(*list(model)[:2])
    features = model.preprocess(SENTENCES)
    expected = spherize(pooled(features)["sentence_embedding"], torch.tensor(2.0), torch.tensor(3.0), 0.1)
    embeddings = model.encode(SENTENCES, convert_to_tensor=True)
    torch.testing.assert_close(embeddings, expected, rtol=1e-5, atol=1e-6)
    assert embeddings.shape[1] == model.get_embedding_dimension() == model[1].get_embedding_dimension() + 1
    torch.testing.assert_close(embeddings.norm(dim=1), torch.full((3,), 3.0))
    embeddings = model.train()(features)["sentence_embedding"]
    F.cosine_similarity(embeddings[0], embeddings[1], dim=0).backward()
    spherical = model[0].model.encoder.layer[-1].output.spherical
    for weight in (model[2].spherization.scaling, spherical.linear.weight, spherical.spherization.scaling):
        assert weight.grad.abs().sum() > 0


def test_saved_model_gives_the_same_embeddings(model, sentence_transformers, tmp_path):
    with torch.no_grad():
        model[2].spherization.scaling.fill_(1.25)
        model[2].spherization.radius.fill_(2.5)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert [type(module) for module in loaded] == [type(module) for module in model]
    assert "radius" in dict(loaded[2].spherization.named_parameters())
    expected = model.encode(SENTENCES, convert_to_tensor=True)
    assert torch.equal(loaded.encode(SENTENCES, convert_to_tensor=True), expected)


def test_binary_codes_differ_once_the_embeddings_are_centered(model, sentence_transformers, tmp_path):
    from sentence_transformers.sentence_transformer.modules import Dense

    assert len(np.unique(model.encode(SENTENCES, precision="binary"), axis=0)) == 1
    mean = model.encode(SENTENCES, convert_to_tensor=True).mean(0)
    size = len(mean)
    model.append(Dense(size, size, activation_function=None, init_weight=torch.eye(size), init_bias=-mean))
    codes = model.encode(SENTENCES, precision="binary")
    assert len(np.unique(codes, axis=0)) == len(SENTENCES)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert np.array_equal(loaded.encode(SENTENCES, precision="binary"), codes)
