"""The parts of a peak: from a program written by hand, and from steps compiled for a GPU."""

import functools
from dataclasses import replace

import numpy as np
import optax
import pytest
from factories import HIDDEN, LAYERS, LENGTH, PARAMETERS, WIDTH, small
from jax.sharding import Mesh

import jzero
from jzero import hlo, targets
from jzero.compare.split import PARTS, peak_split
from jzero.errors import JzeroError
from jzero.explain import explain
from jzero.hlo.buffers import Allocation, Buffer, Buffers, Event, Value, compile_with_buffers
from jzero.hlo.flow import Flow
from jzero.hlo.memory import Memory
from jzero.hlo.peak import peak
from jzero.hlo.text import parse

LAYER = 2 * WIDTH * HIDDEN  # elements

PROGRAM = r"""HloModule step

%summed (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b), metadata={op_name="zero_reduce_scatter/w/reduce_scatter"}
}

%scale (whole: bf16[8,8]) -> bf16[8,8] {
  %whole_in = bf16[8,8] parameter(0)
  %moved_in = bf16[8,8] transpose(%whole_in), dimensions={1,0}
  ROOT %moved_out = bf16[8,8] copy(%moved_in)
}

%more (carried: (bf16[8,8], bf16[8,8])) -> pred[] {
  %carried_there = (bf16[8,8], bf16[8,8]) parameter(0)
  ROOT %go = pred[] constant(true)
}

%layer (carried: (bf16[8,8], bf16[8,8])) -> (bf16[8,8], bf16[8,8]) {
  %carried = (bf16[8,8], bf16[8,8]) parameter(0)
  %left = bf16[8,8] get-tuple-element(%carried), index=0
  %right = bf16[8,8] get-tuple-element(%carried), index=1
  %step = bf16[8,8] dot(%left, %left), metadata={op_name="jit(f)/jvp()/while/body/dot_general"}
  %stacked = bf16[8,8] dynamic-update-slice(%right, %step)
  ROOT %next = (bf16[8,8], bf16[8,8]) tuple(%step, %stacked)
}

ENTRY %main (p0: f32[1,8]) -> f32[1,8] {
  %master = f32[1,8] parameter(0), metadata={op_name="state.master[\'w\']"}
  %weight = bf16[8,8] parameter(1), metadata={op_name="state.params[\'v\']"}
  %moment = f32[1,8] parameter(2), metadata={op_name="state.opt_state[0].mu[\'w\']"}
  %rows = bf16[8,8] parameter(3), metadata={op_name="batch[\'x\']"}
  %cast = bf16[1,8] convert(%master), metadata={op_name="jvp(zero_read/w)/convert_element_type"}
  %whole = bf16[8,8] all-gather(%cast), metadata={op_name="jvp(zero_read/w)/zero_gather/all_gather"}
  %turned = bf16[8,8] fusion(%whole), kind=kLoop, calls=%scale
  %cut = bf16[4,8] slice(%weight), slice={[0:4], [0:8]}
  %zeros = bf16[8,8] broadcast(), metadata={op_name="jit(f)/broadcast_in_dim"}
  %begin = (bf16[8,8], bf16[8,8]) tuple(%rows, %zeros)
  %forward = (bf16[8,8], bf16[8,8]) while(%begin), condition=%more, body=%layer
  %saved = bf16[8,8] get-tuple-element(%forward), index=1
  %again = bf16[8,8] tanh(%saved), metadata={op_name="transpose(jvp())/rematted_computation/tanh"}
  %back = bf16[8,8] multiply(%again, %again), metadata={op_name="transpose(jvp())/mul"}
  %one = bf16[8,8] dot(%saved, %back), metadata={op_name="transpose(jvp())/dot_general"}
  %blank = bf16[8,8] broadcast(), metadata={op_name="transpose(jvp())/broadcast_in_dim"}
  %two = bf16[8,8] scatter(%blank, %rows, %back), metadata={op_name="transpose(jvp())/scatter-add"}
  %both = bf16[8,8] add(%one, %two), metadata={op_name="transpose(jvp())/add_any"}
  %laid = bf16[8,8] copy(%both)
  %shard = bf16[1,8] reduce-scatter(%laid), dimensions={0}, to_apply=%summed
  %wide = f32[1,8] convert(%shard), metadata={op_name="zero_norm/convert_element_type"}
  %kept = f32[1,8] copy(%moment)
  %new = f32[1,8] add(%wide, %kept), metadata={op_name="jit(f)/zero_update/add"}
  %sent = bf16[8,8] all-gather(%new), metadata={op_name="zero_update/zero_gather_updated/v/gather"}
  ROOT %out = f32[1,8] select(%new, %new, %master), metadata={op_name="zero_update/select_n"}
}
"""

FLOW = Flow(parse(PROGRAM))

