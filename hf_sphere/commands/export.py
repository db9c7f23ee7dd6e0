"""Export a saved image or text model to an ONNX file, with the preprocessing of its images in the file's metadata.

hf-sphere export --model_name_or_path outputs/birds --output outputs/birds.onnx

The batch size is variable. The metadata contains `preprocessing`, the options of the image processor as JSON, and
`class_names`, a JSON list; and `rejection`, the level and score of the rejection if the model has one.
`examples/onnx_without_torch.py` classifies images with the file, without torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hf_sphere.training.output_dir import check_output_file
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments

PREPROCESSING = {"num_channels", "size", "crop_size", "crop_pct", "resample"}
PREPROCESSING |= {"rescale_factor", "image_mean", "image_std"}
"""Options of an image processor that determine its pixels, besides those that begin with `do_`."""


@dataclass
class ExportArguments(Arguments):
    """Model and file."""

    model_name_or_path: str = argument(help="Saved model: folder or Hub id.")
    output: str = argument(help="ONNX file.")
    overwrite_output: bool = argument(False, "Replace the file.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and export."""
    (args,) = parse_arguments((ExportArguments,), argv, "Export a saved model to ONNX.")
    check_output_file(args.output, overwrite=args.overwrite_output)
    import transformers

    from hf_sphere.export import export_onnx
    from hf_sphere.models.saved import load_saved
    from hf_sphere.utils.loading import load_pretrained

    model = load_saved(args.model_name_or_path)
    metadata = {"model": type(model).__name__}
    if model.main_input_name == "pixel_values":
        try:
            processor = load_pretrained(transformers.AutoImageProcessor, args.model_name_or_path).to_dict()
        except OSError:
            processor = {}
        names = [name for name in processor if name in PREPROCESSING or name.startswith("do_")]
        used = {name: processor[name] for name in names if processor[name] is not None}
        if "size" in used:
            metadata["preprocessing"] = json.dumps(used, default=dict)
        else:
            print(f"Note: the preprocessing of {args.model_name_or_path} is unknown, so the file lacks it.")
    if hasattr(model, "head"):
        metadata["class_names"] = json.dumps([model.config.id2label[index] for index in range(model.config.num_labels)])
        metadata |= {name: str(value) for name, value in model.head.metric().items()}
    export_onnx(model, args.output, metadata)
    names = [*metadata, *["rejection"] * (getattr(model, "rejection", None) is not None)]
    print(f"wrote     {args.output}, with the metadata {', '.join(names)}")
