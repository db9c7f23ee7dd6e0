import itertools
import pickle
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from pytorch_ood import detector as reference
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.nn import DataParallel
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ViTConfig,
    ViTForImageClassification,
)

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.distributions import VonMisesFisher
from hf_sphere.metrics import detection_scores
from hf_sphere.nn.heads import HEADS
from hf_sphere.ood import SCORES, OODDetector, Outputs, compare_scores, model_outputs
from hf_sphere.ood.detector import FITTED

DIM, CLASSES = 12, 4
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def linear() -> nn.Linear:
    return torch.nn.Linear(DIM, CLASSES)


@pytest.fixture(scope="module")
def draw(linear):
    """Draw outputs near the class means, which are `strength` times as long as those of the training data."""
    generator = torch.Generator().manual_seed(1)
    means = 2 * torch.randn(CLASSES, DIM, generator=generator)

    def draw(count: int, strength: float = 1.0) -> Outputs:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        points = strength * means[labels] + torch.randn(count, DIM, generator=generator)
        return Outputs(points, linear(points).detach(), labels, points.norm(dim=1))

    return draw


@pytest.fixture(scope="module")
def sets(draw) -> tuple[Outputs, Outputs, Outputs]:
    """Training, held-out and out-of-distribution data."""
    return draw(800), draw(400), draw(300, 0.6)


def fit(name: str, data: Outputs, **options: object) -> OODDetector:
    return OODDetector(name, **options).fit_embeddings(*data[:3])


def compute(detector: OODDetector, data: Outputs) -> torch.Tensor:
    return detector.score_embeddings(*data[:2], concentrations=data.concentrations)


