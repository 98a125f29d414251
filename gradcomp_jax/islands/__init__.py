"""Programs that train alone and exchange outer gradients over an object store."""

from gradcomp_jax.islands.decisions import history as history
from gradcomp_jax.islands.host_codec import Codec as Codec
from gradcomp_jax.islands.host_codec import codec as codec
from gradcomp_jax.islands.joining import Follower as Follower
from gradcomp_jax.islands.joining import follow as follow
from gradcomp_jax.islands.joining import join as join
from gradcomp_jax.islands.log import IslandError as IslandError
from gradcomp_jax.islands.member import Member as Member
from gradcomp_jax.islands.objects import Decision as Decision
from gradcomp_jax.islands.objects import Entry as Entry
from gradcomp_jax.islands.store import MemoryStore as MemoryStore
from gradcomp_jax.islands.store import Store as Store
from gradcomp_jax.islands.store import StoreError as StoreError
from gradcomp_jax.islands.weights import Published as Published
from gradcomp_jax.islands.weights import WeightReader as WeightReader
from gradcomp_jax.islands.weights import WeightWriter as WeightWriter
from gradcomp_jax.islands.weights import publish_weights as publish_weights
from gradcomp_jax.islands.weights import read_weights as read_weights
