"""What the public names of the library compute on an accelerator, by name, and why some have no such computation.

A case is a function of the device that prepares tensors and modules there and returns the computation: a function
without arguments that returns tensors and numbers, gradients among them. A new public name needs a case here, an entry
in `TESTED` with the file that has its test, or one in `EXCLUDED` with the reason.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import TripletMarginLoss
from torch import Tensor, nn
from torch.distributions import kl_divergence

from hf_sphere import distributions, geometry, losses, metrics, models
from hf_sphere.cluster import SphericalKMeans, VonMisesFisherMixture
from hf_sphere.data import Augmentation
from hf_sphere.geometry import codes
from hf_sphere.metrics import class_angles
from hf_sphere.nn import (
    AngularConv2d,
    AngularLinear,
    PoleRegression,
    PrototypicalClassifier,
    SphericalConv2d,
    SphericalLinear,
    Spherization,
    Spherize,
    build_head,
    fit_calibration,
)
from hf_sphere.nn.heads import HEADS, mixins
from hf_sphere.ood import SCORES, OODDetector, fit_rejection, model_outputs
from hf_sphere.optim import build_optimizer, effective_step, find_scale_invariant_weights, renormalize, step_diagnostics
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.prototypes import measure_order
from hf_sphere.search import EmbeddingSpace, NeighborSearch, read_vectors, report_vectors

PACKAGE = Path(geometry.__file__).parents[1]
Case = Callable[[Any], Callable[[], Any]]


def public_names() -> set[str]:
    """All names that the packages export, without `hf_sphere.`."""
    names = {f"distributions.{name}" for name in distributions.__all__}
    for path in PACKAGE.rglob("__init__.pyi"):
        package = ".".join(path.parent.relative_to(PACKAGE).parts)
        names |= {f"{package}.{name}" for name in re.findall(r"\w+ as (\w+)", path.read_text()) if package}
    return names


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def points(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(numbers(*shape, seed=seed), dim=-1)


def with_gradients(function: Callable[..., Any], *inputs: Any, module: nn.Module | None = None) -> Any:
    """Outputs of a function, and the gradients of its inputs and of a module's parameters."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    sources = [value.requires_grad_() for value in copies if isinstance(value, Tensor) and value.is_floating_point()]
    outputs = function(*copies)
    weights = torch.arange(1.0, 1.0 + outputs.shape[-1], device=outputs.device) if outputs.ndim else 1.0
    sources += [parameter for parameter in (module.parameters() if module else ()) if parameter.requires_grad]
    gradients = torch.autograd.grad((outputs * weights).sum(), sources, allow_unused=True)
    return outputs.detach(), [gradient for gradient in gradients if gradient is not None]


def differentiable(function: Callable[..., Tensor], *inputs: Any) -> Case:
    return lambda device: partial(with_gradients, function, *(_to(value, device) for value in inputs))


def of(function: Callable[..., Any], *inputs: Any) -> Case:
    return lambda device: partial(function, *(_to(value, device) for value in inputs))


def module(build: Callable[[], nn.Module], *inputs: Tensor, call: Callable[..., Tensor] | None = None) -> Case:
    def prepare(device: Any) -> Callable[[], Any]:
        torch.manual_seed(1)
        built = build().to(device)
        run = partial(call, built) if call else built
        return partial(with_gradients, run, *(_to(value, device) for value in inputs), module=built)

    return prepare


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def network() -> nn.Sequential:
    """A network with scale-invariant weights, other weights and a matrix."""
    torch.manual_seed(0)
    features = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(32, 16), nn.Linear(16, 4))


def steps(name: str, device: Any) -> Callable[[], Any]:
    """A training step of a network; an optimizer by name."""
    net, images, labels = network().to(device), numbers(6, 3, 4, 4).to(device), (torch.arange(6) % 4).to(device)
    optimizer = build_optimizer(net, name, lr=0.01)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in net.parameters()]

    return step


