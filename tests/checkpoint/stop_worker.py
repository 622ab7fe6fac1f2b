"""One of two processes that train until they are told to end; `test_stop.py` starts them.

python stop_worker.py COORDINATOR PROCESSES PROCESS FOLDER
"""

import sys
import time

import jax
import jax.numpy as jnp
import optax
from processes import join

import jzero

(folder,) = join()
zero = jzero.Zero(stage=3)
state = zero.init(lambda key: {"w": jax.random.normal(key, (6, 5))}, optax.adam(1e-2))
step = zero.train_step(
    lambda params, batch, rng: jnp.mean((batch["x"] @ jzero.gather(params["w"])) ** 2)
)
batch = {"x": jnp.ones((2, 6))}
with zero.checkpointer(folder, every=4, timeout=60) as checkpoints:
    while not checkpoints.stopping:
        if int(state.step) == 1000:
            sys.exit("nothing stopped it")
        state, _ = step(state, batch)
        time.sleep(0.02 * (1 + jax.process_index()))
        checkpoints.save(state, jax.process_index())
    print("stopped after", int(state.step))
jax.distributed.shutdown()
