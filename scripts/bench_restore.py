"""How much host memory a restore needs beside the state that it makes.

    python scripts/bench_restore.py [--megabytes 1000] [--devices 8] [--stages 1,3] [--from-stage 3]

Saves a state of so many megabytes (parameters and two moments in fp32, or bf16 parameters with fp32
masters with --precision bf16), then restores it in a process of its own for each stage, on virtual
CPU devices, where the state itself is in host memory too. Prints, in bytes of the checkpoint: what
the state takes, the peak, and the difference. Linux only: the peak is VmHWM of /proc/self/status.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, LAYERS = 1024, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--stages", default="1,3")
    parser.add_argument("--from-stage", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        start(folder, f"save {args.from_stage}")
        print("stage  checkpoint  state  peak  over the state  / checkpoint  seconds")
        for stage in args.stages.split(","):
            found = json.loads(start(folder, f"restore {stage}"))
            over = found["peak"] - found["state"]
            print(
                f"{stage:>5}  {found['checkpoint'] / 1e6:7.0f} MB {found['state'] / 1e6:6.0f} "
                f"{found['peak'] / 1e6:6.0f} {over / 1e6:6.0f}  {over / found['checkpoint']:14.3f} "
                f"{found['seconds']:9.1f}",
                flush=True,
            )


def start(folder: str, worker: str) -> str:
    """Runs this file once more, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", worker, "--folder", folder]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def work(args: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    import jax.numpy as jnp
    import optax

    import jzero
    from jzero import checkpoint

    what, stage = args.worker.split()
    scalars = args.megabytes * 10**6 // 12
    rows = (scalars - LAYERS * WIDTH * 4 * WIDTH) // WIDTH
    if rows < 1:
        sys.exit(f"--megabytes {args.megabytes}: give more")

    def init(key):
        return {
            "embed": jax.random.normal(key, (rows, WIDTH)),
            "blocks": jax.random.normal(key, (LAYERS, WIDTH, 4 * WIDTH)),
        }

    zero = jzero.Zero(stage=int(stage), precision=args.precision)
    zero.setup_for(init, optax.adam(1e-3), layer_axes={"blocks": 0})
    if what == "save":
        state = zero.init(init, optax.adam(1e-3), layer_axes={"blocks": 0})
        copy = checkpoint.snapshot(checkpoint.entries(zero.setup, state).values())
        facts = checkpoint.facts_of(zero.setup, state)
        checkpoint.save_step(args.folder, 0, copy, facts, nonce=checkpoint.agree_nonce())
        return
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    before, begun = reset_peak(), time.perf_counter()
    restored = checkpoint.restore(args.folder / "step_00000000", zero.setup)
    jax.block_until_ready(restored.state)
    seconds = time.perf_counter() - begun
    state = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(restored.state)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for shard in x.addressable_shards
    )
    size = checkpoint.manifest.read(args.folder / "step_00000000").bytes
    found = {"checkpoint": size, "state": state, "peak": peak() - before, "seconds": seconds}
    print(json.dumps(found))


def peak() -> int:
    """The most memory that was resident since the last reset, in bytes."""
    return _status("VmHWM")


def reset_peak() -> int:
    """Starts the peak anew; what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
