"""One paper a file, as a recipe of the parts."""

from gradcomp_jax.methods.dense import dense as dense
from gradcomp_jax.methods.dgc import dgc as dgc
from gradcomp_jax.methods.terngrad import terngrad as terngrad
