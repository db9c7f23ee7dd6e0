from collections import Counter

import pytest
import timm
import torch
from models_for_reuse import (
    BATCHES,
    KeptInAttribute,
    Shared,
    TiedModules,
    UNet,
    WithKeywords,
    WritesInPlace,
    chain,
    compare,
    evaluation,
    lively,
    other_weights,
    reuse_for,
)
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_sphere.analysis.activation_reuse import ActivationReuse
from hf_sphere.analysis.swapping import swapped_tensors


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