WANT = {
    "gathered": ["cast", "whole", "turned", "cut", "sent"],
    "activations": ["forward 1", "saved", "again"],
    "gradients": ["one", "blank", "two", "both", "laid", "shard", "wide"],
    "temporaries": ["zeros", "back", "kept", "new", "out"],
}


def written(names: list[str]) -> tuple[Buffers, Memory]:
    """The program by hand, at a moment when all these arrays are there, the n-th of 2^n bytes."""
    found, events = {}, []
    for number, name in enumerate(names):
        instruction, _, element = name.partition(" ")
        found[number] = Buffer(2**number, 0, Value("main", instruction, int(element or 0)))
        events.append(Event(0, number, 0))
    held = tuple(Allocation(10**9 * 10**n, 0, argument=n, held=True) for n in range(4))
    heap = Allocation(2 ** len(names), 0, argument=None, held=False)
    used = sum(each.bytes for each in held) + 2 ** len(names) - 1
    return Buffers(found, (*held, heap), (tuple(events),)), Memory(0, 0, 0, 0, used, 0)


def test_where_each_value_came_from():
    names = [name for part in WANT.values() for name in part]
    buffers, used = written(names)
    found = peak_split(peak(buffers), FLOW, used)
    assert found is not None
    assert (found["optimizer"], found["parameters"]) == (101 * 10**9, 10**10)
    found["temporaries"] -= 10**12  # the batch
    for part, values in WANT.items():
        want = {name for number, name in enumerate(names) if found[part] >> number & 1}
        assert want == set(values), part


def test_holes_in_the_heap_are_temporaries():
    buffers, used = written(["whole", "back"])
    more = replace(used, peak_bytes=used.peak_bytes + 1)
    first, second = (peak_split(peak(buffers), FLOW, each) for each in (used, more))
    assert first is not None and second == first | {"temporaries": first["temporaries"] + 1}


def test_what_does_not_add_up_is_unknown():
    buffers, used = written(["whole", "back"])
    for wrong in (used.peak_bytes - 1, used.peak_bytes + 2):
        assert peak_split(peak(buffers), FLOW, replace(used, peak_bytes=wrong)) is None
    assert peak_split(peak(written(["stranger"])[0]), FLOW, used) is None
    nameless = PROGRAM.replace(r', metadata={op_name="state.params[\'v\']"}', "")
    assert peak_split(peak(buffers), Flow(parse(nameless)), used) is None, (
        "what the argument is, nothing tells"
    )


@functools.cache
def split(target: str, stage: int, accumulation: int = 1) -> tuple[dict[str, int], Memory]:
    """Of a step of the small stack, and what each device keeps."""
    try:
        devices = np.array(targets.devices(targets.parse(target)))
    except JzeroError as error:
        pytest.skip(str(error))
    workload = small()
    zero = jzero.Zero(
        stage=stage, precision="bf16", accumulation=accumulation, mesh=Mesh(devices, ("data",))
    )
    zero.setup_for(workload.init, optax.adamw(1e-3))
    lowered = zero.train_step(workload.loss_fn).lower(workload.batch(8 * accumulation))
    compiled, buffers = compile_with_buffers(lowered)
    used = hlo.memory(compiled)
    found = peak_split(peak(buffers), Flow(parse(compiled)), used)
    assert found is not None and tuple(found) == PARTS
    assert sum(found.values()) == used.peak_bytes
    setup = zero.setup
    kept = explain(setup.layout, setup.abstract_state(), accumulation=accumulation)
    state = kept.bytes_per_device
    assert found["parameters"] == state["params"]
    assert found["optimizer"] == state["master"] + state["optimizer"]
    return found, used


@pytest.mark.slow
def test_gradients_whole_and_accumulated():
    found, _ = split("h100:8", stage=1, accumulation=2)
    # fp32 sums, and one micro-batch's in bf16; up to a layer's more as they are made.
    assert 5.9 * PARAMETERS < found["gradients"] < 6 * PARAMETERS + 2 * 2 * LAYER
    assert found["gathered"] < 2 * 2 * LAYER, "slices of the whole parameters"


@pytest.mark.slow
def test_gradients_and_parameters_sharded():
    found, _ = split("h100:8", stage=3)
    shards = 2 * PARAMETERS / 8
    assert shards < found["gradients"] < shards + 3 * 2 * LAYER
    assert LAYER <= found["gathered"] < 3 * 2 * LAYER, "of a layer or two"
    inputs = 2 * LAYERS * LENGTH * WIDTH
    assert inputs <= found["activations"] < 3 * inputs


def test_the_compiler_for_cpus_keeps_a_record_too():
    found, used = split("cpu:8", stage=2)
    assert used.temp_bytes > found["gradients"] > 0
    assert found["gradients"] + found["gathered"] + found["activations"] <= used.temp_bytes
