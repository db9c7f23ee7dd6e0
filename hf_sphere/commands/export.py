"""Export a saved image or text model, or a SentenceTransformer, to an ONNX file with its settings in the metadata.

hf-sphere export --model_name_or_path outputs/birds --output outputs/birds.onnx

The batch size is variable. The metadata contains `preprocessing`, the options of the image processor as JSON, and
`class_names`, a JSON list; and `rejection`, the level and score of the rejection if the model has one. For a
SentenceTransformer it contains `embedding`, its settings as JSON, and `tokenizer`.
`examples/onnx_without_torch.py` classifies images with the file, without torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hf_sphere.training.output_dir import check_output_file
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments


@dataclass
class ExportArguments(Arguments):
    """Model and file."""

    model_name_or_path: str = argument(help="Saved model: folder or Hub id.")
    output: str = argument(help="ONNX file.")
    int8: bool = argument(False, "Convert the weights of a text model to int8.")
    overwrite_output: bool = argument(False, "Replace the file.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and export."""
    (args,) = parse_arguments((ExportArguments,), argv, __doc__)
    check_output_file(args.output, overwrite=args.overwrite_output)
    import transformers

    from hf_sphere.export import export_onnx, image_preprocessing, load_saved
    from hf_sphere.utils.loading import find_file, load_pretrained, load_sentence_transformer
    from hf_sphere.utils.problem_types import SINGLE_LABEL, problem_type

    is_sentence_transformer = find_file(args.model_name_or_path, "modules.json") is not None
    model = (load_sentence_transformer if is_sentence_transformer else load_saved)(args.model_name_or_path)
    metadata = {"model": type(model).__name__}
    if getattr(model, "main_input_name", None) == "pixel_values":
        try:
            processor = load_pretrained(transformers.AutoImageProcessor, args.model_name_or_path).to_dict()
        except OSError:
            processor = {}
        metadata |= image_preprocessing(processor)
        if "preprocessing" not in metadata:
            print(f"Note: the preprocessing of {args.model_name_or_path} is unknown, so the file lacks it.")
    if hasattr(model, "head"):
        metadata["class_names"] = json.dumps([model.config.id2label[index] for index in range(model.config.num_labels)])
        metadata |= {name: str(value) for name, value in model.head.metric().items()}
    export_onnx(model, args.output, metadata, int8=args.int8)
    names = [*metadata, *["problem_type"] * (hasattr(model, "head") and problem_type(model) != SINGLE_LABEL)]
    names += [*["rejection"] * (getattr(model, "rejection", None) is not None)]
    names += ["embedding"] * is_sentence_transformer
    print(f"wrote     {args.output}, with the metadata {', '.join(names)}")
