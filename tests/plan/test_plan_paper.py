"""The closed form against the ZeRO paper's own figures (arXiv 1910.02054), cell by cell."""

import pytest

from jzero.errors import JzeroError
from jzero.plan import closed_form, comm_elements

# Table 1: GB per device; stages 1, 2 and 3 for 7.5B, 128B and 1T. Exact: the paper truncates.
TABLE_1 = {
    1: [120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000],
    4: [52.5, 41.25, 30, 896, 704, 512, 7000, 5500, 4000],
    16: [35.625, 21.5625, 7.5, 608, 368, 128, 4750, 2875, 1000],
    64: [31.40625, 16.640625, 1.875, 536, 284, 32, 4187.5, 2218.75, 250],
    256: [30.3515625, 15.41015625, 0.46875, 518, 263, 8, 4046.875, 2054.6875, 62.5],
    1024: [
        30.087890625,
        15.1025390625,
        0.1171875,
        513.5,
        257.75,
        2,
        4011.71875,
        2013.671875,
        15.625,
    ],
}
# As printed in the paper.
PRINTED = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}
SIZES = (7_500_000_000, 128 * 10**9, 10**12)


def table_row(devices):
    return [row.total_bytes / 1e9 for size in SIZES for row in closed_form(size, devices)[1:]]


@pytest.mark.parametrize("devices", TABLE_1)
def test_every_cell_of_table_1(devices):
    # A share is rounded up to whole bytes.
    assert table_row(devices) == pytest.approx(TABLE_1[devices], abs=2e-9)


@pytest.mark.parametrize("devices", PRINTED)
def test_table_1_as_printed(devices):
    for cell, value in zip(PRINTED[devices].split(), table_row(devices), strict=True):
        # Rounded to the digits shown, or, for large ones, truncated.
        places = len(cell.partition(".")[2])
        assert (
            float(cell) in (round(value, places), int(value))
            or abs(float(cell) - value) <= 0.5 * 10**-places
        )


def test_figure_1():
    found = [row.total_bytes / 1e9 for row in closed_form(7_500_000_000, 64)]
    assert found == [120, 31.40625, 16.640625, 1.875]


def test_the_headline_13b_on_8_devices():
    rows = closed_form(13 * 10**9, 8)
    assert [row.total_bytes / 1e9 for row in rows] == [208, 71.5, 48.75, 26]
    assert [row.comm_elements / 13e9 for row in rows] == [2, 2, 2, 3]


def test_parts_of_the_headline():
    parts = [
        (row.params_bytes, row.gradients_bytes, row.optimizer_bytes)
        for row in closed_form(13 * 10**9, 8)
    ]
    gb = [tuple(n / 1e9 for n in part) for part in parts]
    assert gb == [(26, 26, 156), (26, 26, 19.5), (26, 3.25, 19.5), (3.25, 3.25, 19.5)]


@pytest.mark.parametrize(
    "accumulate, times", [(1, [2, 2, 2, 3]), (4, [2, 2, 5, 12]), (8, [2, 2, 9, 24])]
)
def test_traffic_by_micro_batches(accumulate, times):
    found = [comm_elements(stage, 1000, 8, accumulate) for stage in range(4)]
    assert found == [1000 * n for n in times]


def test_one_device_sends_nothing():
    assert [row.comm_elements for row in closed_form(1000, 1, accumulate=4)] == [0, 0, 0, 0]


def test_several_micro_batches_are_summed_in_the_accumulation_dtype():
    assert [row.gradients_bytes for row in closed_form(800, 8)] == [1600, 1600, 200, 200]
    rows = closed_form(800, 8, accumulate=2)
    assert [row.gradients_bytes for row in rows] == [3200, 3200, 400, 400]
    rows = closed_form(800, 8, accumulate=2, grad_accum_dtype="bf16")
    assert [row.gradients_bytes for row in rows] == [1600, 1600, 200, 200]


def test_fp32_has_no_separate_master():
    first = closed_form(800, 8, dtype="fp32")[0]
    assert (first.params_bytes, first.gradients_bytes, first.optimizer_bytes) == (3200, 3200, 6400)


def test_other_optimizers():
    assert [row.optimizer_bytes for row in closed_form(800, 8, optimizer_bytes=0)] == [
        3200,
        400,
        400,
        400,
    ]


def test_shares_are_whole_bytes_rounded_up():
    last = closed_form(1, 8)[3]
    assert (last.params_bytes, last.gradients_bytes, last.optimizer_bytes) == (1, 1, 2)


def test_offload_moves_bytes_to_the_host():
    whole, moved = closed_form(800, 8), closed_form(800, 8, offload=["optimizer", "params"])
    assert [row.host_bytes for row in moved] == [9600, 1200, 1200, 1400]
    for before, after in zip(whole, moved, strict=True):
        assert after.total_bytes + after.host_bytes == before.total_bytes


def test_unknown_names_are_refused():
    with pytest.raises(JzeroError, match="dtype 'int8'; allowed: fp32, bf16, fp16"):
        closed_form(1, 1, dtype="int8")
    with pytest.raises(JzeroError, match="offload 'nvme'; allowed: optimizer, params"):
        closed_form(1, 1, offload=["nvme"])
