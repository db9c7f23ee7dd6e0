"""Where nothing may be reused, or an error is right: other ways, other inputs, hidden state."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models_for_reuse import KeptInAttribute, compare, other_weights, reuse_for
from torch import nn

from hf_sphere.analysis.activation_reuse import ActivationReuse
from hf_sphere.analysis.swapping import swapped_tensors


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Branches(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.first, self.one, self.other, self.last = (nn.Linear(3, 3) for _ in range(4))
        self.decide = decide

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.one(hidden) if self.decide(x, hidden) else self.other(hidden))


def test_each_batch_goes_its_own_way_again():
    model = Branches(lambda x, hidden: x.sum() > 0).eval()
    batches = [torch.ones(4, 3), -torch.ones(4, 3)]
    reuse = reuse_for(model, lambda model: [model(batch).detach() for batch in batches])
    reuse.baseline()
    assert {"one", "last"} <= reuse.cuts.keys()
    for layer in reuse.layers:
        reuse.enter(layer, 1)
        with swapped_tensors(model, other_weights(model, layer)):
            expected = [model(batch).detach() for batch in batches]
            torch.testing.assert_close(reuse.evaluate(layer), expected, rtol=0, atol=0)


def test_a_way_that_hangs_on_what_is_not_computed_is_an_error_and_not_a_wrong_number():
    model = Branches(lambda x, hidden: hidden.abs().max() > 1e4).eval()
    batches = [torch.ones(4, 3), 1e6 * torch.ones(4, 3)]  # the first does not show it
    reuse = reuse_for(model, lambda model: [model(batch).detach() for batch in batches])
    reuse.baseline()
    with pytest.raises(RuntimeError, match=r"another way.*reuse_activations=False"):
        reuse.evaluate("last")


@dataclass
class Batch:
    x: torch.Tensor

    def __getitem__(self, name):
        return getattr(self, name)


class Hidden(nn.Module):
    """Three layers, and what becomes of the hidden values and the output."""

    def __init__(self, decide=lambda hidden, output: output):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.first.weight.data.abs_()
        self.decide = decide

    def forward(self, x, extra=None):
        hidden = self.first(x)
        output = self.last(self.middle(hidden).tanh())
        return self.decide(hidden, output) if extra is None else self.decide(hidden, output) + hidden * extra


def split(*numbers, size=5):
    """An evaluation of a model on batches of some numbers."""
    calls = list(zip(*(number.split(size) for number in numbers), strict=True))
    return torch.no_grad()(lambda model: [model(*call) for call in calls])


@pytest.mark.parametrize(
    ("shows", "later"),
    [
        (lambda hidden: hidden == 0, 0.0),
        (lambda hidden: hidden > 6, 1e3),
        (lambda hidden: hidden < -6, -1e3),
        (lambda hidden: (hidden - hidden.mean(1, keepdim=True)).abs() > 0.01, 1e3),
    ],
    ids=["zero", "large", "negative", "uneven"],
)
def test_a_decision_that_only_later_examples_show_is_no_cut(shows, later):
    model = Hidden(lambda hidden, output: torch.where(shows(hidden), hidden, output))
    x = torch.rand(10, 6)
    x[:3] *= 1e-4
    x[3:] *= later
    assert not shows(model.first(x))[:3].any()
    assert shows(model.first(x))[3:].all(0).any()
    reuse = reuse_for(model, split(x))
    reuse.baseline()
    assert reuse.cuts == {}


def test_an_output_of_whole_numbers_proves_nothing():
    model = Hidden(lambda hidden, output: output.argmax(-1))
    reuse = reuse_for(model, split(torch.randn(10, 6)))
    reuse.baseline()
    assert reuse.cuts == {}


def test_what_does_not_run_again_gives_nan():
    model, seen = Hidden(), []
    reuse = reuse_for(model, split(torch.randn(10, 6)))
    reuse.baseline()
    with model.first.register_forward_hook(lambda module, given, output: seen.append(output.isnan().all().item())):
        reuse.evaluate("last")
    assert seen == [True, True]


@pytest.mark.parametrize("wrap", [dict, UserDict, lambda values: Batch(**values)])
def test_other_batches_are_refused_in_whatever_they_come(wrap):
    x, model = torch.randn(10, 6), Hidden()

    def evaluate(net):
        with torch.no_grad():
            return [net(wrap({"x": rows})) for rows in x[torch.randperm(10)].split(5)]

    model.first.register_forward_pre_hook(lambda module, given: given[0]["x"])
    reuse = reuse_for(model, evaluate)
    reuse.baseline()
    assert reuse.cuts
    with pytest.raises(ValueError, match="same batches in the same order"):
        reuse.evaluate("last")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_large_number_in_all_examples_does_not_hide_that_they_changed_places(autocast):
    x = torch.cat([torch.randn(10, 5), torch.full((10, 1), 1e6)], 1)
    model = Hidden()
    model.first.weight.data[:, -1] = 0

    def evaluate(model):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return split(x[torch.randperm(10)])(model)

    reuse = reuse_for(model, evaluate)
    reuse.baseline()
    assert reuse.cuts
    with pytest.raises(ValueError, match="same batches in the same order"):
        reuse.evaluate("last")


def test_inputs_are_compared_in_single_precision_under_autocast():
    x, model, passes = 4.0 * torch.randint(64, 127, (10, 6)), Hidden(), []
    model.first.register_forward_pre_hook(lambda module, given: 0.01 * given[0])

    def evaluate(model):
        passes.append(1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return split(x if len(passes) == 1 else x + 1)(model)  # 257 is 256 in this dtype

    reuse = reuse_for(model, evaluate)
    reuse.baseline()
    assert reuse.cuts
    with pytest.raises(ValueError, match="same batches in the same order"):
        reuse.evaluate("last")


class TakesAnything(Hidden):
    def forward(self, x, anything):
        return super().forward(x)


@pytest.mark.parametrize(
    "thing",
    [
        torch.eye(5).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        torch.ones(5, device="meta"),
        object(),
    ],
    ids=["sparse", "nested", "meta", "object"],
)
@pytest.mark.parametrize("call", [0, 1])
def test_nothing_is_reused_where_it_cannot_be_seen_what_the_model_is_given(thing, call):
    x, model = torch.randn(2, 5, 6), TakesAnything()
    evaluate = torch.no_grad()(lambda model: [model(x[n], thing if n == call else None) for n in range(2)])
    assert set(compare(model, evaluate).values()) == {None}


@pytest.mark.parametrize(
    "thing",
    [
        torch.full((5, 5), torch.finfo(torch.float32).min),
        torch.zeros(0, 4),
        torch.zeros(5, 0),
        torch.tensor(1.0),
        torch.ones(5, 3, dtype=torch.complex64),
        "text",
    ],
    ids=["mask", "empty", "empty-rows", "number", "complex", "text"],
)
def test_what_can_be_seen_is_no_hindrance(thing):
    x = torch.randn(2, 5, 6)
    cuts = compare(TakesAnything(), torch.no_grad()(lambda model: [model(batch, thing) for batch in x]))
    assert cuts == {"first": None, "middle": "middle", "last": "last"}


@pytest.mark.parametrize("first", [{}, {"extra": None}, {"extra": 0}, {"extra": torch.zeros(1, dtype=torch.int64)}])
def test_a_call_that_is_not_like_the_first_runs_whole(first):
    class Skips(Hidden):
        def forward(self, x, extra=None):
            is_number = isinstance(extra, torch.Tensor) and extra.is_floating_point()
            return super().forward(x, extra if is_number else None)

    x = torch.randn(3, 5, 6)

    def evaluate(model):
        with torch.no_grad():
            return [model(x[0], **first), model(x[1], extra=torch.ones(5, 1)), model(x[2], **first)]

    assert compare(Skips(), evaluate) == {"first": None, "middle": "middle", "last": "last"}


def test_without_reuse_nothing_is_put_into_the_model():
    model = Hidden()

    def evaluate(model):
        assert not any("forward" in vars(module) for module in model.modules())
        return split(torch.randn(10, 6))(model)  # others each time

    reuse = ActivationReuse(model, evaluate, ["last"], lambda layer: ["last.weight"], 2**30, enabled=False)
    reuse.baseline()
    reuse.enter("last", 1)
    reuse.evaluate("last")


def test_a_cut_that_writes_into_what_it_is_given_gets_copies():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(6, 6), WritesIntoGiven(), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.block(self.first(x)))

    class WritesIntoGiven(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return x.mul_(2.0) + self.layer(x)

    cuts = compare(Net(), split(torch.randn(10, 6)), times=3)
    assert cuts == {"first": None, "block.layer": "block", "last": "last"}


def test_a_pass_that_does_not_come_by_the_cut_is_an_error():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            hidden = self.first(x)
            return x if x.sum() > 0 and hidden.isnan().any() else self.last(hidden)

    reuse = reuse_for(Net(), split(torch.tensor([[-1.0], [1.0]]).expand(2, 3), size=1))
    reuse.baseline()
    with pytest.raises(RuntimeError, match="another way"):
        reuse.evaluate("last")


@pytest.mark.parametrize("always", [True, False])
def test_a_cache_that_modules_fill_is_no_cut(always):
    class Cache:
        def __init__(self):
            self.kept = []

    class Fill(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x, cache):
            output = F.linear(x, self.layer.weight, self.layer.bias)
            if cache is None:
                return output
            cache.kept.append(output)
            return sum(cache.kept)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fill, self.last = nn.Linear(6, 6), Fill(), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.fill(self.first(x), Cache() if always or len(x) == 3 else None))

    cuts = compare(Net(), split(torch.randn(13, 6)), times=3)
    assert cuts == {"first": None, "fill.layer": None if always else "fill", "last": "last"}


def test_layers_are_taken_up_in_the_order_in_which_they_run():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    assert list(compare(Backwards(), split(torch.randn(10, 6)))) == ["first", "middle", "last"]


def test_what_a_module_keeps_of_single_numbers_goes_past_a_cut_too():
    model = KeptInAttribute()
    model.encoder.layer = nn.Linear(1, 6)
    inner = model.encoder.forward
    model.encoder.forward = lambda x: inner(x[:, :1])
    x = torch.randn(6, 1)
    cuts = compare(model, torch.no_grad()(lambda model: [model(batch) for batch in x.split(2)]))
    assert cuts == {"encoder.layer": None, "middle": None, "last": "last"}


def test_trials_leave_no_trace_in_the_first_evaluation():
    class Net(Hidden):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("peak", torch.ones(()), persistent=False)

        def forward(self, x):
            self.calls += 1
            self.peak.copy_(0.5 * self.peak + 0.5 * self.last(self.first(x)).abs().max())
            return F.dropout(super().forward(x) / self.peak, 0.5, True)

    x = torch.randn(10, 6)

    def evaluate(model):
        torch.manual_seed(0)
        return [*split(x)(model), model.peak.clone(), torch.tensor(float(model.calls))]

    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    outputs = reuse_for(models[0], evaluate).baseline()
    torch.testing.assert_close(outputs, evaluate(models[1]), rtol=0, atol=0)
