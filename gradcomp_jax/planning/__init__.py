"""Planning: links, what collectives take over them, and what models look like to an exchange."""

from gradcomp_jax.planning import costs as costs
from gradcomp_jax.planning.links import Cluster as Cluster
from gradcomp_jax.planning.links import Link as Link
from gradcomp_jax.planning.model_shapes import MODELS as MODELS
from gradcomp_jax.planning.model_shapes import alexnet as alexnet
from gradcomp_jax.planning.model_shapes import llama_8b as llama_8b
from gradcomp_jax.planning.model_shapes import lstm_ptb as lstm_ptb
from gradcomp_jax.planning.model_shapes import resnet50 as resnet50
from gradcomp_jax.planning.model_shapes import vgg16 as vgg16
