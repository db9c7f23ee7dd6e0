from collections import Counter, UserDict
from dataclasses import dataclass

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_sphere.analysis.activation_reuse import ActivationReuse
from hf_sphere.analysis.layers import find_layers
from hf_sphere.analysis.swapping import named_tensors, swapped_tensors

BATCHES = (5, 5, 3)
"""The last batch is smaller, and the first has more examples than a cut is tried on."""


def chain():
    """VGG in small."""
    layers = []
    for channels, width in ((3, 8), (8, 8), (8, 12)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


class Shared(nn.Module):
    """One convolution at two depths."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.last, self.relu = nn.Linear(6, 4), nn.ReLU()

    def forward(self, x):
        x = self.relu(self.first(x))
        x = self.relu(self.twice(self.relu(self.twice(x))))
        return self.last(x.mean((2, 3)))


class TiedModules(nn.Module):
    """Two modules with one weight, another layer between them."""

    def __init__(self):
        super().__init__()
        self.before, self.early, self.between, self.late = (nn.Linear(6, 6) for _ in range(4))
        self.late.weight = self.early.weight

    def forward(self, x):
        return self.late(self.between(self.early(self.before(x.flatten(1)[:, :6]).tanh()).tanh()).tanh())


class UNet(nn.Module):
    """Something goes past everything."""

    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = (nn.Conv2d(c, 4, 3, padding=1) for c in (3, 4, 8))

    def forward(self, x):
        down = self.down(x).relu()
        middle = F.interpolate(self.middle(F.avg_pool2d(down, 2)).relu(), scale_factor=2)
        return self.up(torch.cat([down, middle], 1)).mean((2, 3))


class KeptInAttribute(nn.Module):
    """What goes past the middle is not handed on, it is kept by a module."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            self.kept = self.layer(x)
            return self.kept.tanh()

    def __init__(self):
        super().__init__()
        self.encoder, self.middle, self.last = self.Encoder(), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.middle(self.encoder(x.flatten(1)[:, :6]))
        return self.last(x + self.encoder.kept)


class WritesInPlace(nn.Module):
    """Functions that write into what modules gave, and a block that writes into what it is given."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(6, 6, 3, padding=1)

        def forward(self, x):
            return x.mul_(2.0) + self.layer(x)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.block = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), self.Block()
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        x = self.block(self.second(self.first(x).mul_(3.0)))
        return self.last(F.relu(x.mean((2, 3)), inplace=True))


class WithKeywords(nn.Module):
    """Images and a mask by name, an output with fields, as transformers has them."""

    @dataclass
    class Output:
        logits: torch.Tensor
        states: tuple

    def __init__(self):
        super().__init__()
        self.net = chain()

    def forward(self, pixel_values=None, mask=None, return_dict=True):
        logits = self.net(pixel_values * mask[:, None, None, None])
        return self.Output(logits, (logits, None))


def run_images(model, images):
    if isinstance(model, WithKeywords):
        return model(pixel_values=images, mask=torch.arange(1.0, 1 + len(images)), return_dict=True).logits
    if isinstance(model, BertForSequenceClassification):
        ids = (images[:, 0].flatten(1)[:, :10] * 5).long() % 50
        return model(input_ids=ids, attention_mask=(ids != 3).long()).logits
    return model(images)


def evaluation(seed=0, side=8, mode=torch.inference_mode):
    """Something of the outputs of all batches that every weight shows in."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(size, 3, side, side, generator=generator) for size in BATCHES]

    def evaluate(model):
        with mode():
            return [run_images(model, batch.clone()).detach().float() for batch in batches]

    return evaluate


def lively(model, seed=1):
    """Statistics and gains off their initial values, evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in named_tensors(model).items():
        if value.is_floating_point() and value.ndim == 1:
            value.data += (0.5 if "var" in name else 0.1) * torch.rand(value.shape, generator=generator)
    return model.eval()


def other_weights(model, layer, seed=2):
    generator = torch.Generator().manual_seed(seed)
    state = {name: value for name, value in named_tensors(model).items() if name.startswith(f"{layer}.")}
    return {n: v.detach() + 0.2 * torch.randn(v.shape, generator=generator).to(v) for n, v in state.items()}


def reuse_for(model, evaluate, room=2**30):
    changes = {layer: list(other_weights(model, layer)) for layer in find_layers(model, "all", True)}
    return ActivationReuse(model, evaluate, changes, changes.__getitem__, room)


def compare(model, evaluate, room=2**30, times=2):
    """Evaluate each layer changed, with and without reuse; return the cuts by name."""
    reuse = reuse_for(model, evaluate, room)
    baseline = reuse.baseline()
    for new, old in zip(baseline, evaluate(model), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    for layer in reuse.layers:
        reuse.enter(layer, times)
        for time in range(times):
            with swapped_tensors(model, other_weights(model, layer, seed=time)):
                outputs, expected = reuse.evaluate(layer), evaluate(model)
            for new, old, untouched in zip(outputs, expected, baseline, strict=True):
                torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)
                assert not torch.allclose(old, untouched, rtol=1e-4, atol=1e-5), f"{layer} changes nothing"
    names = {module: name for name, module in model.named_modules()}
    return {layer: names[reuse.cuts[layer]] if layer in reuse.cuts else None for layer in reuse.layers}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_chain_is_cut_at_every_layer_but_the_first(mode):
    cuts = compare(lively(chain()), evaluation(mode=mode))
    assert cuts == {"0": None, "4": "4", "8": "8", "14": "14", "16": "16"}


def test_a_residual_net_is_cut_at_its_blocks():
    model = lively(timm.create_model("resnet10t", num_classes=4))
    cuts = compare(model, evaluation(side=32), times=1)
    assert cuts["conv1.0"] is None
    assert cuts["conv1.3"] == "conv1.3"
    assert {cuts[f"layer{n}.0.conv{k}"] for n in (1, 2, 3, 4) for k in (1, 2)} == {f"layer{n}.0" for n in (1, 2, 3, 4)}
    assert cuts["fc"] == "fc"


def test_a_layer_that_something_goes_past_is_not_cut():
    assert compare(lively(UNet()), evaluation()) == {"down": None, "middle": None, "up": "up"}


def test_what_a_module_keeps_goes_past_a_cut_too():
    cuts = compare(lively(KeptInAttribute()), evaluation())
    assert cuts == {"encoder.layer": None, "middle": None, "last": None}


def test_a_layer_that_is_used_twice_is_cut_at_its_first_use():
    assert compare(lively(Shared()), evaluation()) == {"first": None, "twice": "twice", "last": "last"}


def test_a_weight_that_a_later_module_shares_is_cut_before_its_first_use():
    assert compare(lively(TiedModules()), evaluation()) == {"before": None, "early": "early", "between": "between"}


def test_a_weight_that_an_earlier_module_uses_is_not_cut():
    model = lively(TiedModules())
    weight = model.late._parameters.pop("weight")
    model.late.register_parameter("weight", weight)
    reuse = ActivationReuse(model, evaluation(), ["late"], lambda layer: ["late.weight"], 2**30)
    reuse.baseline()
    assert reuse.cuts == {}


def test_what_is_written_into_does_not_spoil_the_record():
    model = lively(WritesInPlace())
    cuts = compare(model, evaluation(), times=3)
    assert cuts["second"] == "second"  # it comes by a blank that is written into
    assert cuts["block.layer"] == "block"  # it writes into what it is given
    assert cuts["last"] == "last"


def test_keywords_and_outputs_with_fields_are_reused_like_others():
    cuts = compare(lively(WithKeywords()), evaluation())
    assert cuts["net.0"] is None
    assert cuts["net.4"] == "net.4"


def test_a_text_encoder_is_cut_at_its_blocks():
    config = BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, num_labels=4
    )
    model = lively(BertForSequenceClassification(config))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.config.output_hidden_states = False
    reuse = reuse_for(model, evaluation())
    reuse.baseline()
    names = {module: name for name, module in model.named_modules()}
    cuts = {layer: names[module] for layer, module in reuse.cuts.items()}
    assert cuts["bert.encoder.layer.1.intermediate.dense"] == "bert.encoder.layer.1"
    assert cuts["classifier"] == "classifier"
    for layer in reuse.layers:
        reuse.enter(layer, 1)
        with swapped_tensors(model, other_weights(model, layer)):
            torch.testing.assert_close(reuse.evaluate(layer), evaluation()(model), rtol=1e-5, atol=1e-6)


def test_layers_before_a_cut_do_not_run_again():
    model = lively(chain())
    counts: Counter[str] = Counter()
    for name in ("0", "4", "8"):
        model.get_submodule(name).register_forward_hook(
            lambda module, given, output, name=name: counts.update({name: 0 if output.stride(-1) == 0 else 1})
        )
    reuse = reuse_for(model, evaluation())
    reuse.baseline()
    counts.clear()
    reuse.enter("8", 1)
    reuse.evaluate("8")
    assert counts == {"0": 0, "4": 0, "8": len(BATCHES)}


@pytest.mark.parametrize("share", [0, 0.03, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("times", [1, 2, 40])
def test_little_room_costs_speed_only(share, times):
    model = lively(timm.create_model("vgg11_cifar", widths=(4, 8, 8, 8), hidden=8, num_classes=4, in_chans=3))
    full = reuse_for(model, evaluation(side=32))
    full.baseline()
    needed = sum(size for sizes in full._sizes.values() for size in sizes.values())
    room = int(share * needed)
    reuse = reuse_for(model, evaluation(side=32), room)
    reuse.baseline()
    for layer in reuse.layers:
        reuse.enter(layer, times)
        held = {id(e): s for c, es in reuse._entries.items() for n, e in es.items() for s in [reuse._sizes[c][n]]}
        assert sum(held.values()) == room - reuse._free <= room
        with swapped_tensors(model, other_weights(model, layer)):
            torch.testing.assert_close(reuse.evaluate(layer), evaluation(side=32)(model), rtol=1e-5, atol=1e-6)


def test_with_little_room_later_passes_record_what_the_first_could_not():
    model = lively(chain())
    reuse = reuse_for(model, evaluation(), room=4 * 8 * 4 * 4 * sum(BATCHES))  # the largest input and no more
    reuse.baseline()
    assert len(reuse._entries) == 1
    for layer in ("4", "8", "14", "16"):
        reuse.enter(layer, 5)
        assert len(reuse._entries[reuse.cuts[layer]]) == len(BATCHES)


@pytest.mark.parametrize("change", ["order", "numbers", "slightly", "fewer", "more", "size"])
def test_other_batches_than_the_first_time_are_refused(change):
    first, model, passes = torch.randn(4, 5, 3, 8, 8), lively(chain()), []

    def evaluate(model):
        passes.append(1)
        batches = first
        if len(passes) > 1:
            batches = {
                "order": first.flatten(0, 1)[torch.randperm(20)].view_as(first),
                "numbers": first.flip(-1),
                "slightly": first + 0.01 * torch.randn_like(first),
                "fewer": first[:3],
                "more": torch.cat([first, first]),
                "size": first[:, :4],
            }[change]
        with torch.no_grad():
            return [model(batch) for batch in batches]

    reuse = reuse_for(model, evaluate)
    reuse.baseline()
    with pytest.raises(ValueError, match=r"same batches in the same order.*reuse_activations=False"):
        reuse.evaluate("8")


def test_a_model_that_takes_one_size_of_batch_is_tried_on_the_whole_batch():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = chain()

        def forward(self, x):
            return self.net(x.view(5, 3, 8, 8))

    batch = torch.randn(5, 3, 8, 8)
    model = lively(Fixed())
    assert compare(model, lambda model: [model(batch).detach()])["net.8"] == "net.8"


def test_nothing_is_reused_where_only_a_part_of_the_model_is_run():
    model = lively(WithKeywords())
    assert set(compare(model, lambda model: [model.net(torch.ones(5, 3, 8, 8)).detach()]).values()) == {None}


def test_nothing_is_reused_of_a_compiled_model():
    model = lively(chain())
    compiled = torch.compile(model, backend="eager")
    images = torch.randn(5, 3, 8, 8)
    evaluate = torch.no_grad()(lambda model: [model(images)])
    assert set(compare(compiled, evaluate).values()) == {None}
    assert set(compare(model, torch.no_grad()(lambda model: [compiled(images)])).values()) == {None}


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
