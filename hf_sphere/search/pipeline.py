"""The way from a source to embeddings: shared by processes, resumable after a kill, with progress."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from safetensors.torch import save_file
from torch import Tensor

from hf_sphere.utils.files import UNFINISHED, read_tensors
from hf_sphere.utils.progress import progress_bar

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]
"""Columns of a batch by name, each (B, ...), and the `row` of each; without rows there are no other columns."""


def finished_batches(output: str | os.PathLike) -> Path:
    """Return the folder, beside an output, that keeps finished batches; remove it when the output is written."""
    target = Path(output).resolve()
    return target.with_name(f".{target.name}.batches{UNFINISHED}")


def embed_batches(
    embed: Callable[[list[Sequence[int]]], Iterator[Batch]],
    rows: Sequence[int],
    *,
    batch_size: int,
    identity: Any = None,
    folder: Path | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
    unit: str = "image",
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the rows and the columns of batches in the order of the rows, the same on every process.

    `embed` yields a batch for each list of rows, with those that can be read, on the CPU; each process of the
    `accelerator` embeds every n-th batch. Finished ones are kept in the `folder`, see `finished_batches`, and only what
    is missing is embedded; the `identity` is that of the model, its settings and the source, and what another one left
    is not used. The `unit` is what a row is.
    """
    index, count = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    gather: Callable[[list[Any]], list[Any]] = gather_object if count > 1 else list
    kept = folder / Hasher.hash(identity) if folder is not None and index == 0 else None
    done = 0
    style: dict[str, Any] = {"desc": "Embedding", "unit": unit, "disable": not progress or index > 0, "leave": False}
    with progress_bar(total=len(rows), **style) as bar:
        while True:
            path = kept and kept / f"{done}.safetensors"
            batch = gather([read_tensors(path) if path and path.exists() else None])[0]
            if batch is None:
                break
            done = int(batch.pop("done"))
            bar.update(done - bar.n)
            if len(batch["row"]):
                yield batch.pop("row"), batch
        if done and index == 0:
            logger.warning("Continuing after %s of %s %ss, which an interrupted run embedded.", done, len(rows), unit)
        batches = [rows[at : at + batch_size] for at in range(done, len(rows), batch_size)]
        local = embed(batches[index::count])
        for at in range(0, len(batches), count):
            start, done = done, done + sum(map(len, batches[at : at + count]))
            parts = [part for part in gather([next(local, None)]) if part is not None]
            full = [part for part in parts if len(part["row"])] or parts[:1]
            batch = {name: torch.cat([part[name] for part in full]) for name in full[0]}
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                save_file(batch | {"done": torch.tensor(done)}, kept / "unfinished")
                (kept / "unfinished").replace(kept / f"{start}.safetensors")
            bar.update(done - start)
            if len(batch["row"]):
                yield batch.pop("row"), batch
