"""One of two processes that train until they are told to end; `test_stop.py` starts them.

python stop_worker.py COORDINATOR PROCESS FOLDER
"""

import sys
import time
from pathlib import Path

import jax

coordinator, process, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(process))

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jzero  # noqa: E402
from jzero.checkpoint.checkpointer import Checkpointer  # noqa: E402

zero = jzero.Zero(stage=3)
state = zero.init(lambda key: {"w": jax.random.normal(key, (6, 5))}, optax.adam(1e-2))
step = zero.train_step(
    lambda params, batch, rng: jnp.mean((batch["x"] @ jzero.gather(params["w"])) ** 2)
)
batch = {"x": jnp.ones((2, 6))}
with Checkpointer(zero, Path(folder), every=4, timeout=60) as checkpoints:
    for number in range(1, 1000):  # noqa: B007
        state, _ = step(state, batch)
        time.sleep(0.02 * (1 + int(process)))
        checkpoints.save(state, int(process))
        if checkpoints.stopping:
            break
    else:
        sys.exit("nothing stopped it")
print("stopped after", number)
jax.distributed.shutdown()
