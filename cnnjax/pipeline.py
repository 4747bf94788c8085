"""Stages of layers on different devices: mesh axis ``pipe``.

The top-level layers of the network are cut into stages. A stage has the devices at one index of ``pipe`` to itself:
its parameters, optimiser state, moving averages and batch statistics live there alone, and its functions are jitted
there, partitioned over the other axes as in strategy jit. A step follows GPipe (Huang et al. 2019,
https://arxiv.org/abs/1811.06965): all micro-batches go forward through all stages, then backward, then every stage
updates once. JAX dispatches without waiting, so stages compute at the same time, each on another micro-batch.

The numbers are those of gradient accumulation over the same micro-batches on one device.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from cnnjax import model, networks, optim, partition, replicas
from cnnjax.config import UsageError
from cnnjax.networks import Network, Shape
from cnnjax.partition import Layout
from cnnjax.step import Batch, Metrics, Recipe, TrainState, batch_sums, create_state, preprocess, train_keys

Span = tuple[int, int]  # first and one past the last of some top-level layers


# ---------------------------------------------------------------------------------------------------------------------
# Which layers a stage has
# ---------------------------------------------------------------------------------------------------------------------


def stage_spans(network: Network, input_shape: Shape, layout: Layout) -> list[Span]:
    """The layers of each stage: those that ``layout.stages`` asks for, or stages of about equal work.

    Args:
        network: Layer records.
        input_shape: ``(height, width, channels)`` of one image.
        layout: With an axis ``pipe``.

    Raises:
        UsageError: If there are more stages than layers, or a start that is no layer.
    """
    stages, layers = layout.size("pipe"), len(network)
    if stages > layers:
        raise UsageError(f"--mesh pipe={stages} asks for more stages than the network's {layers} top-level layers")
    if layout.stages is None:
        starts = balanced_starts(*_work(network, input_shape), stages)
    else:
        starts = [0, *layout.stages]
        if starts[-1] >= layers:
            raise UsageError(f"--stages starts a stage at layer {starts[-1]}; allowed: 1 to {layers - 1}, the last")
    return list(itertools.pairwise((*starts, layers)))


def balanced_starts(costs: Sequence[int], inputs: Sequence[int], stages: int) -> list[int]:
    """Where each stage starts, so that the most costly is as cheap as can be, and then least crosses between stages.

    Args:
        costs: Of each layer; only their sums over stages matter.
        inputs: Values that each layer takes in.
        stages: 1 to the number of layers.
    """
    total = [0, *itertools.accumulate(costs)]

    def cheapest(join: Callable, cost: Callable) -> tuple[float, list[int]]:
        best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # over all cuts of the layers before some layer
        for stage in range(stages):
            best = {
                stop: min((join(before, cost(start, stop)), [*starts, start])
                          for start, (before, starts) in best.items() if start < stop)
                for stop in range(stage + 1, len(costs) + 1)
            }  # fmt: skip
        return best[len(costs)]

    largest, _ = cheapest(max, lambda start, stop: total[stop] - total[start])
    fits = lambda start, stop: total[stop] - total[start] <= largest  # noqa: E731
    return cheapest(operator.add, lambda start, stop: inputs[start] if fits(start, stop) else float("inf"))[1]


def _work(network: Network, input_shape: Shape) -> tuple[list[int], list[int]]:
    """Multiply-adds of each top-level layer, and the values that it takes in, for one image."""
    costs = dict.fromkeys((name for name, _ in networks.named_layers(network)), 0)
    inputs, shape = [], input_shape
    for row in networks.summary(network, input_shape):
        costs[row.name.split("/")[0]] += row.multiply_adds
        if row.name in costs:
            inputs.append(int(np.prod(shape)))
            shape = row.output_shape
    return list(costs.values()), inputs


# ---------------------------------------------------------------------------------------------------------------------
# What a stage computes
# ---------------------------------------------------------------------------------------------------------------------


class _Stage:
    """The programs of one stage, on its devices.

    Shapes: a stage takes ``x``, one micro-batch of what the stage before gives, or None in the first, which takes the
    images of the batch. ``batch`` is the whole batch, where not in the first stage without its images.
    """

    def __init__(self, recipe: Recipe, layout: Layout, span: Span, first: bool, last: bool, shardings: TrainState):
        self.recipe, self.layout, self.span, self.first, self.last = recipe, layout, span, first, last
        self.shardings = shardings
        rows, everywhere = layout.batch_sharding, layout.replicated
        kept = shardings.replace(step=None, batch_stats=None)
        self.run_forward = _Program(
            self.forward, (everywhere if last else rows, None, shardings.batch_stats, everywhere), donate=1
        )
        self.run_gather = _Program(lambda params: params, jax.tree.map(partition.without_fsdp, shardings.params))
        self.run_zeros = _Program(partial(jax.tree.map, jnp.zeros_like), shardings.params)
        self.run_backward = _Program(self.backward, (shardings.params, rows), donate=3)
        self.run_square = _Program(self.square, everywhere)
        self.run_update = _Program(self.update, (kept, everywhere), donate=0)
        self.run_evaluate = _Program(self.evaluate, everywhere if last else rows)

    def gathered(self, params: Any) -> Any:
        """Parameters as the layers take them: where ``fsdp`` splits them, whole, for all micro-batches of a step."""
        return self.run_gather(params) if self.layout.size("fsdp") > 1 else params

    def forward(self, params: Any, batch_stats: Any, x: jax.Array | None, batch: Batch, step: Any, number: Any):
        """Micro-batch ``number``: what the next stage takes, or the loss; its vjp; new statistics; sums, in the last.

        The loss is what the micro-batch adds to the mean over the whole batch.
        """
        recipe, part = self.recipe, self.layout.part(batch, number)
        augment_keys_B, dropout_keys_B = train_keys(recipe, step, part["index"])

        def apply(params: Any, x: jax.Array) -> tuple[jax.Array, tuple[Any, Metrics]]:
            y, new_stats = model.apply(
                recipe.network, {"params": params, "batch_stats": batch_stats}, x, train=True,
                sample_keys_B=dropout_keys_B, weight_B=part["weight"], dtype=recipe.dtype, span=self.span,
            )  # fmt: skip
            if not self.last:
                return y, (new_stats, {})
            sums = batch_sums(recipe, recipe.objective.measure(y, part, augment_keys_B), part["weight"])
            count = jnp.maximum(jnp.sum(batch["weight"]), 1)
            return sums["loss"] / (count * recipe.objective.unit), (new_stats, sums)

        if x is None:
            x_BHWC = preprocess(recipe, part, augment_keys_B, train=True)
            y, vjp, (batch_stats, sums) = jax.vjp(lambda params: apply(params, x_BHWC), params, has_aux=True)
            return y, _without(vjp, (params,)), batch_stats, sums
        y, vjp, (batch_stats, sums) = jax.vjp(apply, params, x, has_aux=True)
        return y, _without(vjp, (params, x)), batch_stats, sums

    def backward(self, inputs: tuple, vjp: Callable, g: jax.Array, total: Any) -> tuple[Any, tuple]:
        """Adds the gradients of a micro-batch to ``total``; the second result is the gradient of ``x``, if any."""
        grads, *g_x = vjp(inputs, jnp.ones_like(g) if self.last else g)
        return jax.tree.map(jnp.add, total, grads), tuple(g_x)

    def whole_grads(self, params: Any, grads: Any) -> Any:
        """Gradients with that of weight decay in the loss, which counts once a batch."""
        if not self.recipe.l2:
            return grads
        return jax.tree.map(jnp.add, grads, jax.grad(optim.l2_penalty)(params, self.recipe.l2))

    def square(self, params: Any, grads: Any) -> jax.Array:
        """What the stage adds to the squared norm of the gradient."""
        grads = self.whole_grads(params, grads)
        return jnp.asarray(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)), float)

    def update(
        self, state: TrainState, grads: Any, step: jax.Array, sums: list[Metrics], norm: jax.Array | None
    ) -> tuple[TrainState, Metrics]:
        """The new parameters, optimiser state and moving average; the squared gradient norm and added sums.

        ``norm`` is that of the whole gradient, where it is clipped.
        """
        recipe, params = self.recipe, state.params
        square = self.square(params, grads)
        grads = self.whole_grads(params, grads)
        if norm is not None:
            grads = optim.clip(grads, norm, recipe.clip_norm)
        updates, opt_state = recipe.optimizer.update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        ema = optim.ema_update(state.ema, params, recipe.ema, step) if recipe.ema else None
        results = {name: jnp.sum(jnp.stack([part[name] for part in sums])) for name in (sums[0] if self.last else ())}
        return state.replace(params=params, opt_state=opt_state, ema=ema), results | {"square": square}

    def evaluate(self, params: Any, batch_stats: Any, x: jax.Array | None, batch: Batch) -> Any:
        """The whole batch: what the next stage takes, or in the last what `step.eval_step` gives."""
        x = preprocess(self.recipe, batch, None, train=False) if x is None else x
        variables = {"params": params, "batch_stats": batch_stats}
        y, _ = model.apply(self.recipe.network, variables, x, train=False, dtype=self.recipe.dtype, span=self.span)
        if not self.last:
            return y
        values = self.recipe.objective.measure(y, batch)
        sums = batch_sums(self.recipe, values, batch["weight"])
        return sums | {name: values[measure] for name, measure in self.recipe.objective.samples.items()}


def _without(vjp: Any, inputs: tuple) -> Callable:
    """A vjp that does not hold, and is given again, its inputs: else every micro-batch would copy the parameters."""
    known = jax.tree.leaves(inputs)
    leaves, structure = jax.tree.flatten(vjp)
    places = [next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves]

    def backward(saved: list[jax.Array], inputs: tuple, g: jax.Array) -> tuple:
        known, rest = jax.tree.leaves(inputs), iter(saved)
        inner = jax.tree.unflatten(structure, [next(rest) if place is None else known[place] for place in places])
        return inner(g)

    saved = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return jax.tree_util.Partial(backward, saved)


class _Program:
    """A jitted function that, called with `jax.ShapeDtypeStruct`, compiles itself and gives such structs.

    Attributes:
        compiled: What it then runs; None before.
        results: The structs that it then gives.
    """

    def __init__(self, function: Callable, out_shardings: Any, donate: int | None = None):
        self._jitted = jax.jit(function, out_shardings=out_shardings, donate_argnums=() if donate is None else donate)
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if not _is_abstract(arguments):
            return (self.compiled or self._jitted)(*arguments)
        if self.compiled is None:
            lowered = self._jitted.lower(*arguments)
            self.compiled = lowered.compile()
            self.results = _abstract(lowered.out_info, self.compiled.output_shardings)
        return self.results


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _send(tree: Any, sharding: NamedSharding) -> Any:
    """Copies arrays to other devices, without waiting."""
    if _is_abstract(tree):
        return _abstract(tree, jax.tree.map(lambda _: sharding, tree))
    return jax.device_put(tree, sharding)


# ---------------------------------------------------------------------------------------------------------------------
# The schedule
# ---------------------------------------------------------------------------------------------------------------------


class Pipeline:
    """`init`, `train` and `evaluate` over the stages of a mesh with an axis ``pipe``.

    The state is an ordinary `TrainState`, whose arrays live on the devices of their stage. Those that belong to no
    layer (the step and the optimiser's counters) live on the first; the other stages are sent copies.

    Attributes:
        train: ``(state, batch) -> (state, metrics)``, as `cnnjax.step.train_step`; the state given is donated.
        evaluate: ``(state, batch) -> metrics``, as `cnnjax.step.eval_step`.
        state_shardings: Tree of shardings like the state.
        notes: The stages, and what the layout could not split.
    """

    def __init__(self, recipe: Recipe, layout: Layout, input_shape: Shape):
        """Cuts the network; nothing is compiled yet.

        Args:
            recipe: What to train. The optimiser must treat arrays of different layers apart.
            layout: With an axis ``pipe``, and what `Layout.batch_sharding` gives for batches.
            input_shape: ``(height, width, channels)`` of one image, after cropping.

        Raises:
            UsageError: If the network cannot be cut so, or would compute in float16.
            ValueError: If the optimiser mixes the gradients of layers in different stages.
        """
        if recipe.dtype == jnp.float16:
            raise UsageError("--dtype float16 and --mesh pipe do not go together; allowed with pipe: float32, bfloat16")
        self.recipe, self.layout = recipe, layout
        create = partial(create_state, recipe, input_shape)
        spans = stage_spans(recipe.network, input_shape, layout)
        names = [name for name, _ in networks.named_layers(recipe.network)]
        self._owner = {name: number for number, span in enumerate(spans) for name in names[slice(*span)]}
        abstract = jax.eval_shape(create)
        self.stages: list[_Stage] = []
        notes: list[str] = []
        costs, _ = _work(recipe.network, input_shape)
        for number, (start, stop) in enumerate(spans):
            own, state = layout.stage(number), self._select(abstract, number)
            shardings, left_whole = partition.state_shardings(state, own, recipe.network)
            self.stages.append(_Stage(recipe, own, (start, stop), number == 0, stop == len(names), shardings))
            parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            notes += [
                f"stage {number} of pipe: layers {start} to {stop - 1} ({names[start]} to {names[stop - 1]}), "
                f"{sum(costs[start:stop]):,} multiply-adds, {parameters:,} parameters, "
                f"on devices {', '.join(str(device.id) for device in own.mesh.devices.flat)}",
                *left_whole,
            ]
        idle = (len(spans) - 1) / (layout.microbatches + len(spans) - 1)
        notes.append(f"with --microbatches {layout.microbatches} a stage is idle for at least {idle:.0%} of a step")
        self._creates = [
            jax.jit(lambda number=number: self._select(create(), number), out_shardings=stage.shardings)
            for number, stage in enumerate(self.stages)
        ]
        self.notes = tuple(notes)
        self.state_shardings = self._join([stage.shardings for stage in self.stages])
        self._check_optimizer(abstract.params)
        if recipe.aggregate is not None:
            keep = partial(replicas.keep_fastest, recipe.aggregate, layout, recipe.seed)
            self._run_keep = _Program(keep, layout.batch_sharding)
        self._run_norm = _Program(lambda squares: jnp.sqrt(sum(squares)), self.stages[0].layout.replicated)
        self._run_finish = _Program(self._finish, self.stages[0].layout.replicated, donate=0)
        self.train = _Schedule(self._train, layout.batch_sharding)
        self.evaluate = _Schedule(self._evaluate, layout.batch_sharding)

    def part(self, state: TrainState, number: int) -> TrainState:
        """What a stage holds of a state; what belongs to no layer counts with the first."""
        return self._select(state, number, lambda leaf: None if number else leaf)

    def init(self) -> TrainState:
        """The state before step 0; each stage computes only its own."""
        return self._join([create() for create in self._creates])

    def _train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if self.recipe.aggregate is not None:
            batch = batch | {"weight": self._run_keep(state.step, batch["weight"])}
        states, batches, first = self._states(state), self._batches(batch), self.stages[0]
        stats = [own.batch_stats for own in states]
        params = [stage.gathered(own.params) for stage, own in zip(self.stages, states, strict=True)]
        numbers = [np.int32(number) for number in range(self.layout.microbatches)]

        saved: list[list[Any]] = [[] for _ in self.stages]  # for each micro-batch, what its backward pass takes
        losses, sums = [], []
        for number in numbers:
            x = None
            for s, stage in enumerate(self.stages):
                x = None if x is None else _send(x, stage.layout.batch_sharding)
                arguments = params[s], stats[s], x, batches[s], states[s].step, number
                y, vjp, stats[s], added = stage.run_forward(*arguments)
                saved[s].append((x, vjp))
                x = y
            losses.append(x)
            sums.append(added)

        grads = [stage.run_zeros(own.params) for stage, own in zip(self.stages, states, strict=True)]
        for _ in numbers:
            g: Any = losses.pop()  # the last stage differentiates it
            for s, stage in reversed(list(enumerate(self.stages))):
                x, vjp = saved[s].pop()
                inputs = (params[s],) if x is None else (params[s], x)
                grads[s], g_x = stage.run_backward(inputs, vjp, g, grads[s])
                if s:
                    g = _send(g_x[0], self.stages[s - 1].layout.batch_sharding)

        norms = self._norms(states, grads) if self.recipe.clip_norm else [None] * len(self.stages)
        results = []
        for s, stage in enumerate(self.stages):
            kept = states[s].replace(step=None, batch_stats=None)
            kept, added = stage.run_update(kept, grads[s], states[s].step, sums if stage.last else [], norms[s])
            states[s] = kept.replace(batch_stats=stats[s])
            results.append(_send(added, first.layout.replicated))
        step, metrics = self._run_finish(state.step, results, optim.rate_factor(states[0].opt_state))
        return self._join(states).replace(step=step), metrics

    def _norms(self, states: list[TrainState], grads: list[Any]) -> list[jax.Array]:
        """The norm of the whole gradient, on the devices of each stage."""
        everywhere = self.stages[0].layout.replicated
        squares = [
            _send(stage.run_square(own.params, g), everywhere)
            for stage, own, g in zip(self.stages, states, grads, strict=True)
        ]
        norm = self._run_norm(squares)
        return [_send(norm, stage.layout.replicated) for stage in self.stages]

    def _finish(self, step: jax.Array, results: list[Metrics], rate_factor: Any) -> tuple[jax.Array, Metrics]:
        norm = jnp.sqrt(sum(added["square"] for added in results))
        sums = {name: value for name, value in results[-1].items() if name != "square"}
        return step + 1, sums | {"grad_norm": norm, "learning_rate": self.recipe.schedule(step) * rate_factor}

    def _evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        x: Any = None
        batches = self._batches(batch)
        for s, stage in enumerate(self.stages):
            own = self._select(state, s)
            x = None if x is None else _send(x, stage.layout.batch_sharding)
            params = stage.gathered(own.ema if self.recipe.ema else own.params)
            x = stage.run_evaluate(params, own.batch_stats, x, batches[s])
        return x

    # -- trees ---------------------------------------------------------------------------------------------------------

    def _is_layers(self, tree: Any) -> bool:
        """Whether a subtree of the state holds arrays by layer, as parameters and the optimiser's moments do."""
        return isinstance(tree, dict) and tree.keys() <= self._owner.keys()

    def _select(self, tree: Any, number: int, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        """The part of a tree that belongs to a stage; ``other`` acts on what belongs to no layer."""

        def select(node: Any) -> Any:
            if not self._is_layers(node):
                return other(node)
            return {name: own for name, own in node.items() if self._owner[name] == number}

        return jax.tree.map(select, tree, is_leaf=self._is_layers)

    def _join(self, parts: list[Any]) -> Any:
        """Undoes `_select`; what belongs to no layer is taken from the first stage."""

        def join(*nodes: Any) -> Any:
            return dict(itertools.chain(*(node.items() for node in nodes))) if self._is_layers(nodes[0]) else nodes[0]

        return jax.tree.map(join, *parts, is_leaf=self._is_layers)

    def _states(self, state: TrainState) -> list[TrainState]:
        """The state of each stage, with copies of what belongs to no layer."""
        return [
            self._select(state, number, partial(_send, sharding=stage.layout.replicated) if number else lambda x: x)
            for number, stage in enumerate(self.stages)
        ]

    def _batches(self, batch: Batch) -> list[Batch]:
        """The batch for each stage: images go to the first alone."""
        small = {name: values for name, values in batch.items() if not name.endswith("image")}
        return [batch, *(_send(small, stage.layout.batch_sharding) for stage in self.stages[1:])]

    def _check_optimizer(self, params: Any) -> None:
        """Compares one update of all layers with those of each stage, on arrays of one value each."""
        leaves, structure = jax.tree.flatten(params)
        ones = [np.ones((1,) * leaf.ndim, np.float32) for leaf in leaves]
        params = jax.tree.unflatten(structure, ones)
        grads = jax.tree.unflatten(structure, [1000 * (number + 1) * one for number, one in enumerate(ones)])

        def update(grads: Any, params: Any) -> Any:
            return self.recipe.optimizer.update(grads, self.recipe.optimizer.init(params), params)[0]

        def both() -> Any:
            apart = [update(self._select(grads, s), self._select(params, s)) for s in range(len(self.stages))]
            return update(grads, params), self._join(apart)

        together, apart = map(jax.tree.leaves, jax.device_get(jax.jit(both)()))
        if not all(np.allclose(a, b, rtol=1e-4) for a, b in zip(together, apart, strict=True)):
            raise ValueError(
                "the optimiser updates a layer by the gradients of others, as optax.clip_by_global_norm does; "
                "a mesh with pipe needs one that treats each array by itself"
            )


class _Schedule:
    """A function that calls `_Program`s, with what the loop uses of a jitted one: `lower(...).compile()`."""

    def __init__(self, run: Callable, batch_sharding: NamedSharding):
        self._run, self._batch_sharding = run, batch_sharding

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        return self._run(state, batch)

    def lower(self, state: TrainState, batch: Mapping[str, Any]) -> "_Schedule":
        """Compiles every program ahead, for a state and a batch of these shapes; from then on it takes no others."""
        self._run(
            _abstract(state, jax.tree.map(lambda x: x.sharding, state)),
            _abstract(batch, jax.tree.map(lambda _: self._batch_sharding, batch)),
        )
        return self

    def compile(self) -> "_Schedule":
        """Itself: `lower` has done it."""
        return self
