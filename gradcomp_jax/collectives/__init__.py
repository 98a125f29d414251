"""How payloads cross an axis."""

from gradcomp_jax.collectives.crossing import Arrived as Arrived
from gradcomp_jax.collectives.crossing import Delivery as Delivery
from gradcomp_jax.collectives.crossing import Parcel as Parcel
from gradcomp_jax.collectives.crossing import anew as anew
from gradcomp_jax.collectives.crossing import cross as cross
from gradcomp_jax.collectives.fused import permute as permute
from gradcomp_jax.collectives.fused import pmax as pmax
from gradcomp_jax.collectives.fused import psum as psum
from gradcomp_jax.collectives.order import are_there as are_there
from gradcomp_jax.collectives.order import wait as wait
from gradcomp_jax.collectives.routes import Remainder as Remainder
from gradcomp_jax.collectives.routes import Route as Route
from gradcomp_jax.collectives.routes import add as add
from gradcomp_jax.collectives.routes import as_route as as_route
from gradcomp_jax.collectives.routes import auto as auto
from gradcomp_jax.collectives.routes import doubling as doubling
from gradcomp_jax.collectives.routes import gather as gather
from gradcomp_jax.collectives.routes import reduce_scatter as reduce_scatter
from gradcomp_jax.collectives.routes import two_phase as two_phase
