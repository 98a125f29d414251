"""Methods: one paper a file, as a recipe of the parts."""

from gradcomp_jax.methods.adamw import adamw as adamw
from gradcomp_jax.methods.adamw import sparse_adamw as sparse_adamw
from gradcomp_jax.methods.every_method import *  # noqa: F403
from gradcomp_jax.methods.registry import METHODS as METHODS
from gradcomp_jax.methods.registry import Method as Method
from gradcomp_jax.methods.sufficient_factors import factored_dot as factored_dot
