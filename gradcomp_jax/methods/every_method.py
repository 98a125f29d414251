"""Imports every method, one line each, in the order of the table."""

# isort: off
from gradcomp_jax.methods.dense import dense as dense
from gradcomp_jax.methods.terngrad import terngrad as terngrad
from gradcomp_jax.methods.dgc import dgc as dgc
from gradcomp_jax.methods.gradient_dropping import gradient_dropping as gradient_dropping
from gradcomp_jax.methods.topk_sgd import topk_sgd as topk_sgd
from gradcomp_jax.methods.random_k import random_k as random_k
from gradcomp_jax.methods.one_bit_sgd import one_bit_sgd as one_bit_sgd
from gradcomp_jax.methods.qsgd import qsgd as qsgd
from gradcomp_jax.methods.stochastic_rounding import stochastic_rounding as stochastic_rounding
from gradcomp_jax.methods.fp8 import fp8 as fp8
from gradcomp_jax.methods.block_quantized import block_quantized as block_quantized
from gradcomp_jax.methods.sign_sgd import sign_sgd as sign_sgd
from gradcomp_jax.methods.ef_sign_sgd import ef_sign_sgd as ef_sign_sgd
from gradcomp_jax.methods.one_bit_adam import one_bit_adam as one_bit_adam
from gradcomp_jax.methods.powersgd import powersgd as powersgd
from gradcomp_jax.methods.dion import dion as dion
from gradcomp_jax.methods.eden import eden as eden
from gradcomp_jax.methods.ef21 import ef21 as ef21
from gradcomp_jax.methods.demo import demo as demo
from gradcomp_jax.methods.sparcml import sparcml as sparcml
