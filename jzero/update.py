"""The optimizer step: the Optax update on whole sharded trees, then cast and gather by layers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jzero.layout import Layout, is_leaf
from jzero.padding import pad, unpad, zero_padding
from jzero.partition import STAGES, Leaf
from jzero.paths import flatten, unflatten


@dataclass(frozen=True)
class Update:
    """Applies an Optax transformation to the stored state.

    Attributes:
      layout: where everything lives.
      tx: the user's transformation.
      params: a pytree like the parameters, None where a leaf is not trained.
      as_stored: padded leaves may be updated with their padding: every element for itself.
    """

    layout: Layout
    tx: optax.GradientTransformationExtraArgs
    params: Any
    as_stored: bool

    def tree(self, flat: dict[str, jax.Array]):
        """The pytree that Optax sees, from arrays by path."""
        return unflatten(self.params, flat)

    def init(self, masters: dict[str, jax.Array]):
        """Optax's first state, as stored."""
        state = self.tx.init(self.tree(self._true(masters)))
        return self._stored_state(state)

    def masters(self, params, master) -> dict[str, jax.Array]:
        """The fp32 weights that the optimizer updates, sharded from stage 1 on.

        In fp32 training they are the parameters; below stage 3 each device takes its own piece of
        its whole copy, which costs nothing.
        """
        out = {}
        for path, leaf in self.layout.trained.items():
            x = master.get(path)
            if x is None:
                x = params[path]
                if leaf.shard_state and not leaf.shard_parameter:
                    x = pad(leaf, x)
            out[path] = lax.with_sharding_constraint(x, self.layout.master(leaf).sharding)
        return out

    def apply(self, grads, opt_state, masters, **extra):
        """One update.

        Arguments:
          grads: path -> gradient, float32, as stored; where none is taken, zeros go in.
          opt_state: Optax state, as stored.
          masters: path -> float32 weight, as stored.
          extra: what transformations with extra arguments take, such as value=loss.

        Returns:
          (masters, opt_state) after the update, as stored.
        """
        grads = {p: grads.get(p, jnp.zeros_like(x)) for p, x in masters.items()}
        grads, weights = self.tree(self._true(grads)), self.tree(self._true(masters))
        state = opt_state
        if not self.as_stored:
            state = jax.tree.map(unpad, self.layout.opt_leaves, opt_state, is_leaf=is_leaf)
        updates, state = self.tx.update(grads, state, weights, grad=grads, **extra)
        new = flatten(optax.apply_updates(weights, updates))
        stored = zero_padding if self.as_stored else pad
        new = {path: stored(self.layout.leaves[path], x) for path, x in new.items()}
        new = {
            path: lax.with_sharding_constraint(new[path], self.layout.master(leaf).sharding)
            for path, leaf in self.layout.trained.items()
        }
        return new, self._stored_state(state)

    def _true(self, flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if self.as_stored:
            return flat
        return {path: unpad(self.layout.leaves[path], x) for path, x in flat.items()}

    def _stored_state(self, state):
        """Pads and pins every leaf of an Optax state."""

        def one(leaf: Leaf, x):
            want = self.layout.optimizer(leaf)
            x = pad(leaf, x) if x.shape != want.shape else x
            return lax.with_sharding_constraint(x, want.sharding)

        return jax.tree.map(one, self.layout.opt_leaves, state, is_leaf=is_leaf)


def publish(layout: Layout, masters, old: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The parameters as stored between steps, from updated master weights.

    Arguments:
      layout: where everything lives.
      masters: path -> float32 weight, as the optimizer left it.
      old: path -> the parameters before the step, whose buffers are written.

    Returns:
      path -> parameter: cast, and below stage 3 gathered.
    """
    new = dict(old)
    for path, leaf in layout.trained.items():
        if not layout.has_parameter(leaf):
            continue
        if leaf.shard_parameter or not leaf.shard_state:
            new[path] = masters[path].astype(layout.compute_dtype(leaf))
        else:
            new[path] = _gather_into(layout, leaf, masters[path], old[path])
    return new


def _gather_into(layout: Layout, leaf: Leaf, master, old):
    """Gathers an updated shard into the donated whole copy, layer by layer.

    One layer at a time, no second full set of parameters ever exists. At stage 3 only what the
    persistence threshold keeps whole comes here: so small, all layers go at once.
    """
    mesh = layout.mesh
    assert leaf.dim is not None
    size, dim, dtype = leaf.array.shape[leaf.dim], leaf.dim, layout.compute_dtype(leaf)

    def whole(shard, axis):
        x = lax.all_gather(shard.astype(dtype), mesh.manual_shard_axes, tiled=True)
        # Moved afterwards: gathered on a minor dimension, XLA lays whole stacks out transposed.
        x = jnp.moveaxis(x.reshape(-1, *shard.shape), 0, axis)
        x = x.reshape(*shard.shape[:axis], -1, *shard.shape[axis + 1 :])
        return lax.slice_in_dim(x, 0, size, axis=axis) if leaf.is_padded else x

    def local(shard, buffer):
        if leaf.array.layer_axes[:1] != (0,) or STAGES[layout.stage].parameters:
            return whole(shard, dim)

        def layer(i, buffer):
            piece = lax.dynamic_index_in_dim(shard, i, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(buffer, whole(piece, dim - 1), i, 0)

        return lax.fori_loop(0, leaf.array.shape[0], layer, buffer)

    with jax.named_scope(f"zero_gather_updated/{leaf.path}"):
        return jax.shard_map(
            local,
            mesh=mesh.manual,
            in_specs=(
                leaf.spec(mesh.manual_shard_axes, sharded=True),
                leaf.spec(mesh.manual_shard_axes, sharded=False),
            ),
            out_specs=leaf.spec(mesh.manual_shard_axes, sharded=False),
            axis_names=set(mesh.manual.axis_names),
            check_vma=False,
        )(master, old)
