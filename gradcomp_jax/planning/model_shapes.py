"""Parameter shapes of well-known models: all that an exchange needs to know of them."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

Shapes = dict[str, jax.ShapeDtypeStruct]


def resnet50(classes: int = 1000) -> Shapes:
    """Returns ResNet-50: 161 float32 leaves, 25,557,032 parameters with 1000 classes.

    Convolutions without bias, a scale and a shift for each batch normalisation, one dense layer.

    References:
        He et al., 2016, https://arxiv.org/abs/1512.03385, table 1.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"] = (size, size, inputs, outputs)
        shapes[f"{name}/scale"] = shapes[f"{name}/shift"] = (outputs,)

    convolution("stem", 7, 3, 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            convolution(f"{name}/reduce", 1, inputs, width)
            convolution(f"{name}/spatial", 3, width, width)
            convolution(f"{name}/expand", 1, width, 4 * width)
            if block == 0:
                convolution(f"{name}/shortcut", 1, inputs, 4 * width)
            inputs = 4 * width
    shapes["classifier/kernel"], shapes["classifier/bias"] = (inputs, classes), (classes,)
    return _float32(shapes)


def alexnet(classes: int = 1000) -> Shapes:
    """Returns AlexNet with its two groups of convolutions: 16 leaves, 60,965,224 parameters, 232.56 MiB.

    References:
        Krizhevsky, Sutskever and Hinton, 2012, figure 2.
    """
    layers = {
        "conv1": (11, 11, 3, 96),
        "conv2": (5, 5, 48, 256),
        "conv3": (3, 3, 256, 384),
        "conv4": (3, 3, 192, 384),
        "conv5": (3, 3, 192, 256),
        "fc6": (9216, 4096),
        "fc7": (4096, 4096),
        "fc8": (4096, classes),
    }
    return _with_biases(layers)


def vgg16(classes: int = 1000) -> Shapes:
    """Returns VGG-16: 32 leaves, 138,357,544 parameters with 1000 classes.

    References:
        Simonyan and Zisserman, 2015, https://arxiv.org/abs/1409.1556, table 1, column D.
    """
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    layers: dict[str, tuple[int, ...]] = {
        f"conv{i}": (3, 3, inputs, outputs) for i, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1)
    }
    layers |= {"fc1": (512 * 7 * 7, 4096), "fc2": (4096, 4096), "fc3": (4096, classes)}
    return _with_biases(layers)


def lstm_ptb(vocabulary: int = 10_000, width: int = 1500, layers: int = 2) -> Shapes:
    """Returns the large LSTM language model on the Penn Treebank: 10 leaves, 51,034,000 parameters, 194.68 MiB.

    The embedding is also the output matrix; each layer has two biases, of the input and of the state.

    References:
        Press and Wolf, 2017, https://arxiv.org/abs/1608.05859; as in Lin et al., 2018, https://arxiv.org/abs/1712.01887,
        table 4.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width), "output/bias": (vocabulary,)}
    for i in range(layers):
        for source in ("input", "state"):
            shapes[f"lstm{i}/{source}/kernel"] = (width, 4 * width)
            shapes[f"lstm{i}/{source}/bias"] = (4 * width,)
    return _float32(shapes)


def llama_8b() -> Shapes:
    """Returns Llama 3 with 8 billion parameters: 291 leaves, 8,030,261,248 parameters, as float32.

    References:
        Grattafiori et al., 2024, https://arxiv.org/abs/2407.21783, table 3.
    """
    width, hidden, keys, vocabulary = 4096, 14_336, 1024, 128_256
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width), "output": (width, vocabulary)}
    for i in range(32):
        shapes |= {
            f"layer{i}/attention/query": (width, width),
            f"layer{i}/attention/key": (width, keys),
            f"layer{i}/attention/value": (width, keys),
            f"layer{i}/attention/output": (width, width),
            f"layer{i}/mlp/gate": (width, hidden),
            f"layer{i}/mlp/up": (width, hidden),
            f"layer{i}/mlp/down": (hidden, width),
            f"layer{i}/attention/norm": (width,),
            f"layer{i}/mlp/norm": (width,),
        }
    return _float32(shapes | {"norm": (width,)})


def _with_biases(layers: dict[str, tuple[int, ...]]) -> Shapes:
    return _float32(
        {f"{name}/kernel": s for name, s in layers.items()} | {f"{n}/bias": s[-1:] for n, s in layers.items()}
    )


def _float32(shapes: dict[str, tuple[int, ...]]) -> Shapes:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


MODELS: dict[str, Callable[[], Shapes]] = {
    "alexnet": alexnet,
    "llama-8b": llama_8b,
    "lstm-ptb": lstm_ptb,
    "resnet50": resnet50,
    "vgg16": vgg16,
}
"""Functions by the name of the model in a plan."""
