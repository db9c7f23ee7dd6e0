"""Find the pictures that a collection has already: a search in plain numpy, by a threshold of `EmbeddingSpace`.

python examples/match_with_numpy.py [--false_accept 0.05]

The vectors are the pixels of the bundled digits, in place of embeddings of a model. `EmbeddingSpace` computes the
threshold once, from pictures that the collection does not have. The search itself needs numpy alone, and accepts the
same pictures as `EmbeddingSpace.search`.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

from hf_sphere.search import EmbeddingSpace


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--false_accept", type=float, default=0.05, help="accepted share of pictures without a match")
    args = parser.parse_args()
    collection, calibration, new, copies = load_pictures()
    space = EmbeddingSpace.fit(collection, calibration=calibration, score="cosine")
    try:
        threshold = space.threshold(args.false_accept)
    except ValueError as error:
        parser.error(str(error))
    print(f"{space}\n{100 * args.false_accept:g} % false accepts: a match is a cosine from {threshold:.4f} on\n")
    for name, queries in (("new pictures", new), ("noisy copies", copies)):
        cosines = queries @ collection.T
        rows, accepted = cosines.argmax(axis=1), cosines.max(axis=1) >= threshold
        report(name, rows[accepted], np.flatnonzero(accepted), space.search(queries, 1, false_accept=args.false_accept))


def load_pictures() -> list[np.ndarray]:
    """Return unit vectors (N, 64) of a collection, of pictures to calibrate, of new ones, and of copies with noise."""
    rng = np.random.default_rng(0)
    collection, calibration, new = np.split(rng.permutation(load_digits().data), [1000, 1400])
    copies = collection[: len(new)] + rng.normal(scale=1.2, size=new.shape)  # gray levels are from 0 to 16
    sets = (collection, calibration, new, copies)
    return [(pixels / np.linalg.norm(pixels, axis=1, keepdims=True)).astype(np.float32) for pixels in sets]


def report(name: str, rows: np.ndarray, queries: np.ndarray, found) -> None:
    """Print how many queries have a match, how many rows are the originals, and whether `found` accepts the same."""
    accepted = found.accepted[:, 0].numpy()
    same = np.array_equal(queries, np.flatnonzero(accepted)) and np.array_equal(rows, found.rows[accepted, 0].numpy())
    print(f"{name}: {len(queries)} of {len(accepted)} have a match", end="")
    print(f", {(rows == queries).sum()} of them their original" if name == "noisy copies" else "", end="")
    print(f"; EmbeddingSpace.search accepts {'the same' if same else 'others'}")


if __name__ == "__main__":
    main()
