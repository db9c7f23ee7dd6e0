"""Changes of files as a full disk, an unfortunate user or a stranger may have made them.

`SECRET` is an image outside all folders, which no one may open. `ELSEWHERE` is another, to which links may point.
"""

import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sphere.utils.files import MANIFEST_FILE, write_manifest

Change = Callable[[Path], Any]
"""Changes a copy of a folder."""

SECRET, ELSEWHERE = Path("..", "secret", "secret.png"), Path("..", "elsewhere", "other.png")
"""Images, from the working directory."""

ESCAPE = "\x1b]2;owned\x07"
"""Sets the title of a terminal; never printed."""

FORMULA = "=cmd|'/c calc'!A0"
"""Executed by spreadsheets; never the beginning of a cell."""

DEEP = "[" * 100_000 + "]" * 100_000
HEADERS = {
    "an enormous header": struct.pack("<Q", 1 << 62) + b"{}",
    "an enormous shape": {"dtype": "F32", "shape": [1 << 40, 64], "data_offsets": [0, 1 << 48]},
    "an overflowing shape": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 0]},
    "a negative shape": {"dtype": "F32", "shape": [-1, 8], "data_offsets": [0, 0]},
    "a deep header": DEEP,
}
"""Headers of safetensors."""


def put(name: str, content: bytes | str) -> Change:
    """Return a function that writes a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def edit(name: str, **values: Any) -> Change:
    """Return a function that sets values of a JSON file; ... removes one."""

    def change(folder: Path) -> None:
        old = json.loads((folder / name).read_text())
        new = {key: place(value) for key, value in {**old, **values}.items() if value is not ...}
        (folder / name).write_text(json.dumps(new))

    return change


def append(name: str, text: str) -> Change:
    """Return a function that writes keys, as JSON, to the beginning of a mapping in a file."""
    return lambda folder: (folder / name).write_text("{" + text + ", " + (folder / name).read_text().lstrip()[1:])


def header(name: str, tensor: str, content: Any) -> Change:
    """Return a function that writes a safetensors file with this header."""
    if not isinstance(content, bytes):
        text = (content if isinstance(content, str) else json.dumps({tensor: content})).encode()
        content = struct.pack("<Q", len(text)) + text
    return put(name, content)


def tensor(name: str, key: str, make: Callable[[Tensor], Tensor | dict[str, Tensor]]) -> Change:
    """Return a function that changes a tensor of a safetensors file."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / name)
        made = make(tensors[key].clone())
        save_file(made if isinstance(made, dict) else {**tensors, key: made.contiguous()}, folder / name)

    return change


def table(pattern: str, make: Callable[[pa.Table], pa.Table]) -> Change:
    """Return a function that changes a parquet file."""

    def change(folder: Path) -> None:
        path = next(folder.glob(pattern))
        made = make(pq.read_table(path))
        pq.write_table(made, path)

    return change


def place(value: Any) -> Any:
    """Replace `<secret>` in a value by the absolute path of the secret image."""
    if isinstance(value, dict):
        return {key: place(part) for key, part in value.items()}
    return value.replace("<secret>", str(SECRET.resolve())) if isinstance(value, str) else value


def set_column(pattern: str, column: str, make: Callable[[int], Any]) -> Change:
    """Return a function that sets a column of a parquet file to a function of the row."""

    def changed(old: pa.Table) -> pa.Table:
        values = [make(row) for row in range(len(old))]
        return old.set_column(old.column_names.index(column), column, [values]).replace_schema_metadata(None)

    return table(pattern, changed)


def cells(pattern: str, column: str, value: Any, row: int = 0) -> Change:
    """Return a function that sets a cell of a parquet file."""

    def make(old: pa.Table) -> pa.Table:
        at = old.column_names.index(column)
        values = old[column].to_pylist()
        values[row] = place(value)
        kind = old.schema.field(column).type if isinstance(value, (int, float, list)) else None
        return old.set_column(at, column, pa.array(values, kind)).replace_schema_metadata(old.schema.metadata)

    return table(pattern, make)


def instead(name: str, kind: str) -> Change:
    """Return a function that replaces a file by something that is no regular file inside the folder."""

    def change(folder: Path) -> None:
        path = next(folder.glob(name), folder / name)
        path.unlink(missing_ok=True)
        if kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.symlink_to({"/dev/zero": "/dev/zero", "itself": path.name, "nothing": "nowhere"}[kind])

    return change


SPECIAL = ("a FIFO", "a folder", "/dev/zero", "itself", "nothing")


