"""Planning: what models look like to an exchange."""

from gradcomp_jax.planning.model_shapes import MODELS as MODELS
from gradcomp_jax.planning.model_shapes import resnet50 as resnet50
