"""Parts of an optax chain."""

from gradcomp_jax.transforms.bucketed import bucketed as bucketed
from gradcomp_jax.transforms.bucketed import forward_order as forward_order
from gradcomp_jax.transforms.exchange import ExchangeState as ExchangeState
from gradcomp_jax.transforms.exchange import exchange as exchange
from gradcomp_jax.transforms.frozen_adam import frozen_adam as frozen_adam
from gradcomp_jax.transforms.hierarchical import hierarchical as hierarchical
from gradcomp_jax.transforms.local import local_clip as local_clip
from gradcomp_jax.transforms.local import set_to_zero as set_to_zero
from gradcomp_jax.transforms.masks import Mask as Mask
from gradcomp_jax.transforms.matrix_view import Matrix as Matrix
from gradcomp_jax.transforms.model_parallel import model_parallel as model_parallel
from gradcomp_jax.transforms.moving_density import density_controller as density_controller
from gradcomp_jax.transforms.moving_density import density_schedule as density_schedule
from gradcomp_jax.transforms.policies import Policy as Policy
from gradcomp_jax.transforms.policies import by_column as by_column
from gradcomp_jax.transforms.policies import by_matrix as by_matrix
from gradcomp_jax.transforms.policies import by_path as by_path
from gradcomp_jax.transforms.policies import by_size as by_size
from gradcomp_jax.transforms.policies import by_tensor as by_tensor
from gradcomp_jax.transforms.rate_weighted import RateWeightedState as RateWeightedState
from gradcomp_jax.transforms.rate_weighted import rate_weighted as rate_weighted
from gradcomp_jax.transforms.sums import plus_trace as plus_trace
from gradcomp_jax.transforms.sums import running_sum as running_sum
from gradcomp_jax.transforms.warm_up import Stages as Stages
from gradcomp_jax.transforms.warm_up import staged as staged
from gradcomp_jax.transforms.warm_up import warm_up as warm_up
