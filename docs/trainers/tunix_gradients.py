"""Compresses the gradients of Tunix's ``PeftTrainer``: ``python tunix_gradients.py METHOD``.

METHOD is ``tunix`` (its own train step), ``dense`` or ``int4``. Trains a small model on the mesh axis ``data``, and prints the
bytes that a device sends along it in a step, read from the compiled step, and the losses. For Tunix 0.1.7.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import gradcomp_jax as gc

AXIS = "data"
METHODS = {"dense": gc.dense(axis_name=AXIS), "int4": gc.block_quantized(axis_name=AXIS, bits=4)}


class CompressedTrainer(PeftTrainer):
    """Trains as ``PeftTrainer`` does, with an exchange between the gradients of the replicas and the optimizer."""

    def __init__(self, model, optimizer, training_config, *, exchange, mesh, **kwargs):
        self.mesh = mesh
        norm = optax.snapshot("grad_norm", optax.global_norm)  # of the mean, which Tunix logs
        super().__init__(model, optax.chain(self.placed(exchange), norm, optimizer), training_config, **kwargs)

    def placed(self, exchange):
        """Returns the exchange for gradients of the replicas; its state says where it lies, for Tunix to keep it there."""
        exchange = gc.unreduced(exchange, self.mesh, axis_name=AXIS)

        def placed(x):
            return nnx.Variable(x, out_sharding=x.sharding.spec, mesh=self.mesh)

        def init(params):
            return jax.tree.map(placed, exchange.init(nnx.as_pure(params)))

        return optax.GradientTransformationExtraArgs(init, exchange.update)

    def create_train_step_fn(self):
        def step(model, optimizer, inputs):
            graph, params, rest = nnx.split(model, optimizer.wrt, ...)

            def loss(params, inputs, rest):
                return self.loss_fn(nnx.merge(graph, params, rest), **inputs)

            # By vmap, because Tunix's models pin activations along other axes of the mesh.
            value_and_grad = gc.local_value_and_grad(
                loss, axis_name=AXIS, mesh=self.mesh, has_aux=self._has_aux, by="vmap"
            )
            out, grads = value_and_grad(params, self.gen_model_input_fn(inputs), rest=rest)
            optimizer.update(model, grads)
            value, aux = out if self._has_aux else (out, None)
            return value, aux, optimizer.opt_state[1].measurement["grad_norm"][...]

        return step


class Model(nnx.Module):
    """One block with attention, called as Tunix calls its models."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 64, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.out = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, tokens, positions, cache, mask):
        x = self.embed(tokens)
        x = x + self.attend(x, mask=mask[:, None])
        x = x + self.down(jax.nn.gelu(self.up(x)))
        return self.out(x), cache


def model_input(batch):
    """Returns the arguments of Tunix's loss."""
    examples, length = batch.input_tokens.shape
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (examples, length)),
        "attention_mask": jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (examples, length, length)),
    }


def batches(steps, examples=32, length=16):
    """Yields tokens that mostly follow from the token before."""
    for step in range(steps):
        rng = np.random.default_rng(step)
        tokens = rng.integers(64, size=(examples, length), dtype=np.int32)
        for i in range(1, length):
            known = rng.random(examples) < 0.9
            tokens[known, i] = (5 * tokens[known, i - 1] + 3) % 64
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def trainer(name, mesh, model=None, **options):
    """Returns a trainer for a method; options are those of ``TrainingConfig``."""
    model = Model(nnx.Rngs(0)) if model is None else model
    nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, jax.P())))
    config = TrainingConfig(eval_every_n_steps=1000, data_sharding_axis=(AXIS,), **options)
    args = model, optax.adamw(3e-3), config
    made = PeftTrainer(*args) if name == "tunix" else CompressedTrainer(*args, exchange=METHODS[name], mesh=mesh)
    return made.with_gen_model_input_fn(model_input)


def sent(made, mesh):
    """Returns the bytes that a device sends along the axis in a train step."""
    batch = jax.device_put(next(batches(1)), gc.data_sharding(mesh))
    compiled = nnx.jit(made.create_train_step_fn()).lower(made.model, made.optimizer, batch).compile()
    report = gc.wire_bytes(compiled, mesh=mesh)
    return sum(row.sent_bytes for row in report.rows if row.axis is None or AXIS in row.axis)


def main(name, steps=40):
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    made = trainer(name, mesh, max_steps=steps)
    with mesh:  # Tunix places batches on this mesh; it does not see that of jax.set_mesh
        print(f"{name}: {sent(made, mesh):,} bytes along {AXIS!r} in a step")
        made.train(batches(steps))
    print(f"{name}: losses", *(f"{x:.4f}" for x in made.metrics_logger.get_metric_history("", "loss", "train")))


if __name__ == "__main__":
    main(*sys.argv[1:])
