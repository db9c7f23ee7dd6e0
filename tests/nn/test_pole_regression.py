import pytest
import torch
import torch.nn.functional as F

from hf_sphere.nn import PoleRegression


def years(**options):
    return PoleRegression(4, (1000.0, 1932.0), **options)


def plain(embeddings, targets, low, high):
    """Predictions and losses of the paper in float64, from the cosine to the first axis."""
    embeddings = embeddings.double()
    cosines = embeddings[:, 0] / embeddings.norm(dim=1)
    places = 2 * (targets.double() - low) / (high - low) - 1
    return low + (high - low) * (cosines + 1) / 2, (places - cosines) ** 2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_predictions_and_loss_match_the_formula(reduction):
    embeddings, targets = torch.randn(6, 4), torch.tensor([1000.0, 1932, 1500, 1600.5, 1001, 1900])
    output = years(reduction=reduction)(embeddings, targets)
    predictions, losses = plain(embeddings, targets, 1000, 1932)
    torch.testing.assert_close(output.predictions.double(), predictions, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(output.loss.double(), getattr(losses, reduction)(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.embeddings, F.normalize(embeddings, dim=1))


def test_gradients_pass_gradcheck():
    targets = torch.tensor([1100.0, 1900.0, 1500.0], dtype=torch.float64)
    regression = years()
    embeddings = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: regression(x, targets).loss, embeddings)


def test_targets_outside_the_range_but_not_nan_are_clipped_on_request():
    regression, embeddings = years(out_of_range="clip"), torch.randn(3, 4)
    clipped = regression(embeddings, torch.tensor([1000.0, 1932.0, 1500.0])).loss
    torch.testing.assert_close(regression(embeddings, torch.tensor([-5.0, 1e9, 1500.0])).loss, clipped)
    assert regression(embeddings, torch.tensor([1500.0, float("nan"), 1500.0])).loss.isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.float16, torch.float64])
def test_targets_may_have_any_dtype(dtype):
    embeddings, targets = torch.randn(3, 4), torch.tensor([1000.0, 1932.0, 1234.0])
    expected = years()(embeddings, targets).loss
    assert torch.equal(years()(embeddings, targets.to(dtype)).loss, expected)


def test_results_have_the_precision_of_float32_and_of_float64_embeddings():
    embeddings, targets = torch.randn(5, 4), torch.linspace(1000, 1932, 5)
    for x, autocast in ((embeddings.bfloat16(), False), (embeddings, True)):
        expected = years()(x.float(), targets)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = years()(x, targets)
        assert torch.equal(output.predictions, expected.predictions)
        assert torch.equal(output.loss, expected.loss)
        assert (output.loss.dtype, output.embeddings.dtype) == (torch.float32, x.dtype)
    output = years()(embeddings.double(), targets)
    assert {output.predictions.dtype, output.loss.dtype, output.embeddings.dtype} == {torch.float64}


def test_zero_embedding_predicts_mid_range_with_zero_gradient():
    embeddings = torch.zeros(1, 4, requires_grad=True)
    output = years()(embeddings, torch.tensor([1500.0]))
    output.loss.backward()
    assert output.predictions.item() == 1466.0
    assert not embeddings.grad.any()


def test_pole_is_saved_and_loaded_but_not_trained():
    regression = years()
    assert list(regression.parameters()) == []
    with torch.device("meta"):
        empty = years()
    empty.to_empty(device="cpu").reset_parameters()
    for each in (regression, empty):
        assert torch.equal(each.state_dict()["pole"], torch.tensor([1.0, 0, 0, 0]))
    regression = PoleRegression(2, (0.0, 1.0))
    regression.load_state_dict({"pole": torch.tensor([0.0, 1.0])})
    assert regression(torch.tensor([[0.0, 2.0]])).predictions.item() == 1.0


def test_it_compiles_with_fullgraph_and_takes_empty_batches():
    regression, embeddings, targets = years(), torch.randn(5, 4), torch.linspace(1000, 1932, 5)
    compiled = torch.compile(regression, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(embeddings, targets).loss, regression(embeddings, targets).loss)
    for reduction in ("mean", "sum"):
        assert years(reduction=reduction)(torch.empty(0, 4), torch.empty(0)).loss == 0
