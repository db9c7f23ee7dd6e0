from operator import attrgetter

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from hf_sphere.losses import HeadLoss
from hf_sphere.nn import HEADS, Head, build_head, class_softmax
from hf_sphere.nn.class_softmax import sum_over_other_classes
from hf_sphere.nn.heads import mixins
from hf_sphere.nn.heads.mixins import ClassVectorHead
from hf_sphere.utils.checks import keyword_options

HEADS_IN_BLOCKS = [name for name, head in HEADS.items() if "blockwise" in keyword_options(head)]
SMOOTHED = ["softmax", "cosine", "arcface", "spherized"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for name in ("BLOCK", "SAMPLE_BLOCK"):
        monkeypatch.setattr(class_softmax, name, {"cpu": 0, "other": 0})
    monkeypatch.setattr(class_softmax, "SMALLEST_BLOCK", 4)


def make(name: str, num_classes: int = 11, **options) -> ClassVectorHead:
    torch.manual_seed(1)
    head = build_head(name, 6, num_classes, **options)
    if head.needs_data_initialization:
        head.initialize_from_data(torch.randn(20, 6))
    return head


def losses_and_gradients(head: Head, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    head.before_forward(3, torch.arange(len(x)))
    loss = head(x, labels).loss
    parameters = [each for each in head.parameters() if each.requires_grad]
    return (loss.detach(), *torch.autograd.grad(loss, [x, *parameters]))


def example(dtype: torch.dtype = torch.float64, batch: int = 5) -> tuple[Tensor, Tensor]:
    """Return embeddings, always the same, and labels."""
    x = torch.randn(batch, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return (2 * x).to(dtype), torch.tensor([0, 10, 3, 3, 7, 9, -100])[:batch]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
def test_blocks_give_the_loss_and_gradients_of_the_logits(name, training):
    for options in [{}, *([{"label_smoothing": 0.2}] if name in SMOOTHED else [])]:
        heads = [make(name, blockwise=flag, **options).double().train(training) for flag in (False, True)]
        of_dense, of_blocks = (losses_and_gradients(head, *example(batch=7 - 2 * len(options))) for head in heads)
        torch.testing.assert_close(of_blocks, of_dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("centers", [None, 3])
def test_sum_over_other_classes_passes_gradcheck_with_own_classes_outside(normalize, centers):
    weight = torch.randn(*((9, 4) if centers is None else (9, centers, 4)), dtype=torch.float64, requires_grad=True)
    bias = None if centers else torch.randn(9, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 8, -3, 12])

    def value(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return sum_over_other_classes(x, weight, bias, labels, normalize=normalize, sum_logits=True)

    assert gradcheck(value, (x, weight, bias))


@pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
def test_one_class_has_no_loss(name):
    found = losses_and_gradients(make(name, num_classes=1, blockwise=True), example()[0].float(), torch.zeros(5).long())
    expected = losses_and_gradients(make(name, num_classes=1), example()[0].float(), torch.zeros(5).long())
    assert all(each.isfinite().all() for each in found)
    if name != "vmf":
        assert found[0] == expected[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
def test_half_precision_is_computed_in_float32(name, dtype):
    head, (x, labels) = make(name, blockwise=True).to(dtype), example(dtype)
    x[0] = 0
    with torch.no_grad():
        x[1] = head.get_parameter(head.class_parameters[0]).flatten(0, -2)[10, :6]  # the cosine 1
        x[2] = -head.get_parameter(head.class_parameters[0]).flatten(0, -2)[3, :6]
    loss, *gradients = losses_and_gradients(head, x, labels)
    assert loss.dtype == torch.float32
    assert all(each.isfinite().all() for each in (loss, *gradients))


class TestAutomaticBlocks:
    @pytest.fixture(autouse=True)
    def _few_logits_are_many(self, monkeypatch):
        """Make blocks automatic from 4 examples on, and count how often they are used."""
        monkeypatch.setattr(mixins, "MANY_LOGITS", 33)
        self.blocks = []

        def count(*arguments, **options):
            self.blocks.append(len(arguments[0]))
            return sum_over_other_classes(*arguments, **options)

        monkeypatch.setattr(mixins, "sum_over_other_classes", count)

    @staticmethod
    def loss(name: str, **options) -> HeadLoss:
        loss = HeadLoss(6, 11, head=name, **options)
        loss.head = make(name, **options)
        return loss

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("name", sorted(set(HEADS_IN_BLOCKS) - {"vmf"}))
    def test_a_large_batch_has_the_loss_and_gradients_of_the_logits(self, name, training):
        x, labels = example(batch=7)
        weights = {"class_weights": [1.0, *[0.5] * 10]}
        found = []
        for blockwise in (False, "auto"):
            loss, inputs = self.loss(name, blockwise=blockwise, **weights).double().train(training), x.requires_grad_()
            value = loss(inputs, labels)
            found.append(
                (value, *torch.autograd.grad(value, [inputs, *filter(attrgetter("requires_grad"), loss.parameters())]))
            )
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
        assert self.blocks == [7]

    def test_samples_and_sub_centers_count_as_logits(self):
        samples, centers = make("vmf", num_samples=5), make("subcenter_arcface", sub_centers=3)
        assert [samples.is_large(torch.zeros(batch, 6)) for batch in (0, 1)] == [False, True]
        assert [centers.is_large(torch.zeros(batch, 6)) for batch in (1, 2)] == [False, True]

    @pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
    def test_the_output_of_a_head_has_logits_but_in_training_with_the_option(self, name):
        x, labels = example(torch.float32)
        assert make(name)(x, labels).logits.shape == (5, 11)
        assert not self.blocks
        head = make(name, blockwise=True)
        assert head(x, labels).logits is None
        assert head(x).logits.shape == head.eval()(x, labels).logits.shape == (5, 11)

    def test_a_subclass_with_other_logits_uses_them(self):
        class ShiftedHead(HEADS["cosine"]):
            def compute_logits(self, embeddings: Tensor) -> Tensor:
                return super().compute_logits(embeddings) + torch.arange(11)

        head, (x, labels) = ShiftedHead(6, 11), example(torch.float32)
        assert head(x, labels, needs_logits=False).loss == head(x, labels).loss

    def test_small_batches_other_heads_and_several_classes_per_example_use_the_logits(self):
        self.loss("arcface")(*example(torch.float32, batch=3))
        assert not self.blocks
        assert self.loss("proxy_anchor")(*example(torch.float32)).isfinite()
        x, labels = torch.randn(7, 6), torch.rand(7, 11)
        assert self.loss("cosine")(x, labels) == self.loss("cosine", blockwise=False)(x, labels)

    @pytest.mark.parametrize("name", ["softmax", "subcenter_arcface"])
    def test_gradients_of_each_example_use_the_logits(self, name):
        loss, (x, labels) = self.loss(name).double(), example(batch=7)
        parameters = {key: value.detach() for key, value in loss.named_parameters()}

        def compute(parameters, x, label):
            return torch.func.functional_call(loss, parameters, (x.repeat(7, 1), label.repeat(7)))

        found = torch.func.vmap(torch.func.grad(compute), in_dims=(None, 0, 0))(parameters, x[:2], labels[:2])
        expected = torch.func.grad(compute)(parameters, x[0], labels[0])
        torch.testing.assert_close({key: value[0] for key, value in found.items()}, expected)

    def test_a_second_derivative_of_blocks_names_the_option(self):
        x, labels = example(batch=7)
        gradient = torch.autograd.grad(self.loss("arcface").double()(x.requires_grad_(), labels), x, create_graph=True)
        with pytest.raises(RuntimeError, match="has one with blockwise=False"):
            gradient[0].sum().backward()

    @pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
    def test_a_copy_of_data_parallel_has_the_same_loss(self, name):
        head, (x, labels) = make(name).eval(), example(torch.float32)
        copies = {module: module._replicate_for_data_parallel() for module in head.modules()}
        for module, copy in copies.items():
            for key, child in module.named_children():
                copy._modules[key] = copies[child]
            for key, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                setattr(copy, key, value.detach().clone())
        assert copies[head](x, labels, needs_logits=False).loss == head(x, labels, needs_logits=False).loss


class TestSampling:
    @pytest.mark.parametrize("name", HEADS_IN_BLOCKS)
    def test_a_sampled_loss_is_that_of_a_head_with_these_classes(self, name):
        head, (x, labels) = make(name, sample_rate=0.4).double(), example()
        head.before_forward(3, torch.arange(5))
        kept = head.select_classes(labels)[0][0].detach()
        rows = (head.get_parameter(head.class_parameters[0]).flatten(1)[:, None] == kept.flatten(1)).all(-1).any(1)
        assert set(labels.tolist()) <= set(rows.nonzero()[:, 0].tolist())
        assert len(kept) < 11
        smaller = make(name, num_classes=len(kept)).double()
        state = {n: v[rows] if n in head.class_parameters else v for n, v in head.state_dict().items()}
        smaller.load_state_dict(state)
        found = losses_and_gradients(head, x, labels)
        expected = losses_and_gradients(smaller, x, (rows.cumsum(0) - 1)[labels])
        torch.testing.assert_close(found[:2], expected[:2])

    def test_another_step_has_another_sample(self):
        head = make("cosine", num_classes=1000, sample_rate=0.3)
        samples = []
        for seed in (1, 1, 2):
            head.before_forward(seed, torch.arange(1))
            samples.append(head.select_classes(torch.tensor([0]))[0][0].detach())
        assert torch.equal(samples[0], samples[1])
        assert len(samples[0]) == pytest.approx(300, abs=60)
        assert not torch.equal(samples[0][:100], samples[2][:100])

    @pytest.mark.parametrize("seed", [None, 3])
    def test_compiled_code_samples_the_same_classes(self, seed):
        head, (_, labels) = make("arcface", sample_rate=0.4), example(torch.float32)
        samples = []
        for run in (head.select_classes, torch.compile(head.select_classes, backend="inductor")):
            torch.manual_seed(0)
            if seed is not None:
                head.before_forward(seed, torch.arange(5))
            samples.append(run(labels))
        torch.testing.assert_close(*samples)

    def test_all_classes_are_used_in_evaluation(self):
        sampled, full = (make("cosine", sample_rate=rate).eval()(*example(torch.float32)).loss for rate in (0.4, 1.0))
        torch.testing.assert_close(sampled, full)
