"""The same language model, trained by DeepSpeed: a program of its own, without JAX.

    python benchmarks/deepspeed_lm.py JOB.json WEIGHTS.npz OUT.json

Starts a process for each rank, with gloo on CPUs and NCCL on GPUs. JOB.json has the model's sizes,
`stage`, `precision`, `ranks`, `compared`, `steps` and `rounds`; WEIGHTS.npz the weights by path,
fp32, and `tokens` [rows of all ranks, T + 1]. OUT.json gets `losses`, `seconds` per step of each
round, and `peak_bytes`, null on CPUs.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.multiprocessing  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportMissingImports]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * self.scale.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, mlp = sizes["width"], sizes["mlp"]
        self.heads, self.pairs = sizes["heads"], sizes["kv_heads"]
        self.base, self.head = sizes["rope_base"], width // self.heads
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.pairs * self.head, bias=False)
        self.value = nn.Linear(width, self.pairs * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, mlp, bias=False)
        self.up = nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head // 2
        place = torch.arange(half, device=x.device, dtype=torch.float32)
        time = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = time[:, None] * self.base ** (-place / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q = self.turned(self.query(h).view(batch, length, self.heads, self.head))
        k = self.turned(self.key(h).view(batch, length, self.pairs, self.head))
        v = self.value(h).view(batch, length, self.pairs, self.head)
        repeats = self.heads // self.pairs
        q, k, v = (
            each.transpose(1, 2)
            for each in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2))
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        h = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, vocabulary = sizes["width"], sizes["vocabulary"]
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes["layers"])])
        self.norm = Norm(width)
        self.head = None if sizes["tied"] else nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x = self.norm(x)
        head = self.embed if self.head is None else self.head
        logits = functional.linear(x, head.weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def load(model: LM, weights: dict[str, np.ndarray]) -> None:
    """Copies the example's weights: kernels are transposed there, and stacked by layers."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            index, part = int(parts[1]), parts[2]
            if part.endswith("norm"):
                found = weights[f"layers/{part}/scale"][index]
            else:
                room = "mlp" if part in ("gate", "up", "down") else "attention"
                found = weights[f"layers/{room}/{part}/kernel"][index].T
        else:
            leaf = {"embed": "embed/embedding", "norm": "norm/scale", "head": "head/kernel"}[
                parts[0]
            ]
            found = weights[leaf].T if parts[0] == "head" else weights[leaf]
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(found)))


def work(rank: int, job: dict[str, Any], port: int, weights_path: str, out: str) -> None:
    ranks, on_gpu = job["ranks"], torch.cuda.is_available()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    weights = dict(np.load(weights_path))
    tokens = np.split(weights.pop("tokens"), ranks)[rank]
    model = LM(job["sizes"])
    load(model, weights)
    config = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": job["stage"]},
        "bf16": {"enabled": job["precision"] == "bf16"},
        "gradient_clipping": job["clip"],
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.from_numpy(tokens.astype(np.int64)).to(engine.device)

    def step() -> torch.Tensor:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def done() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    losses = []
    for _ in range(job["compared"]):
        loss = step()
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / ranks)
    seconds = []
    for _ in range(job["rounds"]):
        done()
        start = time.perf_counter()
        for _ in range(job["steps"]):
            step()
        done()
        seconds.append((time.perf_counter() - start) / job["steps"])
    if rank == 0:
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        found = {"losses": losses, "seconds": seconds, "peak_bytes": peak}
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    job_path, weights_path, out = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (job, port, weights_path, out)
    torch.multiprocessing.spawn(work, arguments, nprocs=job["ranks"])


if __name__ == "__main__":
    main()
