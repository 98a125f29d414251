"""Programs that train alone and exchange outer gradients over an object store."""

from gradcomp_jax.islands.codec import Codec as Codec
from gradcomp_jax.islands.codec import codec as codec
