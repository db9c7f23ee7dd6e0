from collections import Counter
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


@pytest.mark.parametrize("change", ["order", "numbers", "fewer", "more", "size"])
def test_other_batches_than_the_first_time_are_refused(change):
    first, model, passes = torch.randn(4, 5, 3, 8, 8), lively(chain()), []

    def evaluate(model):
        passes.append(1)
        batches = first
        if len(passes) > 1:
            batches = {
                "order": first.flatten(0, 1)[torch.randperm(20)].view_as(first),
                "numbers": first.flip(-1),
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
