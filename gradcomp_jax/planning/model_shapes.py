"""Parameter shapes of well-known models: all that an exchange needs to know of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Shapes = dict[str, jax.ShapeDtypeStruct]


def resnet50(classes: int = 1000) -> Shapes:
    """ResNet-50: 161 float32 leaves, 25,557,032 parameters with 1000 classes.

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
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


MODELS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50}
