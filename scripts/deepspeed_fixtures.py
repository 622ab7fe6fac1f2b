"""Trains a small model with DeepSpeed itself and keeps its checkpoints, to test their import.

Development only: in an environment of its own, with deepspeed 0.19.8 and a CPU build of torch,

    DS_ACCELERATOR=cpu python scripts/deepspeed_fixtures.py OUT [CASE ...]

writes for each case OUT/CASE/step4, the checkpoint of step 4 as DeepSpeed left it; for some also
OUT/CASE/universal, what DeepSpeed's own converter makes of it; and OUT/CASE/expected.npz, the
weights and moments then and after three more steps, with the batches and losses. All of it goes
into OUT.tar.xz: tests/checkpoint/deepspeed/files.tar.xz is one. CPU, gloo, one process a rank.
"""

import argparse
import os
import shutil
import socket
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.multiprocessing
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HIDDEN, ROWS, LENGTH = 11, 6, 10, 12, 5
BEFORE, AFTER = 4, 3  # steps, before and after the checkpoint


@dataclass(frozen=True)
class Case:
    """One run: `zero` and `config` are added to DeepSpeed's configuration."""

    stage: int
    ranks: int = 2
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    universal: bool = False


CASES = {
    "stage1": Case(1, universal=True),
    "stage2": Case(2),
    "stage3": Case(3, universal=True),
    "stage1_bf16": Case(1, precision="bf16"),
    "stage2_bf16": Case(2, precision="bf16", universal=True),
    "stage3_bf16": Case(3, precision="bf16"),
    # DeepSpeed has another optimizer class for this pair, whose files differ.
    "stage1_bf16_fp32_accumulation": Case(
        1, precision="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "stage2_fp16": Case(2, precision="fp16"),
    "stage3_fp16": Case(3, precision="fp16"),
    "stage1_1_rank": Case(1, ranks=1),
    "stage2_3_ranks": Case(2, ranks=3),
    "stage3_3_ranks": Case(3, ranks=3, zero={"sub_group_size": 20}),
    "stage3_4_ranks": Case(3, ranks=4),
    # Another Adam, which DeepSpeed compiles.
    "stage2_offload": Case(2, zero={"offload_optimizer": {"device": "cpu"}}),
    "stage3_offload": Case(3, zero={"offload_optimizer": {"device": "cpu"}}),
    # The groups' order in the files is not the model's.
    "stage2_round_robin": Case(2, zero={"round_robin_gradients": True}, universal=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))


class Model(nn.Module):
    """Something of everything: layers, tied, frozen and empty parameters, biases, a buffer."""

    def __init__(self, with_empty: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(1))
        if with_empty:
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain) + self.offset


def tokens(step: int) -> np.ndarray:
    """A batch [ROWS, LENGTH + 1]: sequences that count up by their own stride, with some noise."""
    random = np.random.default_rng(step)
    rows = random.integers(0, VOCABULARY, (ROWS, 1)) + np.arange(LENGTH + 1) * (
        1 + np.arange(ROWS)[:, None] % 3
    )
    noise = random.random(rows.shape) < 0.1
    return np.where(noise, random.integers(0, VOCABULARY, rows.shape), rows % VOCABULARY)


def rate(step: int) -> float:
    """The learning rate, as a factor of 1e-2: it differs from step to step."""
    return 1.0 / (1 + 0.2 * step)


def configuration(case: Case) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    if case.precision != "fp32":
        precision[case.precision] = {"enabled": True}
    if case.precision == "fp16":  # the first step overflows at this scale
        precision["fp16"] |= {"initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    return {
        "train_micro_batch_size_per_gpu": ROWS // case.ranks,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-2,
                "weight_decay": 0.1,
                "torch_adam": "offload_optimizer" not in case.zero,
            },
        },
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            **case.zero,
        },
        **precision,
        **case.config,
    }


def train(rank: int, name: str, out: str, port: int) -> None:
    """What one process does."""
    case = CASES[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    if case.precision == "fp16":  # slow on a CPU, but the same arithmetic
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = Model(with_empty=case.stage < 3)  # stage 3 cannot gather such a parameter
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p.numel()]
    others = [p for p in model.parameters() if p.ndim < 2 or not p.numel()]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        config=configuration(case),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    )
    losses, scales, expected, skipped = [], [], {}, 0
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            expected |= snapshot(engine, "before")
            skipped = engine.skipped_steps
            engine.save_checkpoint(out, tag="step4")
        rows = ROWS // case.ranks
        mine = torch.from_numpy(tokens(step)[rank * rows : (rank + 1) * rows])
        logits = engine(mine[:, :-1])
        loss = functional.cross_entropy(
            logits.float().reshape(-1, VOCABULARY), mine[:, 1:].reshape(-1)
        )
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / case.ranks)
        scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
    expected |= snapshot(engine, "after")
    if rank == 0:
        np.savez(
            f"{out}/expected.npz",
            tokens=np.stack([tokens(step) for step in range(BEFORE + AFTER)]).astype(np.uint8),
            losses=losses,
            scales=scales,
            skipped=engine.skipped_steps - skipped,
            **expected,
        )
    torch.distributed.destroy_process_group()


def snapshot(engine: Any, when: str) -> dict[str, np.ndarray]:
    """Weights and moments in full, by DeepSpeed's own functions; every rank takes part."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Linked when the first group had been updated, and no other group had moments yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad or name == "empty":
            continue
        found[f"{when}/{name}/fp32"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{when}/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
        if engine.zero_optimization_stage() < 3:
            found[f"{when}/{name}/model"] = parameter
    return {name: x.detach().float().numpy().copy() for name, x in found.items()}


def convert(out: Path) -> None:
    """Runs DeepSpeed's converter to its universal format."""
    from deepspeed.checkpoint import ds_to_universal

    sys.argv = [
        "ds_to_universal",
        f"--input_folder={out / 'step4'}",
        f"--output_folder={out / 'universal'}",
        "--inject_missing_state",
        "--num_extract_workers=1",
        "--num_merge_workers=1",
    ]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def pack(out: Path) -> None:
    """One archive, in which what the files have in common is there once."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
        return info

    with tarfile.open(f"{out}.tar.xz", "w:xz", preset=9) as archive:
        for case in sorted(out.iterdir()):
            archive.add(case, case.name, filter=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder; OUT.tar.xz is all of it")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    for name in args.cases or CASES:
        out = args.out / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.spawn(train, (name, str(out), port), CASES[name].ranks)
        if CASES[name].universal:
            convert(out)
        for copied in out.glob("**/zero_to_*.py"):  # DeepSpeed's own scripts
            copied.unlink()
    pack(args.out)


if __name__ == "__main__":
    main()
