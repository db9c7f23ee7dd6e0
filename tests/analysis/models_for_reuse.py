"""Small models of many kinds, and the comparison of what is reused with what is computed whole."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertForSequenceClassification

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
