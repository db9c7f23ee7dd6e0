"""Fit the spherized layers of an encoder to the plain encoder it was initialized from, by ridge regression."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_sphere.models.sphere_encoder.modeling_sphere_encoder import SphericalMap
from hf_sphere.utils.checks import check_not_text
from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.modules import eval_mode, widest_dtype

RIDGES = tuple(10.0**exponent for exponent in range(-9, 1))  # candidates, relative to each coordinate's mean square
HELD_OUT = 5  # every fifth text is held out, to choose the ridge and to evaluate the fit
MAX_LENGTH, BATCH_SIZE = 128, 16  # tokens per text, further limited by the tokenizer, and texts per batch
Batch = tuple[dict[str, Tensor], Tensor]  # inputs of the model, and a mask (B, L) of the tokens that count


@dataclass(frozen=True)
class SpherizationFit:
    """How well one spherized layer reproduces the plain one.

    Attributes:
        layer: Index of the encoder layer.
        explained_variance: Fraction of the variance of the plain layer's output on held-out texts; 1 is perfect, and 0
            no better than the mean. The output is normalized in encoders whose layers end with a norm, as in BERT.
        ridge: The ridge, relative to the mean square of each coordinate.
        num_tokens: Number of tokens the layer was fitted to, including held-out ones.
    """

    layer: int
    explained_variance: float
    ridge: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {100 * self.explained_variance:.2f} % of the variance explained on held-out text "
            f"({self.num_tokens} tokens, ridge {self.ridge:g})"
        )


@torch.no_grad()
def fit_spherization(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    texts: Iterable[str] | Iterable[Mapping[str, Tensor]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int = 8192,
) -> list[SpherizationFit]:
    r"""Initialize a spherized encoder close to the plain one it was loaded from, instead of randomly.

    A spherized layer takes its first linear map from the plain checkpoint; only the map after the spherization, from
    intermediate_size + 1 to hidden_size without bias, is new. It is set to the least-squares solution for the output of
    the plain layer, by ridge regression on the layer's actual inputs, with normal equations accumulated in float64
    and the best ridge on held-out texts. Layers are fitted in order, and each one compensates for the errors of those
    before it.

    Save the fitted model before training an adapter on it: the checkpoint of an adapter contains only the adapter.

    Args:
        model: A model with spherized layers loaded from `reference`, with any head or none; its output layers are
            overwritten in place. Runs in eval mode; the mode is restored afterwards.
        reference: The plain model.
        texts: Texts, of which the first 128 tokens are used, or batches of model inputs (`input_ids`,
            `attention_mask`, ...); for an image encoder, batches of `pixel_values`, in which an image stands for a
            text and a patch for a token. Reading stops at `max_tokens`.
        tokenizer: Tokenizer of the texts; from the reference's checkpoint if None.
        max_tokens: Number of tokens to read, rounded up to full batches. A fifth of the texts is held out.

    Returns:
        One `SpherizationFit` per spherized layer, in order.

    Raises:
        ValueError: If the model has no spherized layer, the reference does not match it, or there are too few texts
            (fewer than five, or fewer tokens than the inputs of the map, intermediate_size + 1).

    Example:
        >>> model = SphereBertForMaskedLM.from_pretrained("bert-base-cased")  # doctest: +SKIP
        >>> reference = BertForMaskedLM.from_pretrained("bert-base-cased")  # doctest: +SKIP
        >>> print(*fit_spherization(model, reference, wikitext["text"]), sep="\n")  # doctest: +SKIP
    """
    check_not_text("texts", texts)
    spherized = getattr(model.config, "spherized_layer_indices", ())
    if not spherized:
        raise ValueError(f"{type(model).__name__} has no spherized layer to fit; set spherized_layers.")
    # `hidden_dim` is DistilBERT's name of the intermediate size.
    for name in ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "hidden_dim", "vocab_size"):
        own, other = (getattr(each.config, name, None) for each in (model, reference))
        if str(own).removeprefix("sphere_") != str(other).removeprefix("sphere_"):
            raise ValueError(f"the reference does not match: its {name} is {other}; the model has {own}.")
    if common := set(spherized).intersection(getattr(reference.config, "spherized_layer_indices", ())):
        raise ValueError(f"layer {min(common)} of the reference is spherized; pass the plain model it was loaded from.")
    path = model.base_model.layers_path
    layers, plain_layers = (encoder.base_model.get_submodule(path) for encoder in (model, reference))
    batches = _collect(texts, reference, tokenizer, max_tokens)
    least = _spherical_map(layers[spherized[0]]).linear.in_features
    num_tokens = sum(int(mask.sum()) for _, mask in batches)
    num_texts = sum(int(mask.any(dim=1).sum()) for _, mask in batches)
    if num_tokens < least or num_texts < HELD_OUT:
        got = f"{num_tokens} tokens in {num_texts} texts, with max_tokens={max_tokens}"
        raise ValueError(f"fitting needs at least {least} tokens in {HELD_OUT} texts; got {got}.")
    fits, subsets = [], _split(batches)
    with eval_mode(model, reference):
        for index in spherized:
            halves = model, reference, layers[index], plain_layers[index]
            train, held_out = (_normal_equations(*halves, subset) for subset in subsets)
            _, gram, cross, squares = held_out
            errors = []
            for each in RIDGES:
                if (weight := _solve(train, each)) is not None:
                    squared_error = squares - 2 * (weight.T * cross).sum() + ((weight @ gram) * weight).sum()
                    errors.append((float(squared_error), each))
            _, best = min(errors)
            linear: Any = _spherical_map(layers[index]).linear
            linear.weight.copy_(_solve(train, best))
            explained = _explained_variance(*halves, subsets[1])
            train = tuple(map(operator.add, train, held_out))
            linear.weight.copy_(_solve(train, best))
            fits.append(SpherizationFit(index, explained, best, train[0]))
    return fits


def _solve(sums: tuple[Any, ...], ridge: float) -> Any:
    """Return the map (H, n + 1) of normal equations, or None where they are singular to working precision."""
    count, gram, cross, _ = sums
    factor, failed = torch.linalg.cholesky_ex(gram + torch.diag(ridge * count * (gram.diagonal() / count)))
    return None if failed else torch.cholesky_solve(cross, factor).T


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into texts to fit to and every fifth text, which is held out."""
    subsets: tuple[list[Batch], list[Batch]] = ([], [])
    count = 0
    for inputs, mask in batches:
        has_tokens = mask.any(dim=1).cpu()  # rows of padding are not texts
        is_held_out = (count + has_tokens.cumsum(0)) % HELD_OUT == 0
        for subset, rows in zip(subsets, (has_tokens & ~is_held_out, has_tokens & is_held_out), strict=True):
            if rows.any():
                subset.append(({name: value[rows] for name, value in inputs.items()}, mask[rows]))
        count += int(has_tokens.sum())
    return subsets


