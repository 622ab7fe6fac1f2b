"""What is said of a run: before it, what it keeps on each device; after it, what it reached."""

import argparse
import math
from typing import Any

import jax
import numpy as np
from data import Corpus, held_out_batches
from model import PRESETS, LMConfig, loss_fn
from record import Record, finite, hbm_table
from rich.console import Console
from rich.text import Text
from sample import generate

import jzero
from jzero.birth import born
from jzero.explain import stage_table
from jzero.measure import real_bytes

SAMPLE_TOKENS = 96
SMALL_STATE = 64 << 20
"""Bytes per device up to which the other stages' states are made and measured."""


def describe(name: str, zero: jzero.Zero, corpus: Corpus, out: Console) -> None:
    """What is about to be trained, and what each device keeps."""
    explanation, batch = zero.explain(), zero.batch
    out.print(
        f"\n{name}: {count_parameters(zero):,} parameters, stage {zero.config.stage}, "
        f"{zero.mesh.data_size} devices, {zero.config.compute_dtype}, {batch.train} rows of "
        f"{PRESETS[name].context} tokens a step in {batch.accumulation} micro-batches"
    )
    kept = ", ".join(f"{kind} {count:,}" for kind, count in explanation.bytes_per_device.items())
    out.print(f"Bytes on each device: {kept}; {explanation.sharded_share:.2%} of all are sharded")
    out.print(
        f"Corpus: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out\n"
    )


def report(
    args: argparse.Namespace,
    zero: jzero.Zero,
    state: jzero.State,
    record: Record,
    corpus: Corpus,
    seconds: float,
    out: Console,
) -> dict[str, Any]:
    """Evaluates what was trained, prints it, and gives what `summary.json` holds."""
    size, stage = PRESETS[args.model], zero.config.stage
    nats = validate(zero, state, corpus, size)
    reached, unigram = corpus.bits_per_byte(nats), corpus.unigram_bits_per_byte()
    table, measured = stage_table(zero.setup, zero.batch.accumulation), measure_stages(zero, state)
    skipped = int(state.skipped)
    out.print(f"\n{args.steps} steps in {seconds:.0f} s, {skipped} of them skipped")
    out.print(f"Held-out loss {nats:.4f} nats per token = {reached:.4f} bits per byte of text")
    below = 1 - reached / unigram
    out.print(f"Unigram entropy {unigram:.4f} bits per byte; the model is {below:.1%} below it\n")
    out.print(hbm_table(table, measured, stage))
    text = continuation(zero, state, corpus, size)
    out.print(Text(f"\nA sample of the model's text:\n\n{text}\n"), soft_wrap=True)
    return {
        "parameters": count_parameters(zero),
        "stage": stage,
        "devices": zero.mesh.data_size,
        "steps": args.steps,
        "train_loss": record.loss,
        "validation_loss": finite(nats),
        "bits_per_byte": finite(reached),
        "unigram_bits_per_byte": unigram,
        "bytes_per_device": measured[stage],
        "model": args.model,
        "seconds": seconds,
        "compile_seconds": record.compile_seconds,
        "skipped_steps": skipped,
        "stages": [row | {"measured": measured.get(row["stage"])} for row in table],
    }


def count_parameters(zero: jzero.Zero) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(zero.setup.params))


def validate(zero: jzero.Zero, state: jzero.State, corpus: Corpus, size: LMConfig) -> float:
    """The mean loss over the held-out tokens, in nats; every token counts once."""
    evaluate = zero.eval_step(loss_fn)
    rows = (zero.batch.micro or 1) * zero.mesh.data_size
    batches = held_out_batches(corpus, size.context, rows, jax.process_index(), jax.process_count())
    total = 0.0
    for index, batch in enumerate(zero.batches(batches)):
        predicted = min(rows * size.context, corpus.held_out_tokens - index * rows * size.context)
        total += float(evaluate(state, batch)["loss"]) * predicted
    return total / corpus.held_out_tokens


def continuation(zero: jzero.Zero, state: jzero.State, corpus: Corpus, size: LMConfig) -> str:
    """A document that the model begins by itself."""

    @jax.jit
    def draw(state: jzero.State) -> jax.Array:
        prompt = jax.numpy.zeros((1, 1), jax.numpy.int32)  # token 0 comes before each document
        key = jax.random.key(0)
        return generate(zero.model(state), prompt, SAMPLE_TOKENS, key, context=size.context)

    return corpus.tokenizer.decode(np.asarray(draw(state))[0].tolist())


def measure_stages(zero: jzero.Zero, state: jzero.State) -> dict[int, dict[str, int]]:
    """Bytes per device from the arrays that are there: of this stage, and of all if they fit."""
    running, setup = zero.config.stage, zero.setup
    found = {running: real_bytes(state)}
    if max(row["state"] for row in stage_table(setup)) <= SMALL_STATE:
        for stage in {0, 1, 2, 3} - {running}:
            at = setup.at_stage(stage)
            other = born(at.model, at.update, at.scaling, 0, at.abstract_state())
            found[stage] = real_bytes(other)
    return found
