"""Crafted folders and configurations.

The tables `INVALID`, whose folders must be refused, and `ODD`, whose folders may also be read, have a function per
folder and name that changes a copy of the prepared folder.
"""

import itertools
import os

import pyarrow as pa
import torch
from file_changes import (
    DEEP,
    ELSEWHERE,
    ESCAPE,
    FORMULA,
    Change,
    append,
    by_stranger,
    cells,
    dataset,
    edit,
    enormous,
    entry,
    first,
    headers,
    image,
    instead,
    parquets,
    put,
    set_column,
    specials,
    table,
    tensor,
    zipped,
)
from PIL import Image

from hf_sphere.utils.files import MANIFEST_FILE

EMBEDDINGS, IMAGES, ABOUT = "embeddings.safetensors", "images.parquet", "index.json"
SECRET_NAMES = {"an absolute name": "<secret>", "a name outside": "../../secret/secret.png"}
VALUES = {"nan": torch.nan, "inf": torch.inf}
DOUBLE = torch.float64

_INDEX: dict[str, Change] = {
    **specials(EMBEDDINGS, IMAGES, ABOUT),
    **headers(EMBEDDINGS, "embeddings"),
    **parquets(IMAGES),
    **{f"embeddings with {name}": tensor(EMBEDDINGS, "embeddings", first(value)) for name, value in VALUES.items()},
    "embeddings with 1e300": tensor(EMBEDDINGS, "embeddings", first(1e300, DOUBLE)),
    "more embeddings": tensor(EMBEDDINGS, "embeddings", lambda old: torch.cat([old, old])),
    "fewer embeddings": tensor(EMBEDDINGS, "embeddings", lambda old: old[:-1]),
    "no embeddings": tensor(EMBEDDINGS, "embeddings", lambda old: old[:0]),
    "embeddings of no dimension": tensor(EMBEDDINGS, "embeddings", lambda old: old[:, :0]),
    "embeddings of three axes": tensor(EMBEDDINGS, "embeddings", lambda old: old[None]),
    "embeddings of one axis": tensor(EMBEDDINGS, "embeddings", lambda old: old[0]),
    "integer embeddings": tensor(EMBEDDINGS, "embeddings", lambda old: old.long()),
    "complex embeddings": tensor(EMBEDDINGS, "embeddings", lambda old: old.to(torch.complex64)),
    "another tensor": tensor(EMBEDDINGS, "embeddings", lambda old: {"other": old}),
    "fewer names": table(IMAGES, lambda old: old.slice(1)),
    "more names": table(IMAGES, lambda old: pa.concat_tables([old, old])),
    "no names": table(IMAGES, lambda old: old.drop_columns(["file"])),
    "no sources of rows": table(IMAGES, lambda old: old.drop_columns(["source"])),
    **{f"source {value}": cells(IMAGES, "source", value) for value in (-1, 99, None)},
    **{f"file {value!r}": cells(IMAGES, "file", value) for value in (None, "", "a\0b")},
    **{name: cells(IMAGES, "file", value) for name, value in SECRET_NAMES.items()},
    "confidences of texts": set_column(IMAGES, "confidence", lambda row: "x"),
    **{
        f"curvature {value}": edit(ABOUT, distance="hyperbolic", curvature=value)
        for value in (0, -1, float("nan"), "x")
    },
    **{f"distance {value}": edit(ABOUT, distance=value) for value in ("x", None, [])},
    **{f"no {name}": edit(ABOUT, **{name: ...}) for name in ("model", "weights", "sources", "distance")},
    **{f"sources {value}": edit(ABOUT, sources=value) for value in (None, "x", [], [1], [["x"]], {"x": 1})},
    **{f"model {value}": edit(ABOUT, model=value, model_folder=...) for value in (None, 3, [])},
    **{f"model_folder {value}": edit(ABOUT, model_folder=value) for value in (3, [])},
    **{f"weights {value}": edit(ABOUT, weights=value) for value in (None, "x", [])},
    **{f"kind {value}": edit(ABOUT, kind=value) for value in ("x", 3, [])},
    **{f"search {value}": edit(ABOUT, search=value) for value in ("x", 3, [])},
    "deep JSON": append(ABOUT, f'"x": {DEEP}'),
    "a list": put(ABOUT, "[]"),
}
_MANIFEST: dict[str, Change] = {
    **specials(MANIFEST_FILE),
    "/dev/zero in the manifest": entry("/dev/zero"),
    "a huge /dev/zero in the manifest": entry("/dev/zero", size=1 << 50),
    "a file outside in the manifest": entry("../../secret/secret.png"),
    "an absolute file in the manifest": entry("<secret>"),
    "a text as size": entry(EMBEDDINGS, size="x"),
    "a list of files": put(MANIFEST_FILE, '{"files": [1]}'),
    "a deep manifest": put(MANIFEST_FILE, '{"files": ' + DEEP + "}"),
    "an empty manifest": put(MANIFEST_FILE, '{"files": {}}'),
}
CONFIG, WEIGHTS, PREPROCESSING = "config.json", "model.safetensors", "preprocessor_config.json"

