"""Loss and gradients: the region that is manual over the ZeRO axes.

Its in_specs and out_specs are the stage: parameters enter as they are stored, gradients leave as
the optimizer takes them. Every collective of a step is in here, but the update's: the gather of new
weights, and what an optimizer itself computes over devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero.errors import JzeroError
from jzero.in_turn import Prefetch
from jzero.layout import Layout
from jzero.losses import divided, global_means, local_means, loss_parts
from jzero.models.model import Model
from jzero.partition import STAGES, is_float
from jzero.paths import flatten, unflatten
from jzero.recipe import Recipe
from jzero.reduction import finish, squares
from jzero.rewrite import rewritten
from jzero.sharded import Sharded


class Gradients(NamedTuple):
    """What the region hands out.

    Attributes:
      grads: path -> gradient of scale x loss, sharded from stage 1 on; in the communication dtype,
        or the accumulation dtype where reduced micro-batches were summed.
      squares: float32 [leaves], each gradient's squared norm, in the order of
        `Layout.differentiated`.
      loss: float32 scalar, the mean over the global batch.
      aux: the loss function's other outputs, as means over the global batch.
      variables: the model's other variables after the step.
    """

    grads: dict[str, Any]
    squares: Any
    loss: Any
    aux: Any
    variables: Any


@dataclass(frozen=True)
class Region:
    """The manual region of a layout.

    Attributes:
      layout: where everything lives.
      model: the model's description.
      params: a pytree like the parameters, for its structure.
      loss_fn: loss_fn(model, batch, rng) -> scalar, `Mean`, or either with aux.
      accumulation: micro-batches in a step.
      prefetch: how far ahead unrolled layers are gathered.
      regather: gather weights again for backward instead of keeping them.
    """

    layout: Layout
    model: Model
    params: Any
    loss_fn: Callable[..., Any]
    accumulation: int
    prefetch: Prefetch
    regather: bool

    def gradients(self, values, variables, batch, rng, scale) -> Gradients:
        """Gradients of a global batch.

        Arguments:
          values: path -> parameter as stored.
          variables: the model's other variables, whole.
          batch: pytree of global arrays [rows, ...].
          rng: key of this step.
          scale: float32, the loss scale.
        """
        self._check_rows(batch)
        mesh = self.layout.mesh
        grad_specs = {
            path: self.layout.manual_spec(leaf, leaf.shard_state)
            for path, leaf in self.layout.differentiated.items()
        }
        whole = PartitionSpec()
        return self._manual(
            self._local_gradients,
            (self._value_specs(), whole, PartitionSpec(mesh.manual_data_axes), whole, whole),
            Gradients(grad_specs, whole, whole, whole, whole),
        )(values, variables, batch, rng, scale)

    def losses(self, values, variables, batch, rng) -> tuple[jax.Array, Any]:
        """The loss and aux of a global batch, without gradients."""
        self._check_rows(batch)
        whole = PartitionSpec()
        rows = PartitionSpec(self.layout.mesh.manual_data_axes)
        return self._manual(self._local_losses, (self._value_specs(), whole, rows, whole), whole)(
            values, variables, batch, rng
        )

    def trace(self, params, variables, batch) -> Any:
        """Traces the loss once for given parameters, to see how it reads them (jzero.probe).

        Returns the model's other variables after it.
        """

        def local(batch):
            rng = jax.random.fold_in(jax.random.key(0), self._device_index())
            bound = self.model.bind(params, variables, self._fold(rng))
            loss_parts(self.loss_fn(bound, batch, rng))
            return self.model.collect(bound, variables)

        self._check_rows(batch)
        rows = PartitionSpec(self.layout.mesh.manual_data_axes)
        return self._manual(local, rows, PartitionSpec())(batch)

    def _manual(self, f, in_specs, out_specs):
        mesh = self.layout.mesh
        return jax.shard_map(
            f,
            mesh=mesh.manual,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(mesh.manual_data_axes),
            check_vma=False,
        )

    def _value_specs(self):
        return {
            path: self.layout.manual_spec(leaf, leaf.shard_parameter)
            for path, leaf in self.layout.leaves.items()
        }

    def _check_rows(self, batch):
        data = self.layout.mesh.data_size
        need = data * self.accumulation
        first = None
        for path, x in flatten(batch).items():
            if not x.shape:
                raise JzeroError(
                    f"batch[{path}] is a scalar; every leaf of a batch has rows in dim 0"
                )
            first = first or (path, x.shape[0])
            if x.shape[0] != first[1]:
                raise JzeroError(
                    f"batch[{path}] has {x.shape[0]} rows but batch[{first[0]}] has {first[1]}; "
                    f"every leaf of a batch has the same rows in dim 0"
                )
        if first is None:
            raise JzeroError("the batch has no arrays")
        if first[1] % need:
            axes = " x ".join(
                f"{a}={self.layout.mesh.storage.shape[a]}" for a in self.layout.mesh.data_axes
            )
            raise JzeroError(
                f"a batch of {first[1]} rows does not split into {data} devices (mesh axes {axes}) "
                f"x {self.accumulation} micro-batches: give a multiple of {need} rows"
            )

    # Below, everything runs on one device's piece.

    def _bind(self, values, taps, variables, fold):
        sharded = {p: Sharded(values[p], taps.get(p), self._recipes[p]) for p in values}
        return self.model.bind(unflatten(self.params, sharded), variables, fold)

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        accumulate = self.accumulation > 1
        return {p: self.layout.recipe(x, accumulate) for p, x in self.layout.leaves.items()}

    def _local_gradients(self, values, variables, batch, rng, scale) -> Gradients:
        taps = self._taps()
        rng = jax.random.fold_in(rng, self._device_index())
        changed: set[str] = set()

        def micro(variables, rows, index):
            key = jax.random.fold_in(rng, index)
            return self._micro_batch(values, taps, variables, rows, key, scale, changed)

        if self.accumulation == 1:
            grads, means, _, variables = micro(variables, batch, 0)
            factor = None
        else:
            grads, factor, means, variables = self._accumulate(micro, variables, batch)
        with jax.named_scope("zero_reduce"):
            loss, aux = global_means(means, self.layout.mesh.manual_data_axes)
            grads = finish(self.layout, grads, factor)
        with jax.named_scope("zero_norm"):
            norms = squares(self.layout, grads)
        return Gradients(grads, norms, loss, aux, self._average(variables, changed))

    def _local_losses(self, values, variables, batch, rng):
        rng = jax.random.fold_in(rng, self._device_index())
        bound = self._bind(values, {}, variables, self._fold(rng))
        means = local_means(*loss_parts(self.loss_fn(bound, batch, rng)))
        return global_means(means, self.layout.mesh.manual_data_axes)

    def _micro_batch(self, values, taps, variables, rows, key, scale, changed):
        """(gradients, (loss, aux) as local Means, relative weight, variables) of a micro-batch."""

        def local_loss(taps):
            bound = self._bind(values, taps, variables, self._fold(key))
            total, weight, aux = loss_parts(self.loss_fn(bound, rows, key))
            after = self.model.collect(bound, variables)
            changed.update(_changed(variables, after))
            return total, (weight, aux, after)

        loss = local_loss
        if STAGES[self.layout.stage].gradients:
            loss = rewritten(loss, self.prefetch, self.regather)
        total, pull, (weight, aux, after) = jax.vjp(loss, taps, has_aux=True)
        means = local_means(total, weight, aux)
        # Seeded by the weight of the whole micro-batch, gradients have the size of a mean's: sums
        # would overflow fp16. A micro-batch without weight contributes nothing. The weight is
        # summed apart from the loss: most often it is the batch's, and need not wait for forward.
        size = self.layout.mesh.data_size
        weight = size if weight is None else lax.psum(weight, self.layout.mesh.manual_data_axes)
        (grads,) = pull(divided(scale, weight))
        return grads, means, jnp.float32(weight / size), after

    def _accumulate(self, micro, variables, batch):
        """Runs the micro-batches in a loop.

        Returns:
          Weighted sums of their gradients, the factor that makes means of them, the sums of the
          rest, and the variables.
        """
        split = jax.tree.map(
            lambda x: x.reshape(self.accumulation, x.shape[0] // self.accumulation, *x.shape[1:]),
            batch,
        )
        dtype = self.layout.policy.accumulation

        def body(carry, xs):
            acc, sums, variables = carry
            index, rows = xs
            grads, means, weight, variables = micro(variables, rows, index)
            with jax.named_scope("zero_accumulate"):
                weighted = {
                    p: acc[p] + (g.astype(dtype) * weight.astype(dtype)) for p, g in grads.items()
                }
            return (weighted, jax.tree.map(jnp.add, sums, (means, weight)), variables), None

        first = jax.tree.map(lambda x: x[0], split)
        grads, *numbers, _ = jax.eval_shape(micro, variables, first, jnp.int32(0))
        acc = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), grads)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(numbers))
        (grads, (means, weight), variables), _ = lax.scan(
            body, (acc, sums, variables), (jnp.arange(self.accumulation), split)
        )
        return grads, divided(1, weight), means, variables

    def _taps(self) -> dict[str, jax.Array]:
        taps = {}
        size = self.layout.mesh.group_size
        for path, recipe in self._recipes.items():
            leaf = recipe.leaf
            if path not in self.layout.differentiated:
                continue
            shape = list(leaf.array.shape)
            if leaf.shard_gradient and leaf.dim is not None:
                shape[leaf.dim] = leaf.padded // size
            taps[path] = jnp.zeros(shape, recipe.reduce_dtype)
        return taps

    def _average(self, variables, changed: set[str]):
        """Batch statistics and the like: means over the data axes; counts are the same anyway."""

        def one(path, x):
            if path in changed and is_float(str(x.dtype)):
                mean = lax.pmean(x.astype(jnp.float32), self.layout.mesh.manual_data_axes)
                return mean.astype(x.dtype)
            return x

        flat = flatten(variables)
        return unflatten(variables, {path: one(path, x) for path, x in flat.items()})

    def _device_index(self):
        return lax.axis_index(self.layout.mesh.manual_data_axes)

    def _fold(self, key) -> Callable[[jax.Array], jax.Array]:
        """Mixes this device, step and micro-batch into a key that the model itself holds."""
        number = jax.random.bits(key)

        def fold(own):
            if not own.shape:
                return jax.random.fold_in(own, number)
            return jax.vmap(fold)(own)

        return fold


def _changed(before, after) -> set[str]:
    """The variables that a call wrote; nothing need be averaged of the others."""
    old, new = flatten(before), flatten(after)
    return {path for path, x in new.items() if old.get(path) is not x}