def _spherical_map(layer: nn.Module) -> SphericalMap:
    return next(module for module in layer.modules() if isinstance(module, SphericalMap))


def _normal_equations(model: Any, reference: Any, layer: Any, plain: Any, batches: Sequence[Batch]) -> tuple[Any, ...]:
    """Return sums over tokens in float64: their number, the products of inputs with them and targets, and squares."""
    # A layer returns r + f(r), from the residual r and the feed-forward f, up to norms. With r' and f' of the spherized
    # layer, whose r' differs if layers before it are spherized, the target of f' is f(r) + r - r'.
    encoder, spherical = model.base_model, _spherical_map(layer)
    modules = [spherical, plain.get_submodule(encoder.plain_map_path)]
    modules += [each.get_submodule(encoder.feed_forward_path) for each in (layer, plain)]
    total: tuple[Any, ...] = (0, 0.0, 0.0, 0.0)
    for inputs, mask in batches:
        calls = _record([model, reference], modules, inputs)
        # A chunked feed-forward calls its modules several times.
        values, _, residual, plain_residual = (torch.cat([args[0] for args, _ in each], dim=1) for each in calls)
        outputs = torch.cat([output for _, output in calls[1]], dim=1)
        target = outputs + plain_residual - residual.to(plain_residual)
        tokens = mask.bool()
        pairs = [_to_float64(each[tokens.to(each.device)]) for each in (spherical.spherization(values), target)]
        points, targets = pairs[0], pairs[1].to(pairs[0].device)
        sums = (len(points), points.T @ points, points.T @ targets, targets.square().sum().item())
        total = tuple(map(operator.add, total, sums))
    return total


def _explained_variance(model: Any, reference: Any, layer: Any, plain: Any, batches: Sequence[Batch]) -> float:
    """Return the fraction of the variance of a plain layer's output, after its norm, that the spherized explains."""
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for inputs, mask in batches:
        for kept, [(_, output)] in zip(outputs, _record([model, reference], [layer, plain], inputs), strict=True):
            kept.append(_to_float64(output[mask.bool().to(output.device)]).cpu())
    fitted, target = map(torch.cat, outputs)
    return 1 - float((fitted - target).square().sum() / (target - target.mean(0)).square().sum())


def _run(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    encoder = model.base_model
    return encoder(**{name: value.to(encoder.device) for name, value in inputs.items()}).last_hidden_state


def _record(models: list[Any], modules: list[nn.Module], inputs: Mapping[str, Tensor]) -> list[list[Any]]:
    """Run the models, and return inputs and output of every call of each module."""
    calls: list[list[Any]] = [[] for _ in modules]
    with ExitStack() as stack:
        for module, own in zip(modules, calls, strict=True):
            stack.enter_context(module.register_forward_hook(lambda _, *call, own=own: own.append(call)))
        for model in models:
            _run(model, inputs)
    return calls


def _to_float64(tensor: Tensor) -> Tensor:
    return (tensor if widest_dtype(tensor) == torch.float64 else tensor.cpu()).double()


def _collect(texts: Iterable[Any], reference: Any, tokenizer: Any, max_tokens: int) -> list[Batch]:
    """Collect batches of model inputs with a mask until they have `max_tokens` tokens; blank texts are skipped."""
    items = iter(texts)
    first = next(items, "")
    batches: Iterator[Any] = itertools.chain([first], items)
    if isinstance(first, str):
        tokenizer = tokenizer or load_pretrained(AutoTokenizer, reference.config.name_or_path)
        filled = (text for text in batches if text.strip())
        options = {"truncation": True, "max_length": min(MAX_LENGTH, tokenizer.model_max_length), "padding": True}
        lists = iter(lambda: list(itertools.islice(filled, BATCH_SIZE)), [])
        batches = (dict(tokenizer(rows, return_tensors="pt", **options)) for rows in lists)
    name, collected, count = reference.main_input_name, [], 0
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if name == "input_ids":
            mask = inputs.setdefault("attention_mask", torch.ones_like(inputs[name]))
        else:
            mask = torch.ones(len(inputs[name]), _run(reference, {name: inputs[name][:1]}).shape[1])
        collected.append((inputs, mask))
        count += int(mask.sum())
        if count >= max_tokens:
            break
    return collected
