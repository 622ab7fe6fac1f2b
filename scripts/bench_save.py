"""What a save costs the example's training, with and without in one process.

    python scripts/bench_save.py

Segments of 20 steps alternate: one with a save, whose files are written while its steps run and are
waited for at its end, and one without. A pair of neighbours gives the time that a save adds; the
order within pairs alternates too. Told as a share of the 50 steps from one save to the next.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "lm"
sys.path.insert(0, str(EXAMPLE))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of saving.")
    add = parser.add_argument
    add("--pairs", type=int, default=20, metavar="N", help="of segments (20)")
    add("--segment", type=int, default=20, metavar="N", help="steps of a segment (20)")
    add("--every", type=int, default=50, metavar="K", help="steps from save to save (50)")
    add("--devices", type=int, default=8, metavar="N", help="the first N; virtual on a CPU (8)")
    add("--config", type=Path, default=EXAMPLE / "stage3.json", metavar="FILE.json")
    add("--model", default="tiny", metavar="PRESET", help="of examples/lm/model.py (tiny)")
    add("--folder", type=Path, metavar="DIR", help="where to save (a temporary folder)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    flag = "xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={args.devices}"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from model import LM, PRESETS, loss_fn

    import jzero
    from jzero.checkpoint import manifest
    from jzero.checkpoint.folders import step_folder

    settings = json.loads(args.config.read_text())
    settings["scheduler"]["params"]["total_num_steps"] = 10_000
    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("data",))
    zero, size = jzero.Zero(settings, mesh=mesh), PRESETS[args.model]
    state = zero.init(lambda rngs: LM(size, rngs=rngs), seed=0)
    step = zero.train_step(loss_fn)
    rng = np.random.default_rng(0)
    shape = (zero.batch.train or 0, size.context + 1)
    batch = {"tokens": rng.integers(0, size.vocabulary, shape, dtype=np.int32)}
    held_up: list[float] = []  # seconds that a call of save took

    def train(save: Callable[[jzero.State, bool], object] | None) -> tuple[float, float]:
        """Seconds of a segment on the clock, and on the CPUs."""
        nonlocal state
        jax.block_until_ready(state)
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(args.segment):
            state, _ = step(state, batch)
            if save is not None:
                before = time.perf_counter()
                if save(state, number == 0):
                    held_up.append(time.perf_counter() - before)
        jax.block_until_ready(state)
        if save is not None:
            checkpoints.wait()
        return time.perf_counter() - began, time.process_time() - cpu

    checkpoints = zero.checkpointer(folder / "checkpoints", every=10**9)

    def saving(state: jzero.State, force: bool) -> bool:
        return checkpoints.save(state, force=force)

    with checkpoints:
        train(None)  # compiles
        train(saving)
        held_up.clear()
        pairs = []
        for number in range(args.pairs):
            order = (None, saving) if number % 2 else (saving, None)
            times = {save is not None: train(save) for save in order}
            pairs.append((times[True], times[False]))
        kept = manifest.read(step_folder(checkpoints.folder, checkpoints.steps()[-1]))
    device = mesh.devices.flat[0]
    print(
        f"jzero on Python {sys.version.split()[0]}, JAX {jax.__version__}, {os.cpu_count()} CPUs, "
        f"{mesh.size} x {device.device_kind}; {args.model}, stage {zero.config.stage}, "
        f"{kept.bytes / 1e6:.1f} MB a save"
    )
    for name, index in (("clock", 0), ("CPUs", 1)):
        added = [with_save[index] - without[index] for with_save, without in pairs]
        step_time = statistics.median(without[index] for _, without in pairs) / args.segment
        low, middle, high = statistics.quantiles(added, n=4, method="inclusive")
        share = 100 / (args.every * step_time)
        print(
            f"{name}: a step takes {step_time * 1e3:.1f} ms, a save adds {middle * 1e3:.0f} ms "
            f"(quartiles {low * 1e3:.0f} to {high * 1e3:.0f}, {len(pairs)} pairs): "
            f"{middle * share:.2f} % ({low * share:.2f} to {high * share:.2f}) "
            f"at a save every {args.every} steps"
        )
    print(f"save() returned after {statistics.median(held_up) * 1e3:.1f} ms (median)")


if __name__ == "__main__":
    main()
