"""cnnjax itself as one of the frameworks; options ``mesh``, ``strategy``, ``bn_scope`` and ``microbatches``."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import protocol

from cnnjax import model, partition
from cnnjax.augment import Augmentation
from cnnjax.compat import jobs
from cnnjax.optim import OptimizerConfig, make_optimizer
from cnnjax.partition import Layout
from cnnjax.step import Recipe
from cnnjax.strategy import compile_steps


class Trainer(protocol.Trainer):
    """The package's own step, fed as the others are."""

    def __init__(self, job: protocol.Job):
        options = job.options
        self.mesh, self.strategy = options.get("mesh", "data=1"), options.get("strategy", "jit")
        self.bn_scope = options.get("bn_scope", "global")
        jax.config.update("jax_enable_x64", job.dtype == "float64")
        mesh, note = partition.make_mesh(self.mesh)
        self.notes, self.backend = (note,), jax.default_backend()
        self.versions = {module.__name__: module.__version__ for module in (jax, jaxlib, flax, optax)}
        self._layout = Layout(mesh, int(options.get("microbatches", 1)), bn_scope=self.bn_scope)
        rates_T = np.asarray(job.learning_rates)

        def schedule(step: Any) -> jax.Array:
            return jnp.asarray(rates_T, job.dtype)[step]

        rule = dict(job.optimizer)
        config = OptimizerConfig(optimizer=rule.pop("name"), lr=1.0, **rule)
        optimizer = optax.chain(make_optimizer(config, job.steps), optax.scale_by_schedule(schedule))
        dtype = jnp.dtype(job.dtype)
        self._recipe = Recipe(
            jobs.records(job.network), optimizer, schedule, seed=job.seed, augmentation=Augmentation(), dtype=dtype,
            param_dtype=dtype,
        )  # fmt: skip
        self._steps = compile_steps(self._recipe, self._layout, job.input_shape, self.strategy)
        state = self._steps.init()
        filled = state.replace(
            params=jobs.filled(state.params, job.weights), batch_stats=jobs.filled(state.batch_stats, job.weights)
        )
        self._state = jax.device_put(filled, self._steps.state_shardings)
        self._size = job.batch_size
        self._whole: Any = None  # what `predict` takes

        def logits(params, batch_stats, x_BHWC):
            variables = {"params": params, "batch_stats": batch_stats}
            return model.apply(self._recipe.network, variables, x_BHWC, train=False, dtype=dtype)[0]

        self._logits = jax.jit(logits)

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`. The schedule is in the step, so the rate is not needed."""
        del learning_rate
        self._whole = None
        place = self._layout.rows(self._size)
        real = (place >= 0) & (place < len(x))
        rows = np.where(real, place, 0)
        batch = {"image": x[rows], "label": y[rows], "weight": real.astype(np.float32), "index": index[rows]}
        batch = jax.device_put(batch, self._layout.batch_sharding)
        self._state, metrics = jax.block_until_ready(self._steps.train(self._state, batch))
        return float(metrics["loss"] / metrics["count"]), int(metrics["correct"])

    def predict(self, x):
        """See `protocol.Trainer`. On one device, whatever the mesh."""
        if self._whole is None:
            self._whole = jax.device_put(jax.device_get((self._state.params, self._state.batch_stats)))
        return jax.device_get(self._logits(*self._whole, x))

    def weights(self):
        """See `protocol.Trainer`."""
        return jobs.flat(jax.device_get(self._state.params)) | jobs.flat(jax.device_get(self._state.batch_stats))


if __name__ == "__main__":
    protocol.main("jax", Trainer)
