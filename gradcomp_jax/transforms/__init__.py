"""Parts of an optax chain."""

from gradcomp_jax.transforms.exchange import ExchangeState as ExchangeState
from gradcomp_jax.transforms.exchange import exchange as exchange
from gradcomp_jax.transforms.local_clip import local_clip as local_clip
from gradcomp_jax.transforms.plan import everything as everything
from gradcomp_jax.transforms.warm_up import Stages as Stages
from gradcomp_jax.transforms.warm_up import staged as staged
from gradcomp_jax.transforms.warm_up import warm_up as warm_up
