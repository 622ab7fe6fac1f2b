"""One of two processes that save and restore together; `test_save_processes.py` starts them.

python save_worker.py COORDINATOR PROCESSES PROCESS ROOT
"""

import json
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from processes import join
from states import setup_of

from jzero import checkpoint
from jzero.checkpoint import pieces
from jzero.checkpoint.store import Reader

folder = Path(*join())
number = jax.process_index()
zero = setup_of(devices=4, stage=3)
told, reads = {}, []


def save(step: int, timeout: float = 60.0, **facts) -> None:
    """Saves the state as another step; of an error, what is said."""
    snapshot = checkpoint.snapshot(checkpoint.entries(zero.setup, state).values())
    facts = checkpoint.facts_of(zero.setup, state, **facts)
    nonce = checkpoint.agree_nonce()
    try:
        checkpoint.save_step(folder, step, snapshot, facts, nonce=nonce, timeout=timeout)
        assert step in checkpoint.folders.published(folder)
    except RuntimeError as error:
        told[step] = str(error)
    multihost_utils.sync_global_devices(f"step {step}")


# What one process saved on four devices, and saved again by two; only the own pieces are read.
start = Reader.start
Reader.start = lambda self, name, index, out: (
    reads.append((name, out.size)) or start(self, name, index, out)
)
restored = checkpoint.restore(folder / "step_00000005", zero.setup)
state = restored.state
told["read"] = sum(size for name, size in reads if name == "optimizer/0/mu/wide")
pieces_of = checkpoint.snapshot(checkpoint.entries(zero.setup, state).values()).pieces
told["pieces"] = [len(pieces_of[name]) for name in ("progress/step", "progress/rng", "params/wide")]
told["positions"] = restored.positions
save(6, data={"process": number})
told["data"] = checkpoint.restore(folder / "step_00000006", zero.setup).data

# One process cannot write; the first cannot; one is not there.
write = pieces._start
for step, failing in ((7, 1), (8, 0)):
    if number == failing:

        def full(*args):
            raise OSError(28, "No space left on device")

        pieces._start = full
    save(step)
    pieces._start = write
nonce = checkpoint.agree_nonce()
if number == 0:
    snapshot = checkpoint.snapshot(checkpoint.entries(zero.setup, state).values())
    facts = checkpoint.facts_of(zero.setup, state)
    try:
        checkpoint.save_step(folder, 9, snapshot, facts, nonce=nonce, timeout=0.5)
    except RuntimeError as error:
        told[9] = str(error)
multihost_utils.sync_global_devices("step 9")

# One process cannot read its pieces: neither goes on.
if number == 0:
    damaged = folder / "step_00000006" / "arrays" / "params%2Fwide" / "c.3.0"
    np.save(folder / "damaged.npy", np.frombuffer(damaged.read_bytes(), np.uint8))
    damaged.unlink()
multihost_utils.sync_global_devices("damaged")
try:
    checkpoint.restore(folder / "step_00000006", zero.setup)
except (ValueError, RuntimeError) as error:
    told["restore"] = f"{type(error).__name__}: {error}"
multihost_utils.sync_global_devices("restored")
if number == 0:
    damaged.write_bytes(np.load(folder / "damaged.npy").tobytes())
(folder / f"told-{number}.json").write_text(json.dumps(told))
jax.distributed.shutdown()
