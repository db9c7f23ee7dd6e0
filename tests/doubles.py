"""Doubles with the signature of what they replace: they take new options, and refuse calls that it would refuse."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from huggingface_hub import HfApi


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Path.touch, (self.path,)


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> MagicMock:
    """Replace a function or method by one that calls it and records the calls."""
    double = create_autospec(getattr(owner, name), side_effect=getattr(owner, name))
    monkeypatch.setattr(owner, name, double)
    return double


def hub(uploads: dict[str, dict[str, Any]]) -> MagicMock:
    """Return a double of `HfApi` whose commits are added to `uploads`, the files of each repository by their paths."""
    double = create_autospec(HfApi)
    double.return_value.create_repo.side_effect = lambda name, **_: SimpleNamespace(repo_id=f"me/{name}")

    def commit(repo_id: str, operations: list[Any], **_: Any) -> None:
        uploads.setdefault(repo_id, {}).update({each.path_in_repo: each.path_or_fileobj for each in operations})

    double.return_value.create_commit.side_effect = commit
    return double


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread, and give its address."""
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def file_server(folder: Path) -> ThreadingHTTPServer:
    """Return a server of the files in a folder."""
    return ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder))


class GivenEmbeddings(torch.nn.Module):
    """Returns the given embeddings `x` like a model of sentence-transformers."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the embeddings."""
        return {"sentence_embedding": features["x"]}

    def get_embedding_dimension(self) -> int:
        """Return the length of the embeddings, for `MatryoshkaLoss`."""
        return 384


def model_that_knows_all(kind: str = "masked") -> SimpleNamespace:
    """A language model of a kind, whose tokenizer knows every word, and which cannot be run."""
    tokenizer = MagicMock(side_effect=lambda words, **_: {"input_ids": [[1]] * len(words)}, unk_token_id=0)
    return SimpleNamespace(kind=kind, tokenizer=tokenizer)
