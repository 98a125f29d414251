"""The exchange: a gradient is compensated, encoded, taken across the axis and decoded, and what was not sent is kept."""

from gradcomp_jax.core.exchange import ExchangeState as ExchangeState
from gradcomp_jax.core.exchange import exchange as exchange
from gradcomp_jax.core.masks import Mask as Mask
from gradcomp_jax.core.matrix_view import Matrix as Matrix
from gradcomp_jax.core.policies import Policy as Policy
from gradcomp_jax.core.policies import by_column as by_column
from gradcomp_jax.core.policies import by_matrix as by_matrix
from gradcomp_jax.core.policies import by_path as by_path
from gradcomp_jax.core.policies import by_size as by_size
from gradcomp_jax.core.policies import by_tensor as by_tensor