class TestValues:
    @pytest.mark.parametrize("name", ["max_softmax", "max_logit", "energy", "knn", "mahalanobis", "vim"])
    def test_auroc_is_that_of_pytorch_ood(self, name, sets, linear):
        train, inside, outside = sets
        theirs = {
            "max_softmax": reference.MaxSoftmax(None),
            "max_logit": reference.MaxLogit(None),
            "energy": reference.EnergyBased(None),
            "knn": reference.KNN(None, k=50),
            "mahalanobis": reference.Mahalanobis(None),
            "vim": reference.ViM(None, DIM // 2, linear.weight, linear.bias),
        }[name]
        if name in FITTED:
            theirs.fit_features(train.embeddings, train.labels)
            values = [theirs.predict_features(data.embeddings) for data in (inside, outside)]
        else:
            values = [theirs.predict_logits(data.logits) for data in (inside, outside)]
        expected = detection_scores(-values[0], -values[1])
        detector = fit(name, train)
        found = detection_scores(compute(detector, inside), compute(detector, outside))
        assert found["auroc"] == pytest.approx(expected["auroc"], abs=0.001)

    def test_vmf_is_the_log_density_of_the_mixture_of_classes(self, sets):
        train, inside, _ = sets
        points = torch.nn.functional.normalize(train.embeddings.double(), dim=1)
        densities = []
        for label in range(CLASSES):
            own = points[train.labels == label]
            count, total = len(own), own.sum(0)
            # The squared length of the mean without its bias: the mean cosine of pairs of different points.
            length = ((total.square().sum() - count) / (count * (count - 1))).sqrt()
            maximum = VonMisesFisher.fit(own)
            kappa = maximum.concentration
            for _ in range(50):  # Newton's method for the mean resultant length
                ratio = VonMisesFisher(maximum.loc, kappa).mean_resultant_length
                kappa = kappa - (ratio - length) / (1 - ratio**2 - (DIM - 1) / kappa * ratio)
            values = torch.nn.functional.normalize(inside.embeddings.double(), dim=1)
            densities.append(VonMisesFisher(maximum.loc, kappa).log_prob(values) + np.log(count / len(points)))
        expected = torch.stack(densities).logsumexp(0)
        assert torch.allclose(compute(fit("vmf", train), inside), expected, atol=1e-8)

    def test_max_softmax_is_the_logarithm_of_the_probability_without_rounding(self):
        logits = torch.tensor([[0.0, 1.0, 2.0], [100.0, 0.0, 0.0]])
        scores = OODDetector("max_softmax").score_embeddings(None, logits)
        expected = [logits[0].softmax(0).max().log().item(), -2 * np.exp(-100.0)]
        assert scores.tolist() == pytest.approx(expected, rel=1e-6)

    def test_mahalanobis_penalizes_directions_without_variance_in_training(self, sets):
        train, inside, _ = sets
        flat = train._replace(embeddings=torch.nn.functional.pad(train.embeddings, (0, 1)))
        inner = torch.nn.functional.pad(inside.embeddings, (0, 1))
        detector = fit("mahalanobis", flat)
        assert torch.allclose(detector.score_embeddings(inner), compute(fit("mahalanobis", train), inside), rtol=1e-6)
        assert detector.score_embeddings(inner + torch.eye(DIM + 1)[-1]).max() < -1e6

    def test_vim_detects_points_off_the_subspace_without_a_linear_classifier(self):
        train, points = (torch.randn(1000, 3) @ torch.randn(3, DIM) + 0.01 * torch.randn(1000, DIM)).chunk(2)
        logits = torch.nn.functional.normalize(points, dim=1)[:, :CLASSES]
        fitted = torch.nn.functional.normalize(train, dim=1)[:, :CLASSES]
        detector = OODDetector("vim", dim=3).fit_embeddings(train, fitted)
        scores = detector.score_embeddings(points, logits)
        others = detector.score_embeddings(points + 0.1 * torch.randn(500, DIM), logits)
        assert detection_scores(scores, others)["auroc"] > 0.9


class TestInput:
    @pytest.mark.parametrize("name", SCORES)
    def test_norms_dtypes_and_copies_matter_only_where_they_should(self, name, sets):
        train, inside, _ = sets
        detector = fit(name, train)
        scores = compute(detector, inside)
        longer = compute(detector, inside._replace(embeddings=inside[0] * 2))
        assert torch.equal(scores.argsort(), longer.argsort()) == (name not in ("mahalanobis", "vim"))
        assert torch.equal(compute(pickle.loads(pickle.dumps(detector)), inside), scores)
        for dtype in (torch.float16, torch.bfloat16):  # computed in float64
            half = [Outputs(*(v.to(dtype) if v.is_floating_point() else v for v in data[:4])) for data in sets[:2]]
            wide = [Outputs(*(v.double() if v.is_floating_point() else v for v in data[:4])) for data in half]
            scores = compute(fit(name, half[0]), half[1])
            assert scores.dtype == torch.float64
            assert torch.equal(scores, compute(fit(name, wide[0]), wide[1]))

    @pytest.mark.parametrize("name", SCORES)
    def test_nan_is_an_error_and_zero_embeddings_have_finite_scores(self, name, sets):
        train, inside, _ = sets
        for field in ("embeddings", "logits"):
            damaged = train._asdict()[field].clone().index_fill_(0, torch.tensor(3), np.nan)
            with pytest.raises(ValueError, match=f"{field} must be finite; 1 of 800 are not, the first at index 3"):
                fit(name, train._replace(**{field: damaged}))
        train = train._replace(embeddings=train.embeddings.clone().index_fill_(0, torch.tensor([0]), 0.0))
        assert compute(fit(name, train), inside._replace(embeddings=0 * inside.embeddings)).isfinite().all()

    def test_few_points_per_class_and_more_neighbors_are_reported_or_refused(self, draw, sets, caplog):
        few = Outputs(sets[0].embeddings[:20])
        with pytest.raises(ValueError, match="k must be an integer from 1 to 20; got 21"):
            fit("knn", few, k=21)
        assert compute(fit("knn", few, k=20), sets[1]).isfinite().all()
        fit("knn", draw(100), k=5)
        assert not caplog.text
        fit("knn", draw(100), k=50)
        assert "knn: k = 50 is large for" in caplog.text
        train = draw(CLASSES)._replace(labels=torch.arange(CLASSES))
        assert compute(fit("vmf", train), sets[1]).isfinite().all()
        assert compute(fit("knn", train, k=1), sets[1]).isfinite().all()
        with pytest.raises(ValueError, match="no class has two different training embeddings"):
            fit("mahalanobis", train)

    def test_bad_input_is_refused(self, sets):
        for name in FITTED:
            with pytest.raises(NotFittedError, match=rf"{name} is not fitted\. Call `fit` or `fit_embeddings` first"):
                compute(OODDetector(name), sets[1])
        for name, missing in zip(FITTED, ("embeddings", "labels", "logits", "labels"), strict=True):
            with pytest.raises(ValueError, match=f"the score {name} needs {missing}, which the data do not have"):
                fit(name, sets[0]._replace(**{missing: None}))
        with pytest.raises(ValueError, match="the score energy needs logits"):
            OODDetector("energy").score_embeddings(sets[1].embeddings)
        for name in FITTED:
            with pytest.raises(ValueError, match=f"the embeddings have 1 columns, but {DIM} when the score was fitted"):
                compute(fit(name, sets[0]), sets[1]._replace(embeddings=sets[1].embeddings[:, :1]))
        names = np.array(["cat"] * len(sets[0].labels))
        with pytest.raises(TypeError, match="labels must be integers; the first is 'cat'"):
            fit("mahalanobis", sets[0]._replace(labels=names))
        for missing, name in itertools.product([-1, -100], ["mahalanobis", "vmf"]):  # it would be a class
            with pytest.raises(ValueError, match=r"labels must be at least 0; 1 .* have none"):
                fit(name, sets[0]._replace(labels=sets[0].labels.clone().index_fill(0, torch.tensor([7]), missing)))
        message = f"dim must be an integer from 1 to {DIM - 1}; got {DIM}"
        with pytest.raises(ValueError, match=message):
            fit("vim", sets[0], dim=DIM)
        with pytest.raises(ValueError, match="the numbers of rows must be equal; got 800 embeddings, 5 logits"):
            OODDetector("energy").score_embeddings(sets[0][0], sets[0][1][:5])
        with pytest.raises(ValueError, match=r"score must be one of max_softmax, .*, vmf; got 'odin'"):
            OODDetector("odin")
        with pytest.raises(ValueError, match="score 'energy' has no option k; its options are: none"):
            OODDetector("energy", k=3)
        for (name, option), value in itertools.product([("knn", "k"), ("vim", "dim")], [0, "5", 2.5, True]):
            with pytest.raises(ValueError, match=f"{option} must be an integer of at least 1; got {value!r}"):
                OODDetector(name, **{option: value})


class TestComparison:
    def test_all_scores_are_compared_and_the_best_is_named(self, sets, draw):
        comparison = compare_scores(*sets[:2], {"near": sets[2], "far": draw(200, 0.0)})
        assert set(comparison.results) == set(SCORES)
        assert not comparison.skipped
        train, inside, outside = sets
        detector = fit("knn", train)
        expected = detection_scores(compute(detector, inside), compute(detector, outside))
        assert comparison.results["knn"]["near"] == expected
        means = {name: comparison.mean(name) for name in SCORES}
        assert comparison.best == max(means, key=means.__getitem__)
        lines = str(comparison).splitlines()
        assert lines[1].startswith(comparison.best)
        assert lines[-1] == f"Use {comparison.best}: the highest mean AUROC."
        assert set(compare_scores(None, sets[1], {"near": sets[2]}).results) == {*SCORES} - {*FITTED}

    def test_scores_that_cannot_be_computed_are_skipped_with_the_reason(self, sets):
        bare = [data._replace(labels=None, concentrations=None) for data in sets]
        comparison = compare_scores(*bare[:2], {"near": bare[2]}, {name: OODDetector(name) for name in SCORES})
        assert set(comparison.skipped) == {"concentration", "mahalanobis", "vmf"}
        text = "the score vmf needs labels, which the data do not have. A score such as energy needs none."
        assert f"skipped: {text}" in str(comparison)
        detectors = {f"knn {k}": OODDetector("knn", k=k) for k in (1, 20)}
        results = compare_scores(*sets[:2], {"near": sets[2]}, detectors).results
        assert results.keys() == detectors.keys()
        assert results["knn 1"] != results["knn 20"]

    def test_nothing_to_compare_or_values_that_are_not_finite_are_an_error(self, sets):
        with pytest.raises(ValueError, match="no score could be computed: the score knn is not fitted"):
            compare_scores(None, sets[1], {"near": sets[2]}, {"knn": OODDetector("knn")})
        damaged = sets[2]._replace(logits=torch.full_like(sets[2].logits, np.inf))
        with pytest.raises(ValueError, match="logits must be finite"):
            compare_scores(*sets[:2], {"near": damaged})


def sphere_vision(head: str) -> SphereVisionForImageClassification:
    options = {"backbone": "linear_embedding", "num_channels": 1, "image_size": 8, "embedding_dim": 6}
    return SphereVisionForImageClassification(SphereVisionConfig(**options, head=head, num_labels=3))


class TestRowsOfTheFit:
    @pytest.mark.parametrize("name", SCORES)
    def test_no_score_that_needs_a_fit_is_computed_for_them(self, name, sets):
        detector = fit(name, sets[0])
        if name not in FITTED:
            assert torch.equal(compute(detector, sets[0]), compute(OODDetector(name), sets[0]))
            return
        with pytest.raises(ValueError, match=f"800 of the 800 inputs are among the 800 .* {name} was fitted to, by th"):
            compute(detector, sets[0])
        some = [torch.cat([values[:100], new]) for values, new in zip(sets[0][:4], sets[1][:4], strict=True)]
        with pytest.raises(ValueError, match="100 of the 500 inputs are among"):
            compute(detector, Outputs(*some))

    def test_numbers_distinguish_inputs_and_a_comparison_is_refused_by_values_or_numbers(self, sets):
        embeddings, rows = sets[0].embeddings, torch.arange(800)
        detector = OODDetector("knn").fit_embeddings(embeddings, ids=rows)
        assert len(detector.score_embeddings(embeddings, ids=rows + 800)) == 800
        with pytest.raises(ValueError, match=r"10 of the 400 inputs are among the 800 inputs that .* fitted to\. "):
            detector.score_embeddings(sets[1].embeddings, ids=rows[:400] + 790)
        train, inside, outside = sets
        for held_out, other, named in ((train, outside, "held-out inputs"), (inside, train, "inputs near")):
            with pytest.raises(ValueError, match=f"800 of the 800 {named} are among"):
                compare_scores(train, held_out, {"near": other})
        train, inside = (data._replace(ids=torch.arange(len(data.labels))) for data in sets[:2])
        with pytest.raises(ValueError, match="400 of the 400 held-out inputs are among"):
            compare_scores(train, inside, {"near": outside})
        with pytest.raises(ValueError, match="held-out inputs are among"):
            compare_scores(None, sets[0], {"near": outside}, {"knn": fit("knn", sets[0])})


class TestModels:
    @pytest.mark.parametrize(
        "name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto", "resnetv2_18"]
    )
    def test_timm(self, name):
        size = {"img_size": 32} if name.startswith("vit") else {}
        model = timm.create_model(name, num_classes=5, **size)
        images = torch.randn(6, 3, 32, 32)
        outputs = model_outputs(model, DataLoader(TensorDataset(images, torch.arange(6)), batch_size=4))
        model.eval()
        with torch.no_grad():
            assert torch.allclose(outputs.logits, model(images), atol=1e-5)
            features = model.forward_head(model.forward_features(images), pre_logits=True)
        assert torch.allclose(outputs.embeddings, features, atol=1e-5)
        assert torch.equal(outputs.labels, torch.arange(6))

    def test_transformers(self):
        model = ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=8)).train()
        batches = [{"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 1])} for _ in range(2)]
        outputs = model_outputs(model, batches)
        assert model.training
        assert torch.allclose(model.classifier(outputs.embeddings), outputs.logits, atol=1e-6)
        assert outputs.labels.tolist() == [0, 1, 1] * 2
        model = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=30, num_labels=3))
        outputs = model_outputs(model, [{"input_ids": torch.randint(30, (4, 5))}])
        assert torch.allclose(model.classifier(outputs.embeddings), outputs.logits, atol=1e-6)
        assert outputs.labels is None

    @pytest.mark.parametrize("head", HEADS)
    def test_heads_of_this_library_have_embeddings_before_normalization(self, head):
        model = sphere_vision(head).eval()
        images = torch.randn(5, 1, 8, 8)
        outputs = model_outputs(model, [(images[:3],), images[3:]])
        with torch.no_grad():
            assert torch.allclose(outputs.embeddings, model.base_model(images).embeddings, atol=1e-6)
            assert torch.allclose(outputs.logits, model(images).logits, atol=1e-4)
        assert (outputs.concentrations is not None) == (head in ("adaface", "vmf"))

    def test_a_model_is_scored_but_not_on_the_images_of_the_fit(self):
        model, (images, others) = timm.create_model("test_resnet", num_classes=3), torch.randn(2, 20, 3, 32, 32)
        detector = OODDetector("knn", k=1).fit(model, [(images, torch.arange(20) % 3)])
        expected = OODDetector("knn", k=1).fit_embeddings(model_outputs(model, images).embeddings)
        scores = expected.score_embeddings(model_outputs(model, others).embeddings)
        assert torch.equal(detector.score(model, [others]), scores)
        for batch in (20, 7):
            with pytest.raises(ValueError, match=r"(1[0-9]|20) of the 20 inputs are among the 20 .* knn was fitted"):
                detector.score(model, images.split(batch))

    def test_labels_missing_from_a_batch_are_missing_and_a_tensor_is_one_batch_and_no_batch_an_error(self):
        model, images = sphere_vision("softmax"), torch.randn(2, 1, 8, 8)
        assert model_outputs(model, [(images, torch.arange(2)), images]).labels is None
        assert torch.equal(model_outputs(model, images).logits, model_outputs(model, [images]).logits)
        half = model_outputs(model.to(torch.bfloat16), images.bfloat16())
        assert half.embeddings.dtype == half.logits.dtype == torch.float32
        with pytest.raises(ValueError, match="batches is empty; an iterator can be used only once"):
            OODDetector().fit(model, [])

    def test_models_whose_logits_no_layer_returns_have_scores_of_the_logits_only(self, caplog):
        model, images = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Sigmoid()).eval(), [torch.randn(2, 1, 8, 8)]
        scores = OODDetector("energy").fit(model, images).score(model, images)
        assert torch.equal(scores, model(images[0]).double().logsumexp(1))
        assert "No linear layer of Sequential returns its logits, so its embeddings are unknown" in caplog.text
        with pytest.raises(ValueError, match=r"knn needs embeddings, which the data do not have"):
            OODDetector("knn").fit(model, images)
        assert not any(layer._forward_hooks for layer in model.modules())

    def test_the_mean_of_two_classifiers_has_logits_without_embeddings(self):
        images = torch.randn(2, 3, 32, 32)
        of_timm = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, num_classes=3).eval()
        other = DeiTForImageClassificationWithTeacher(DeiTConfig(**SIZES, image_size=32, num_labels=3)).eval()
        for model, expected in ((of_timm, of_timm(images)), (other, other(images).logits)):
            outputs = model_outputs(model, [images])
            assert torch.allclose(outputs.logits, expected, atol=1e-6)
            assert outputs.embeddings is None