def with_fixed_seed(compute: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(0)
    return compute(x)


def in_blocks(compute: nn.Module, *inputs: Tensor) -> Tensor:
    with mock.patch.object(mixins, "MANY_LOGITS", 0):
        return compute(*inputs)


def cached_step(device: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(device)
    loss, batch = losses.SupConLoss(learn_temperature=True).to(device), (EMBEDDINGS.to(device), LABELS.to(device))

    def step() -> Any:
        net.zero_grad()
        torch.manual_seed(0)
        value = losses.cached_step(net, loss, batch, chunk_size=16)
        return value, [parameter.grad.clone() for parameter in net.parameters()]

    return step


def train_head(name: str, device: Any) -> Callable[[], Any]:
    """A training step of a head and a prediction."""
    torch.manual_seed(0)
    head = build_head(name, 8, 5)
    head.initialize_from_data(numbers(40, 8, seed=1))
    head.to(device).train()
    embeddings, labels = numbers(12, 8).to(device), torch.tensor([*range(5), *range(5), -100, -100]).to(device)

    def step() -> Any:
        torch.manual_seed(0)
        outputs = with_gradients(lambda x: head.train()(x, labels).loss, embeddings, module=head)
        with torch.no_grad():
            return outputs, head.eval()(embeddings).logits

    return step


def use_distribution(kind: Any, device: Any) -> Callable[[], Any]:
    loc, x = points(4, 6).to(device), points(4, 6, seed=1).to(device)
    uniform = distributions.HypersphericalUniform(6, device=device)

    def use(loc: Tensor, concentration: Tensor) -> Tensor:
        torch.manual_seed(0)
        distribution = kind(loc, concentration, validate_args=False)
        samples = distribution.rsample((2,)).detach()  # other random numbers on each kind of device
        values = [distribution.log_prob(x), distribution.entropy(), kl_divergence(distribution, uniform)]
        values += [samples.norm(dim=-1), distribution.mean.sum(-1), distribution.variance.sum(-1)]
        return sum(value.sum(0) if value.ndim > 1 else value for value in values)

    return partial(with_gradients, use, loc, torch.tensor([0.0, 1.0, 20.0, 300.0]).to(device))


def train_model(kind: Any, config: Any, inputs: dict[str, Tensor], device: Any) -> Callable[[], Any]:
    """A training step of a model class."""
    torch.manual_seed(0)
    model = kind(config).to(device).eval()  # without dropout
    batch = {name: value.to(device) for name, value in inputs.items()}

    def step() -> Any:
        model.zero_grad()
        output = model(**batch)
        first = output[0]
        (first if "loss" in output else first.square().sum()).backward()
        return first.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    return step


def of_models() -> dict[str, Case]:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 40}
    image = {**sizes, "image_size": 8, "patch_size": 4, "num_channels": 1}
    more = {"DistilBert": {"hidden_dim": 24}, "ModernBert": {"pad_token_id": 0}, "ViT": image}
    tokens = torch.arange(12).reshape(2, 6) + 5
    labels = {"MaskedLM": tokens, "TokenClassification": tokens % 2}
    vision, cases = {**VISION, "embedding_dim": 4}, {}
    for name in [name for name in models.__all__ if name.endswith("Model") or "For" in name]:
        task, family = name.rpartition("For")[2], re.match(r"Sphere(\w+?)(Model|For)", name)[1]
        config = getattr(models, f"Sphere{family}Config")
        is_image = family in ("ViT", "Vision")
        inputs = {"pixel_values": numbers(2, 1, 8, 8)} if is_image else {"input_ids": tokens}
        if name.endswith("FewShotClassification"):
            inputs = {"pixel_values": numbers(2, 6, 1, 8, 8), "support_pixel_values": numbers(2, 3, 2, 1, 8, 8)}
        elif name.endswith(("Regression", "JointPrediction")):
            inputs["regression_labels"] = torch.tensor([0.2, 0.7])
        if "For" in name and task not in ("Regression", "FewShotClassification"):
            inputs["labels"] = labels.get(task, torch.tensor([0, 1]))
        options = vision if family == "Vision" else {**text, **more.get(family, {})}
        options = options | ({"value_range": [0.0, 1.0]} if task in ("Regression", "JointPrediction") else {})
        cases[f"models.{name}"] = partial(train_model, getattr(models, name), config(**options), inputs)
    return cases


def outputs(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings near class means, logits, labels and concentrations."""
    labels = torch.arange(count) % 4
    embeddings = 2 * numbers(4, 12)[labels] + numbers(count, 12, seed=seed)
    return embeddings, embeddings[:, :4], labels, embeddings.norm(dim=1)


def detect(name: str, device: Any) -> Callable[[], Any]:
    fitted, held_out = ([value.to(device) for value in outputs(seed, 200)] for seed in (1, 2))

    def compute() -> Tensor:
        detector = OODDetector(name).fit_embeddings(*fitted[:3])
        return detector.score_embeddings(*held_out[:2], concentrations=held_out[3])

    return compute


def fit_reject(device: Any) -> Any:
    """A rejection that is fitted to a linear classifier, and decisions by it."""
    torch.manual_seed(0)
    net = nn.Linear(12, 4).to(device)
    embeddings, _, labels, _ = outputs(1, 200)
    rejection = fit_rejection(net, [(embeddings, labels)], 0.1, "mahalanobis", by_class=True).to(device)
    x = outputs(2, 50)[0].to(device)
    return rejection, lambda: tuple(rejection(x, net(x)))


def cluster(kind: Any, x: Tensor) -> Any:
    fitted = kind(4, random_state=0, max_iter=10).fit(x)
    labels = fitted.predict(x)
    assert labels.device == x.device
    return labels, fitted.cluster_centers_ if hasattr(fitted, "cluster_centers_") else fitted.means_


def search(references: Tensor, queries: Tensor) -> Any:
    return NeighborSearch(references, kind="torch").search(queries, 3)


def space(vectors: Tensor, queries: Tensor, groups: Tensor) -> Any:
    found = vars(EmbeddingSpace.fit(vectors, groups).search(queries, 3, false_accept=0.3))
    return {name: value for name, value in found.items() if not isinstance(value, str)}


def report_numbers(vectors: Tensor) -> Any:
    return {name: value for name, value in report_vectors(vectors).numbers.items() if not isinstance(value, list)}


def diagnose(device: Any) -> Callable[[], Any]:
    net, images = network().to(device), numbers(6, 3, 4, 4).to(device)
    optimizer = build_optimizer(net, "adam_srt", lr=0.01)
    net(images).square().sum().backward()
    optimizer.step()
    return lambda: step_diagnostics(optimizer)


def unit_rows(device: Any) -> Callable[[], Any]:
    net = network().to(device)
    return lambda: (renormalize(net, {"5.weight": 0}), [weight for weight in net.parameters() if weight.ndim > 1])


def augment(images: Tensor) -> Tensor:
    jittered = Augmentation(random_resized_crop=0.5, color_jitter=(0.2, 0.2, 0.2, 0.1), rotation=10.0)
    cropped = Augmentation(crop_padding=2, horizontal_flip=True, occlusion=2, occlusion_color=(9.0, 9.0, 9.0))
    return cropped(jittered(images, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(0))


VISION = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "image_size": 8, "num_channels": 1}
VISION |= {"num_labels": 3}
X, Y = points(6, 5), points(6, 5, seed=1)
EMBEDDINGS, LABELS = numbers(40, 6), torch.arange(40) % 4
CONFIDENCES, CORRECT = torch.rand(40, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3 != 0

CASES: dict[str, Case] = {
    "geometry.spherize": differentiable(geometry.spherize, numbers(6, 5)),
    "geometry.angles_to_cartesian": differentiable(geometry.angles_to_cartesian, numbers(6, 5)),
    "geometry.cartesian_to_angles": differentiable(geometry.cartesian_to_angles, numbers(6, 5)),
    "geometry.project_to_sphere": differentiable(geometry.project_to_sphere, numbers(6, 5)),
    "geometry.project_to_tangent": differentiable(geometry.project_to_tangent, X, numbers(6, 5)),
    "geometry.exp_map": differentiable(geometry.exp_map, X, geometry.project_to_tangent(X, Y)),
    "geometry.log_map": differentiable(geometry.log_map, X, Y),
    "geometry.geodesic_distance": differentiable(geometry.geodesic_distance, X, Y),
    "geometry.slerp": differentiable(geometry.slerp, X, Y, torch.linspace(0, 1, 6)),
    "geometry.parallel_transport": differentiable(
        geometry.parallel_transport, X, Y, geometry.project_to_tangent(X, numbers(6, 5))
    ),
    "geometry.frechet_mean": differentiable(geometry.frechet_mean, F.normalize(numbers(20, 4) + 2, dim=-1)),
    "geometry.random_rotation": lambda device: partial(geometry.random_rotation, 4, (2,), device=device),
    "geometry.separation": differentiable(geometry.separation, X),
    "geometry.log_vmf_normalizer": differentiable(geometry.log_vmf_normalizer, torch.linspace(0, 90, 7), 6),
    "geometry.mean_resultant_length": differentiable(geometry.mean_resultant_length, torch.linspace(0, 90, 7), 6),
    "geometry.concentration_from_mean_resultant_length": differentiable(
        geometry.concentration_from_mean_resultant_length, torch.linspace(0, 0.9, 7), 6
    ),
    "geometry.codes.separation": differentiable(codes.separation, X),
    "nn.Spherization": module(lambda: Spherization(5, learn_scaling=True, learn_radius=True), numbers(6, 5)),
    "nn.SphericalLinear": module(lambda: SphericalLinear(5, 3), numbers(6, 5)),
    "nn.SphericalConv2d": module(lambda: SphericalConv2d(3, 4, 3), numbers(2, 3, 6, 6)),
    "nn.AngularLinear": module(lambda: AngularLinear(5, 3, "sigmoid"), numbers(6, 5)),
    "nn.AngularConv2d": module(lambda: AngularConv2d(3, 4, 3, operator="linear"), numbers(2, 3, 6, 6)),
    "nn.PoleRegression": module(
        lambda: PoleRegression(5, (0.0, 1.0)), numbers(6, 5), torch.linspace(0, 1, 6), call=lambda m, *a: m(*a).loss
    ),
    "nn.PrototypicalClassifier": module(
        PrototypicalClassifier, numbers(8, 5), numbers(4, 2, 5), LABELS[:8], call=lambda m, *a: m(*a).loss
    ),
    "nn.Spherize": module(
        lambda: Spherize(5), numbers(6, 5), call=lambda m, x: m({"sentence_embedding": x})["sentence_embedding"]
    ),
    "nn.fit_calibration": of(fit_calibration, numbers(300, 4), torch.arange(300) % 4),
    "losses.InfoNCELoss": module(losses.InfoNCELoss, EMBEDDINGS, torch.arange(20).repeat(2)),
    "losses.SupConLoss": module(losses.SupConLoss, EMBEDDINGS, LABELS),
    "losses.SigLIPLoss": module(losses.SigLIPLoss, EMBEDDINGS, torch.arange(20).repeat(2)),
    "losses.CrossBatchSupConLoss": module(lambda: losses.CrossBatchSupConLoss(6, 60), EMBEDDINGS, LABELS),
    "losses.HeatKernelLoss": module(losses.HeatKernelLoss, EMBEDDINGS),
    "losses.KoLeoLoss": module(losses.KoLeoLoss, EMBEDDINGS),
    "losses.SlicedUniformityLoss": module(losses.SlicedUniformityLoss, EMBEDDINGS, call=with_fixed_seed),
    "losses.cached_step": cached_step,
    "distributions.VonMisesFisher": partial(use_distribution, distributions.VonMisesFisher),
    "distributions.PowerSpherical": partial(use_distribution, distributions.PowerSpherical),
    "distributions.HypersphericalUniform": lambda device: (
        lambda: distributions.HypersphericalUniform(5, device=device).rsample((9,))
    ),
    "distributions.unit_vector": of(distributions.unit_vector.check, X),
    "metrics.alignment": of(metrics.alignment, EMBEDDINGS, LABELS),
    "metrics.uniformity": of(metrics.uniformity, EMBEDDINGS),
    "metrics.class_angles": of(class_angles, EMBEDDINGS, LABELS),
    "metrics.class_overlap": of(partial(metrics.class_overlap, threshold=0.8), EMBEDDINGS, LABELS, CORRECT),
    "metrics.effective_dimension": of(metrics.effective_dimension, EMBEDDINGS),
    "metrics.reliability_bins": of(lambda *a: vars(metrics.reliability_bins(*a)), CONFIDENCES, CORRECT),
    "metrics.expected_calibration_error": of(metrics.expected_calibration_error, CONFIDENCES, CORRECT),
    "metrics.calibration_errors": of(metrics.calibration_errors, CONFIDENCES, CORRECT),
    "metrics.probability_scores": of(metrics.probability_scores, numbers(40, 4), LABELS),
    "metrics.detection_scores": of(metrics.detection_scores, CONFIDENCES, CONFIDENCES.flip(0) - 0.3),
    "metrics.retrieval_scores": of(metrics.retrieval_scores, EMBEDDINGS, LABELS),
    "metrics.sampled_retrieval_scores": of(
        partial(metrics.sampled_retrieval_scores, num_samples=2), EMBEDDINGS, 1 + 9 * CONFIDENCES, LABELS
    ),
    "metrics.score_queries": of(metrics.score_queries, EMBEDDINGS, LABELS),
    "metrics.accuracy_by_certainty": of(metrics.accuracy_by_certainty, CONFIDENCES, CORRECT),
    "metrics.area_under_risk_coverage": of(metrics.area_under_risk_coverage, CONFIDENCES, CORRECT),
    "metrics.risk_coverage": of(metrics.risk_coverage, CONFIDENCES, CORRECT),
    "prototypes.measure_order": of(lambda *a: vars(measure_order(*a)), X, numbers(6, 4)),
    "ood.model_outputs": lambda device: partial(
        model_outputs,
        models.SphereVisionForImageClassification(models.SphereVisionConfig(**VISION)).to(device),
        [{"pixel_values": numbers(4, 1, 8, 8), "labels": LABELS[:4]}],
    ),
    "ood.Rejection": lambda device: fit_reject(device)[1],
    "ood.fit_rejection": lambda device: lambda: [*fit_reject(device)[0].buffers()],
    "metrics.energy_test": of(metrics.energy_test, EMBEDDINGS[:15], EMBEDDINGS[15:]),
    "search.NeighborSearch": of(search, numbers(50, 6), numbers(5, 6, seed=1)),
    "search.EmbeddingSpace": of(space, EMBEDDINGS[:30], EMBEDDINGS[30:], torch.arange(30) // 2),
    "search.report_vectors": of(report_numbers, numbers(60, 4)),
    "search.read_vectors": of(partial(read_vectors, scale=0.1), numbers(5, 4).long()),
    "cluster.SphericalKMeans": of(cluster, SphericalKMeans, outputs(1, 120)[0]),
    "cluster.VonMisesFisherMixture": of(cluster, VonMisesFisherMixture, outputs(1, 120)[0]),
    "losses.MetricLearningLoss": module(lambda: losses.MetricLearningLoss(TripletMarginLoss()), EMBEDDINGS, LABELS),
    "data.Augmentation": of(augment, (128 + 40 * numbers(6, 3, 8, 8)).clamp(0, 255).to(torch.uint8)),
    "optim.step_diagnostics": diagnose,
    "optim.effective_step": of(
        lambda *a: vars(effective_step(*a)), numbers(4, 5), numbers(4, 5, seed=1), numbers(4, 5, seed=2).abs(), 0.1
    ),
    "optim.find_scale_invariant_weights": lambda device: partial(
        lambda net: dict(find_scale_invariant_weights(net, numbers(6, 3, 4, 4).to(device)).channel_dims),
        network().to(device),
    ),
    "optim.renormalize": unit_rows,
    **of_models(),
}
HEAD_CASES: dict[str, Case] = {f"nn.{kind.__name__}": partial(train_head, name) for name, kind in HEADS.items()}
OPTIMIZER_CASES: dict[str, Case] = {
    f"optim.{optimizer_class(name).__name__}": partial(steps, name) for name in optimizer_names()
}
SCORE_CASES: dict[str, Case] = {f"ood.SCORES.{name}": partial(detect, name) for name in SCORES}
OPERATOR_CASES: dict[str, Case] = {
    f"geometry.OPERATORS.{name}": differentiable(partial(geometry.angular_response, operator=name), X)
    for name in geometry.OPERATORS
}
LOSS_CASES: dict[str, Case] = {
    f"losses.{name}": module(partial(getattr(losses, name), 6, 4), EMBEDDINGS, LABELS)
    for name in losses.__all__
    if name.endswith("Loss") and isinstance(getattr(losses, name), type)
    if issubclass(getattr(losses, name), losses.HeadLoss) and name != "HeadLoss"
}
IGNORED = LABELS.index_fill(0, torch.tensor([3]), -100)
LOSS_CASES |= {
    f"{name}, in blocks": module(partial(getattr(losses, name[7:]), 6, 4), EMBEDDINGS, IGNORED, call=in_blocks)
    for name in LOSS_CASES
}
CASES |= HEAD_CASES | OPTIMIZER_CASES | SCORE_CASES | OPERATOR_CASES | LOSS_CASES


def flatten(value: Any) -> Sequence[Any]:
    """Tensors on the CPU and other values of nested results."""
    return [
        leaf.detach().cpu().double() if isinstance(leaf, Tensor) else leaf
        for leaf in torch.utils._pytree.tree_leaves(value)
    ]


TESTED = {
    "test_values.py": """
        data.ImagesInMemory nn.build_head optim.scale_invariant_groups
    """,
    "test_text.py": """
        data.Masking data.TextBatches data.Vocabulary models.fit_spherization models.SpherizationFit
        analogies.LanguageModel analogies.Question analogies.score_questions analogies.Scores
    """,
    "test_analysis.py": """
        hyperplanes.projection_statistics hyperplanes.reinitialization_robustness
    """,
    "test_training.py": """
        training.TrainingLoop training.start_run training.Run training.RunState training.evaluate
        training.evaluate_few_shot training.evaluate_retrieval training.initialize_from_data
        training.SphereTrainer training.create_optimizer data.FewShotBatches
    """,
    "cases.py": """
        geometry.angular_response ood.OODDetector ood.Outputs optim.build_optimizer nn.Head nn.HeadOutput
        losses.HeadLoss optim.SphereOptimizer optim.EffectiveStep optim.ScaleInvariantWeights
    """,
}
"""Names whose computation is tested by a file of this folder, as part of another case or in a test of its own."""

EXCLUDED = {
    "files, texts and numbers without a device": """
        comparison. evaluation. visualization. training.Task training.find_task training.task_names
        training.prepare_output_dir data.ImageData data.ImageShape data.ImageSplit data.TextData
        data.few_shot_data data.load_ data.COMPUTED_VALUES data.Episodes data.EpisodeSampler
        search.read_embeddings search.embeddings_writer search.Embeddings search.ImageIndex search.ImageSource
        search.LanceSpace search.VectorReport search.neutral_texts analogies.
    """,
    "options, errors and registries": """
        data.ImageDataOptions data.ImageSourceOptions data.OpenSetOptions data.TextDataOptions
        data.ValueOptions data.CorruptImageError training.CheckpointError training.RecipeArguments
        training.Training nn.HEADS nn.SPHERIZATION_SETTINGS geometry.OPERATORS ood.SCORES prototypes.METHODS
        models.SphereBertConfig models.SphereDistilBertConfig models.SphereElectraConfig
        models.SphereModernBertConfig models.SphereRobertaConfig models.SphereViTConfig
        models.SphereVisionConfig models.SphereVisionImageProcessor
    """,
    "computed in numpy or float64 on the CPU": """
        geometry.codes. geometry.separation_bound hyperplanes. metrics.ReliabilityBins prototypes.Placement
        prototypes.place_prototypes prototypes.OrderPreservation optim.as_metrics search.CompressedSpace
    """,
    "calls of other covered names": """
        data.ImageBatches data.ImagesFromDisk data.ImageStream losses.LossCheckpointCallback
        losses.SentenceTransformerLoss losses.trainer_loss ood.OODComparison ood.compare_scores
        optim.parameter_groups optim.find_channel_dims
        optim.StepDiagnosticsCallback optim.RenormalizeCallback prototypes.embed_class_names search.ImageEncoder
        search.extract_embeddings search.load_embedding_model search.load_encoder search.TextEncoder
        search.Duplicates search.Matches
        training.SphereCallback
    """,
    "needs several processes": """
        training.gather_classes
    """,
}
"""Names, or beginnings of names that end with a dot or continue, without a case, by reason."""
