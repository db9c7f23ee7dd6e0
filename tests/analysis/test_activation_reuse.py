import copy
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.analysis import reinitialization_robustness


def chain():
    """A small VGG: its layers are steps of one `nn.Sequential`, some of which write into their input."""
    layers = []
    for channels, width in ((3, 8), (8, 8), (8, 12)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


class TiedAcrossSteps(nn.Module):
    """A later step reuses the weight of an early one, and one step runs twice."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(6, 6) for _ in range(4)]
        layers[3].weight = layers[1].weight
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), *layers, layers[2], nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x))


class WithSkip(nn.Module):
    """Activations bypass a nested `nn.Sequential`, and a function writes into its output."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        inner = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(inner, nn.BatchNorm2d(6), nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head((self.body(x).mul_(2.0) + x).mean((2, 3)))


class SkipsByValue(nn.Module):
    """The control flow depends on an activation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.second(x) if x.mean() > 0 else x)


class KeepsActivations(nn.Module):
    """A step stores an activation in an attribute, which a later part of the model reads."""

    class Keep(nn.Module):
        def forward(self, x):
            self.kept = x
            return x.tanh()

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), self.Keep(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x) + self.body[2].kept)


class CountsCalls(nn.Module):
    """A step updates a buffer in evaluation mode."""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), self.Count(), nn.Linear(192, 6), nn.Linear(6, 4))

    def forward(self, x):
        return self.body(x)


class DrawsNumbers(nn.Module):
    """A step draws random numbers in evaluation mode."""

    class Noise(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, True)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), self.Noise(), nn.Linear(6, 6), self.Noise())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Subclassed(nn.Module):
    """A subclass of `nn.Sequential` with another forward method."""

    class Residual(nn.Sequential):
        def forward(self, x):
            for module in self:
                x = x + module(x)
            return x

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), self.Residual(nn.Linear(192, 192), nn.Linear(192, 192)))
        self.head = nn.Linear(192, 4)

    def forward(self, x):
        return self.head(self.body(x))


def ours():
    config = SphereVisionConfig(backbone="vgg11_cifar", backbone_kwargs={"widths": [4, 4, 6, 6], "hidden": 8})
    config.update({"head": "softmax", "num_channels": 3, "image_size": [32, 32], "num_labels": 4})
    return SphereVisionForImageClassification(config)


MODELS = {
    "chain": chain,
    "tied": TiedAcrossSteps,
    "skip": WithSkip,
    "control flow": SkipsByValue,
    "attribute": KeepsActivations,
    "buffer": CountsCalls,
    "random": DrawsNumbers,
    "subclass": Subclassed,
    "timm": lambda: timm.create_model("resnet10t", num_classes=4, zero_init_last=False),
    "torchvision": lambda: torchvision.models.squeezenet1_1(num_classes=4),
    "ours": ours,
}


def evaluation(side=8, mode=torch.inference_mode):
    """A number in [0, 1] that depends on all outputs; the last batch is smaller."""
    batches = torch.randn(13, 3, side, side, generator=torch.Generator().manual_seed(1)).split(5)

    def evaluate(model):
        torch.manual_seed(0)
        with mode():
            outputs = [model(batch.clone()) for batch in batches]
        logits = torch.cat([output.logits if hasattr(output, "logits") else output for output in outputs])
        return logits.detach().double().softmax(-1)[:, 0].mean()

    return evaluate


def tables(model, evaluate, **options):
    """Results with and without reuse; each layer changes the result."""
    torch.manual_seed(2)
    snapshots = []
    for scale in (0.1, 0.2):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in state.items():
            if value.is_floating_point():
                value += scale * (torch.rand_like(value) if "running_var" in name else torch.randn_like(value))
        snapshots.append(state)
    whole = reinitialization_robustness(model, snapshots, evaluate, reuse_activations=False, **options)
    assert all(value != whole.accuracy for layer in whole.layers.values() for value in layer.snapshots.values())
    return reinitialization_robustness(model, snapshots, evaluate, **options), whole


@pytest.mark.parametrize("name", MODELS)
def test_accuracies_equal_those_of_full_passes(name):
    evaluate = evaluation(side=32 if name in ("timm", "torchvision", "ours") else 8)
    reused, whole = tables(MODELS[name]().eval(), evaluate, include_batch_norm=name == "chain")
    assert reused == whole


def test_accuracies_of_a_text_encoder_equal_those_of_full_passes():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=4, **sizes)).eval()
    ids = torch.arange(60).view(6, 10) % 50

    def evaluate(model):
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=(ids != 3).long()).logits.double().softmax(-1)[:, 0].mean()

    reused, whole = tables(model, evaluate, layers="linear")
    assert reused == whole


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_context_set_by_evaluate_is_respected(mode):
    reused, whole = tables(chain().eval(), evaluation(mode=mode))
    assert reused == whole


def counted(model, layer):
    """Count the calls of a module without a hook."""
    counts, forward = Counter(), layer.forward
    layer.forward = lambda *args: counts.update(["calls"]) or forward(*args)
    return counts


def test_modules_before_the_changed_layer_are_not_rerun():
    model = chain().eval()
    counts = counted(model, model[0])
    snapshots = [chain().state_dict() for _ in range(3)]
    reinitialization_robustness(model, snapshots, evaluation())
    # Three batches: the baseline, each snapshot of this layer, and once to reach the next layer.
    assert counts["calls"] == 3 * (1 + 3 + 1)


def test_results_are_exact_if_a_changed_step_has_only_buffers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(144, 4)).eval()
    reused, whole = tables(model, evaluation())
    assert reused == whole


@pytest.mark.parametrize("name", ["attribute", "buffer", "random"])
def test_activations_are_not_reused_where_results_would_differ(name):
    model = MODELS[name]().eval()
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    counts = counted(model, layer)
    _, whole = tables(model, evaluation(), include_batch_norm=False)
    assert counts["calls"] == 2 * 3 * (1 + 2 * len(whole.layers))


def test_a_model_with_hooks_runs_in_full():
    model, seen = chain().eval(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    reused, whole = tables(model, evaluation())
    assert reused == whole
    assert len(seen) == 2 * 3 * (1 + 2 * 5)


@pytest.mark.parametrize("room", [0, 5_000, 20_000, 60_000])
def test_accuracies_do_not_depend_on_the_memory_limit(room):
    reused, whole = tables(chain().eval(), evaluation(), max_cached_bytes=room)
    assert reused == whole


def test_shuffled_batches_run_in_full():
    images, model = torch.randn(20, 3, 8, 8), chain().eval()
    order = torch.Generator()

    def evaluate(model):
        with torch.no_grad():
            batches = images[torch.randperm(20, generator=order)].split(5)
            return torch.cat([model(batch) for batch in batches]).double().softmax(-1)[:, 0].mean()

    counts = counted(model, model[0])
    snapshots = [chain().state_dict()]
    table = {}
    for reuse in (True, False):
        order.manual_seed(0)
        counts.clear()
        table[reuse] = reinitialization_robustness(model, snapshots, evaluate, reuse_activations=reuse)
        assert counts["calls"] == 4 * (1 + 5)
    assert table[True] == table[False]


def test_results_are_exact_if_layers_run_in_another_order_than_defined():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(6, 4), nn.Linear(192, 6)
            self.body = nn.Sequential(nn.Flatten(), self.first, nn.Tanh(), self.last)

        def forward(self, x):
            return self.body(x)

    reused, whole = tables(Backwards(), evaluation())
    assert reused == whole


def test_a_copy_made_by_evaluate_is_independent():
    def evaluate(model):
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.data *= 0.5
        return evaluation()(other)

    reused, whole = tables(chain().eval(), evaluate, include_batch_norm=False)
    assert reused == whole


def test_a_compiled_model_runs_in_full():
    model = chain().eval()
    compiled = torch.compile(model, backend="eager")
    reused, whole = tables(model, lambda _: evaluation(mode=torch.no_grad)(compiled), include_batch_norm=False)
    assert reused == whole