class Takes(nn.Module):
    """A classifier of images (B, 1, 8, 8) whose forward is another function of them."""

    def __init__(self, forward):
        super().__init__()
        self.fc = nn.Linear(64, 3)
        self.forward = lambda *args, **kwargs: None
        self.forward = MethodType(forward, self)

    def logits(self, images):
        return self.fc(images.flatten(1))


class TestBatchesOfLoaders:
    @pytest.mark.parametrize(
        "forward",
        [
            lambda self, x: self.logits(x),
            lambda self, image: {"logits": self.logits(image)},
            lambda self, *, image, scale=1.0: self.logits(image) * scale,
            lambda self, x, index=None: self.logits(x),
            lambda self, **inputs: self.logits(inputs["image"]),
            lambda self, image, label=None, **others: self.logits(image) / (not others),
            lambda self, image: SimpleNamespace(logits=self.logits(image)),
        ],
        ids=["another name", "mapping", "keyword", "optional", "any keywords", "others", "fields"],
    )
    @pytest.mark.parametrize("label", ["label", "labels"])
    def test_other_keys_are_ignored(self, forward, label):
        model, images = Takes(forward), torch.randn(4, 1, 8, 8)
        batch = {"file": [*"abcd"], "image": images, "index": torch.arange(4), label: torch.tensor([2, 0, 1, 1])}
        outputs = model_outputs(model, [batch | {"row": [1, 2, 3, 4]}])
        assert torch.allclose(outputs.logits, model.logits(images))
        assert outputs.labels.tolist() == [2, 0, 1, 1]

    def test_of_wrapped_models_too(self):
        images = torch.randn(2, 3, 32, 32)
        for wrap in (DataParallel, lambda model: get_peft_model(model, LoraConfig(target_modules=["fc1"]))):
            model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=1)
            outputs = model_outputs(wrap(model), [{"pixel_values": images, "index": torch.arange(2)}])
            assert torch.allclose(outputs.logits, model.eval()(images), atol=1e-6)

    def test_batches_and_models_that_do_not_fit_are_an_error(self):
        model = Takes(lambda self, x: self.logits(x))
        for batch in ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, {"index": torch.zeros(2)}, [["a.png"]], None):
            with pytest.raises(ValueError, match=r"batches (must have tensors|has .*; name the inputs so)"):
                model_outputs(model, [batch])
        classifier = SphereVisionForImageClassification(TINY)
        with pytest.raises(AttributeError):
            model_outputs(classifier.base_model, torch.zeros(3, 1, 8, 8))

    def test_names_of_classes_are_labels_if_the_model_has_them(self):
        model, images = SphereVisionForImageClassification(TINY), torch.zeros(3, 1, 8, 8)
        for batches in ([{"pixel_values": images, "label": [*"aba"]}], [(images, (*"aba",))]):
            assert model_outputs(model, batches).labels.tolist() == [0, 1, 0]
        assert model_outputs(model, {"pixel_values": images, "label": [*"cdd"]}).labels is None


