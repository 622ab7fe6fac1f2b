"""The optimizer step: the Optax update on whole sharded trees."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jzero.layout import Layout, is_leaf
from jzero.padding import pad, unpad, zero_padding
from jzero.partition import Leaf
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