INVALID: dict[str, dict[str, Change]] = {
    "index": {name: by_stranger(change) for name, change in _INDEX.items()} | _MANIFEST,
    "embeddings": {
        **specials("data/*.parquet"),
        **parquets("data/*.parquet"),
        **{f"embedding {value}": cells("data/*.parquet", "embedding", [value] * 32) for value in VALUES.values()},
        "embeddings of other lengths": set_column("data/*.parquet", "embedding", lambda row: [1.0] * (row % 2 + 1)),
        **{f"label {value}": cells("data/*.parquet", "label", value) for value in (-7, 99)},
        **{f"confidence {value}": cells("data/*.parquet", "confidence", value) for value in (-1.0, 7.0, torch.nan)},
        "a deep description": put("embeddings.json", '{"x": ' + DEEP + "}"),
    },
    "model": {
        **specials(CONFIG, WEIGHTS),
        **headers(WEIGHTS, "head.linear.bias"),
        **{f"weights of {name}": tensor(WEIGHTS, "head.linear.weight", first(value)) for name, value in VALUES.items()},
        **{
            f"backbone option {name}": edit(CONFIG, backbone_kwargs={name: value})
            for name, value in {
                "checkpoint_path": "<secret>",
                "pretrained": True,
                "pretrained_cfg": {"file": "<secret>"},
                "pretrained_cfg_overlay": {"file": "<secret>"},
                "cache_dir": "<secret>",
            }.items()
        },
        "a deep configuration": append(CONFIG, f'"x": {DEEP}'),
        "an enormous number of channels": edit(CONFIG, num_channels=1 << 40),
        "an enormous width": edit(CONFIG, backbone_kwargs={"width": 1 << 40}),
        "a configuration of nan": edit(CONFIG, backbone_kwargs={"width": float("nan")}),
        "an unknown head": edit(CONFIG, head="x"),
    },
    "prototypes": {
        **specials("prototypes.safetensors"),
        **headers("prototypes.safetensors", "prototypes"),
        **{
            f"prototypes of {value}": tensor("prototypes.safetensors", "prototypes", first(value, DOUBLE))
            for value in (torch.nan, torch.inf, 1e300)
        },
        "no prototypes": tensor("prototypes.safetensors", "prototypes", lambda old: old[:0]),
        "prototypes of one axis": tensor("prototypes.safetensors", "prototypes", lambda old: old[0]),
        "fewer prototypes": tensor("prototypes.safetensors", "prototypes", lambda old: old[:-1]),
        "another tensor": tensor("prototypes.safetensors", "prototypes", lambda old: {"other": old}),
    },
    "photos": {
        **{name: change for name, change in specials("a/0.png").items() if "folder" not in name},
        "an enormous image": enormous,
        "a truncated image": lambda folder: os.truncate(folder / "a" / "0.png", 60),
        "an empty image": put("a/0.png", ""),
        "/dev/zero in parquet": dataset({"path": "/dev/zero"}),
        "no image in parquet": dataset({}),
        "bytes that are no image in parquet": dataset({"bytes": b"x" * 100}),
        "metadata that names a file outside": put("metadata.csv", "file_name\n../../secret/secret.png\n"),
        "metadata that names /dev/zero": put("metadata.csv", "file_name\n/dev/zero\n"),
    },
}
ODD: dict[str, dict[str, Change]] = {
    "ivf": {  # no file of FAISS is read
        **{f"{name}, by a stranger": by_stranger(change) for name, change in specials("search.faiss").items()},
        "search.faiss without content": by_stranger(put("search.faiss", b"")),
    },
    "index": {
        **{
            f"{what} in {column}": by_stranger(cells(IMAGES, column, text))
            for column in ("file", "label", "prediction")
            for what, text in {"a newline": "a\nb", "a sequence": ESCAPE, "a formula": FORMULA}.items()
        },
        # The page can be opened, and each search on it is an error.
        "embeddings of other dimensions": by_stranger(tensor(EMBEDDINGS, "embeddings", lambda old: old[:, :-1])),
        "a long name": by_stranger(cells(IMAGES, "file", "x" * 5000)),
        "a key twice": by_stranger(append(ABOUT, '"model": "other"')),
        "model_folder is the root": by_stranger(edit(ABOUT, model_folder="../" * 30)),
        "a sequence as model": by_stranger(edit(ABOUT, model=ESCAPE, model_folder=...)),
        "names of numbers": by_stranger(set_column(IMAGES, "file", lambda row: row)),
        "no model_folder": by_stranger(edit(ABOUT, model_folder=None)),
        "recall is a text": by_stranger(edit(ABOUT, recall="x")),
        "the same row twice": by_stranger(
            table(IMAGES, lambda old: pa.concat_tables([old.slice(0, 1), old.slice(0, 1), old.slice(2)]))
        ),
        "double embeddings": by_stranger(tensor(EMBEDDINGS, "embeddings", lambda old: old.double())),
        "half embeddings": by_stranger(tensor(EMBEDDINGS, "embeddings", lambda old: old.half())),
        "zero embeddings": by_stranger(tensor(EMBEDDINGS, "embeddings", torch.zeros_like)),
        "a second tensor": by_stranger(
            tensor(EMBEDDINGS, "embeddings", lambda old: {"embeddings": old, "x": old.clone()})
        ),
        "missing photos": by_stranger(edit(ABOUT, sources=[["/nowhere", None]])),
        "a hub dataset": by_stranger(edit(ABOUT, sources=[["nobody/nothing", "train"]])),
    },
    "embeddings": {
        **specials("embeddings.json"),
        "embedding 1e30": cells("data/*.parquet", "embedding", [1e30] * 32),
        "zero embeddings": cells("data/*.parquet", "embedding", [0.0] * 32),
        "a sequence as model": edit("embeddings.json", model=ESCAPE, dataset="a\nb"),
        "a key twice": append("embeddings.json", '"model": "other"'),
        "fewer rows than described": table("data/*.parquet", lambda old: old.slice(3)),
        "an enormous number of images": edit("embeddings.json", num_images=1 << 70, embedding_dim=-1),
    },
    "model": {
        # Enough for what only reads the weights.
        "no type": edit(CONFIG, model_type=...),
        "names with sequences": edit(CONFIG, id2label={str(n): f"{n}{ESCAPE}\n" for n in range(10)}),
        "names that are formulas": edit(CONFIG, id2label={str(n): f"{FORMULA}{n}" for n in range(10)}),
        "the same name twice": edit(CONFIG, id2label={str(n): "x" for n in range(10)}),
        "a key twice": append(CONFIG, '"head": "vmf"'),
        "fewer classes": edit(CONFIG, id2label={"0": "x"}),
        "an enormous image size": edit(PREPROCESSING, size={"height": 1 << 30, "width": 1 << 30}),
        "an image size of 0": edit(PREPROCESSING, size={"height": 0, "width": 0}),
        "a standard deviation of 0": edit(PREPROCESSING, image_std=[0, 0, 0]),
        "a mean of nan": edit(PREPROCESSING, image_mean=[float("nan")] * 3),
        "a deep preprocessing": append(PREPROCESSING, f'"x": {DEEP}'),
        "preprocessing is a FIFO": instead(PREPROCESSING, "a FIFO"),
        "preprocessing is /dev/zero": instead(PREPROCESSING, "/dev/zero"),
        "the record is a FIFO": instead("training_data.json", "a FIFO"),
        "the record is deep": put("training_data.json", DEEP),
        "settings are a FIFO": instead("run.json", "a FIFO"),
        "enormous weights": tensor(WEIGHTS, "head.linear.weight", lambda old: old * 1e30),
        "weights of zero": tensor(WEIGHTS, "head.linear.weight", torch.zeros_like),
        "code": edit(CONFIG, auto_map={"AutoConfig": "code.Config"}),
        "code of an unknown type": edit(CONFIG, auto_map={"AutoConfig": "code.Config"}, model_type="unknown"),
    },
    "prototypes": {"unnormalized": tensor("prototypes.safetensors", "prototypes", lambda old: old * 3)},
    "photos": {
        # Only an index refuses them: `datasets` opens what the table of a dataset names.
        "a path outside in parquet": dataset({"path": "<secret>"}),
        "a relative path outside in parquet": dataset({"path": "../secret/secret.png"}),
        "a URL in parquet": dataset({"path": "file://<secret>"}),
        "a class with a newline": image("a\nb/5.png"),
        "a class with a sequence": image(f"a{ESCAPE}/5.png"),
        "a class that is a formula": image(f"{FORMULA.replace('/', '')}/5.png"),
        "an image with a newline": image("a/x\ny.png"),
        "an image with a sequence": image(f"a/x{ESCAPE}.png"),
        "an image that is a formula": image("=1+1.png"),
        "an option": image("a/--x.png"),
        "a long name": image("a/" + "x" * 240 + ".png"),
        "a name that is not text": lambda folder: os.link(folder / "a" / "0.png", os.fsencode(folder) + b"/\xff.png"),
        "a link to an image": lambda folder: (folder / "link.png").symlink_to(ELSEWHERE.resolve()),
        "a link to the parent": lambda folder: (folder / "a" / "up").symlink_to(".."),
        "a link to a folder": lambda folder: (folder / "other").symlink_to(ELSEWHERE.parent.resolve()),
        "a hidden folder": image(".hidden/5.png"),
        "a FIFO beside": lambda folder: os.mkfifo(folder / "pipe"),
        "a FIFO as table": lambda folder: os.mkfifo(folder / "train.csv"),
        "a FIFO as metadata": lambda folder: os.mkfifo(folder / "metadata.csv"),
        "/dev/zero as metadata": instead("metadata.jsonl", "/dev/zero"),
        "/dev/zero as table": instead("train.parquet", "/dev/zero"),
        "an animated image": lambda folder: Image.new("P", (8, 8)).save(
            folder / "x.gif", save_all=True, append_images=[Image.new("P", (8, 8), 1)]
        ),
        "images in a zip file that want to be outside": zipped,
        "an empty table": put("train.csv", ""),
    },
}
ALIASES = ["seed:", "  a: &a [x, x, x, x, x, x, x, x, x]"]
ALIASES += [f"  {new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise("abcdefghij")]
CONFIGURATIONS = {
    "a bomb of aliases": "\n".join(ALIASES),
    "a deep list": "seed: " + "[" * 3000 + "]" * 3000,
    "a key twice": "seed: 1\nseed: 2\n",
    "an alias": "seed: &a 1\nbatch_size: *a\n",
    "a merge": "a: &a {seed: 1}\n<<: *a\n",
    "code": "seed: !!python/object/apply:os.system [true]\n",
    "a long number": "seed: " + "9" * 5000 + "\n",
    "a sequence": f'seed: "{"a" + chr(92)}e]2;owned{chr(92)}a"\n',
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a set": "seed: !!set {1, 2}\n",
    "a date": "seed: 2020-01-01\n",
    "no text": "\0",
}
"""YAML files."""