TINY = SphereVisionConfig(
    backbone="linear_embedding", num_channels=1, image_size=8, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1}
)


class TestImageFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        generator = np.random.default_rng(0)
        for row, name in enumerate(["known/b/0.png", "known/a/1.jpg", "known/b/test.png", "unknown/z/3.png"]):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (9 + row, 12), np.uint8)).save(path)
        return tmp_path

    @pytest.fixture
    def saved(self, tmp_path):
        SphereVisionForImageClassification(TINY).save_pretrained(tmp_path / "model")
        SphereVisionImageProcessor(
            num_channels=1, size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.2]
        ).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_they_are_prepared_by_the_model(self, folder, saved):
        network = SphereVisionForImageClassification.from_pretrained(saved).eval()
        paths = [folder / "known/a/1.jpg", folder / "known/b/0.png", folder / "known/b/test.png"]
        pixels = SphereVisionImageProcessor.from_pretrained(saved)([Image.open(path) for path in paths])
        with torch.no_grad():
            expected = network(torch.stack(list(pixels["pixel_values"]))).logits
        for model, kind in ((network, str), (saved, Path), (str(saved), str)):
            listed, named = model_outputs(model, [*map(kind, paths)]), model_outputs(model, kind(folder / "known"))
            assert torch.allclose(listed.logits, expected, atol=1e-5)
            assert torch.allclose(named.logits, expected, atol=1e-5)
            assert (named.labels.tolist(), listed.labels) == ([0, 1, 1], None)
        half = model_outputs(network.to(torch.bfloat16), folder / "known")
        assert torch.allclose(half.logits, expected, atol=0.05)

    def test_unknown_images_have_no_labels_and_beside_known_ones_are_an_error(self, folder, saved):
        assert model_outputs(saved, folder / "unknown").labels is None
        (folder / "unknown/z").rename(folder / "known/z")
        with pytest.raises(ValueError, match="the model has a class 'a', but none 'z'; rename it"):
            model_outputs(saved, folder / "known")


@pytest.mark.parametrize("score", FITTED)
def test_equal_inputs_have_equal_scores_in_any_order(score):
    points = torch.randn(40, 37)
    rows, weight, train = torch.arange(1003) % 40, torch.randn(37, 7), torch.randn(600, 37)
    detector = OODDetector(score, **({"k": 3} if score == "knn" else {}))
    detector.fit_embeddings(train, train @ weight, torch.arange(600) % 7)
    inside = detector.score_embeddings(points[rows], (points @ weight)[rows])
    assert len(inside.unique()) == 40
    order = torch.randperm(1003)
    outside = detector.score_embeddings(points[rows][order], (points @ weight)[rows][order])
    assert detection_scores(inside, outside)["auroc"] == 0.5