def specials(*names: str) -> dict[str, Change]:
    """Return the changes of files to FIFOs, folders and links."""
    return {f"{name} is {kind}": instead(name, kind) for name in names for kind in SPECIAL}


def headers(name: str, key: str) -> dict[str, Change]:
    """Return the changes of a safetensors file to one with an odd header."""
    return {f"{name} has {what}": header(name, key, content) for what, content in HEADERS.items()}


def parquets(pattern: str) -> dict[str, Change]:
    """Return the changes of a parquet file to one of enormous declared sizes, and to other formats."""

    def footer(folder: Path, change: Callable[[bytearray], bytes]) -> None:
        path = next(folder.glob(pattern))
        path.write_bytes(change(bytearray(path.read_bytes())))

    changes: dict[str, Callable[[bytearray], bytes]] = {
        "an enormous footer": lambda data: data[:-8] + struct.pack("<I", 0xFFFFFFFF) + b"PAR1",
        "a footer without content": lambda data: data[:-8] + struct.pack("<I", 0) + b"PAR1",
        "numbers of rows that overflow": lambda data: data[:-60] + b"\xfe" * 40 + data[-20:],
        "another content": lambda data: b"PAR1" + b"{}" + b"PAR1",
    }
    return {f"{pattern} has {what}": partial(footer, change=change) for what, change in changes.items()}


def first(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    """Return a function that sets the first number of a tensor."""

    def make(old: Tensor) -> Tensor:
        new = old.to(dtype)
        new.view(-1)[0] = value
        return new

    return make


def as_image(path: Path, **options: Any) -> None:
    """Write a small image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((8, 8), 30).save(path, "PNG", **options)


def image(name: str) -> Change:
    """Return a function that adds an image."""
    return lambda folder: as_image(folder / name)


def enormous(folder: Path) -> None:
    """Let an image declare 100,000 x 100,000 pixels."""
    path = folder / "a" / "0.png"
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", 100_000, 100_000)
    path.write_bytes(data)


def dataset(*rows: dict[str, Any]) -> Change:
    """Return a function that makes the folder a dataset of images in a parquet file."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        info = {"info": {"features": {"image": {"_type": "Image"}}}}
        made = pa.table({"image": pa.array(map(place, rows), kind)}).replace_schema_metadata(
            {"huggingface": json.dumps(info)}
        )
        pq.write_table(made, folder / "train-00000-of-00001.parquet")

    return change


def zipped(folder: Path) -> None:
    """Make the folder one with a zip file, whose images want to be outside."""
    as_image(ELSEWHERE)
    with zipfile.ZipFile(folder / "photos.zip", "w") as file:
        for name in ("../../evil.png", "/tmp/../evil.png", "a/0.png"):
            file.write(ELSEWHERE, name)
    shutil.rmtree(folder / "a")
    shutil.rmtree(folder / "b")


def by_stranger(change: Change) -> Change:
    """Return a function that changes an index and describes the changed files in its manifest."""

    def made(folder: Path) -> None:
        change(folder)
        files = [path for path in folder.rglob("*") if path != folder / MANIFEST_FILE]
        if all(path.is_file() and path.stat().st_size < 1e9 and not path.is_char_device() for path in files):
            write_manifest(folder)

    return made


def entry(name: str, **values: Any) -> Change:
    """Return a function that adds a file to the manifest."""

    def change(folder: Path) -> None:
        path = folder / MANIFEST_FILE
        manifest = json.loads(path.read_text())
        manifest["files"][place(name)] = {"size": 0, "crc32": "00000000"} | values
        path.write_text(json.dumps(manifest))

    return change


def damage(path: Path, draw: random.Random) -> None:
    """Truncate or remove a file, replace its content, or change some of its bytes or JSON values."""
    data = bytearray(path.read_bytes())
    change = draw.choice(["truncate", "remove", "replace", "bytes", "value"])
    if change == "remove":
        path.unlink()
        return
    if change == "truncate":
        data = data[: draw.randrange(len(data))]
    elif change == "replace":
        data = bytearray(draw.choice([b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000, b'{"a": NaN}']))
    elif change == "value" and path.suffix == ".json":
        lines = data.decode().splitlines()
        place = draw.randrange(len(lines))
        name, colon, _ = lines[place].partition(":")
        lines[place] = f"{name}{colon} {draw.choice(['null', '-1', '[]', '{}', '1e400', 'true', chr(34) * 2])}"
        lines[place] += "," if place < len(lines) - 2 else ""
        data = bytearray("\n".join(lines).encode())
    else:
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
    path.write_bytes(data)
