"""Planning: is it worth compressing, with what, and what will a step take?"""

from gradcomp_jax.planning import costs as costs
from gradcomp_jax.planning import traffic as traffic
from gradcomp_jax.planning.calibrate import Calibration as Calibration
from gradcomp_jax.planning.calibrate import calibrate as calibrate
from gradcomp_jax.planning.fitting import Fit as Fit
from gradcomp_jax.planning.fitting import fit as fit
from gradcomp_jax.planning.links import Cluster as Cluster
from gradcomp_jax.planning.links import Link as Link
from gradcomp_jax.planning.model_shapes import MODELS as MODELS
from gradcomp_jax.planning.model_shapes import alexnet as alexnet
from gradcomp_jax.planning.model_shapes import llama_8b as llama_8b
from gradcomp_jax.planning.model_shapes import lstm_ptb as lstm_ptb
from gradcomp_jax.planning.model_shapes import resnet50 as resnet50
from gradcomp_jax.planning.model_shapes import vgg16 as vgg16
from gradcomp_jax.planning.predict import Prediction as Prediction
from gradcomp_jax.planning.predict import Verdict as Verdict
from gradcomp_jax.planning.predict import predict as predict
from gradcomp_jax.planning.predict import should_compress as should_compress
from gradcomp_jax.planning.predict import speed_up as speed_up
from gradcomp_jax.planning.prices import Price as Price
from gradcomp_jax.planning.rates import break_even as break_even
from gradcomp_jax.planning.workload import Device as Device
from gradcomp_jax.planning.workload import Workload as Workload
from gradcomp_jax.planning.workload import profile_compression as profile_compression
from gradcomp_jax.planning.workload import profile_step as profile_step
