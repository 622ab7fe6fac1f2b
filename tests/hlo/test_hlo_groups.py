"""Replica groups in every form that XLA writes, and the mesh axes that they are."""

import pytest

from jzero.hlo.groups import axes_of_groups, axes_of_pairs, groups, pairs

MESH = {"data": 4, "tensor": 2}
OVER_DATA = ((0, 2, 4, 6), (1, 3, 5, 7))
OVER_TENSOR = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", OVER_DATA),
        ("{{0,1},{2,3},{4,5},{6,7}}", OVER_TENSOR),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", OVER_TENSOR),
        ("[2,4]<=[4,2]T(1,0)", OVER_DATA),
        ("mesh['data'=4,'tensor'=2] {'data'}", OVER_DATA),
        ("mesh['data'=4,'tensor'=2] {'tensor'}", OVER_TENSOR),
        ("mesh['data'=4,'tensor'=2] {'data','tensor'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", OVER_DATA),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", OVER_DATA),
        ("mesh['all'=8] {'all':(4)2}", OVER_TENSOR),
        ("mesh['all'=8] {'all':(1)4}", OVER_DATA),
        ("mesh['all'=8] {'all':(1)2,'all':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_groups_are_read_in_every_form(text: str, expected: tuple[tuple[int, ...], ...]):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}"
    assert groups(attributes, 8) == expected


def test_no_groups_is_none():
    assert groups(", channel_id=1, dimensions={0}", 8) is None
    assert pairs(", channel_id=1") is None


@pytest.mark.parametrize(
    ("found", "axes"),
    [
        (OVER_DATA, ("data",)),
        (OVER_TENSOR, ("tensor",)),
        (((7, 5, 3, 1), (0, 2, 4, 6)), ("data",)),
        ((tuple(range(8)),), ("data", "tensor")),
        (tuple((device,) for device in range(8)), ()),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("unknown",)),
        (((0, 2, 4, 6),), ("unknown",)),
    ],
)
def test_axes_are_recognised_by_their_groups(
    found: tuple[tuple[int, ...], ...], axes: tuple[str, ...]
):
    assert axes_of_groups(found, MESH) == axes


def test_axes_of_size_one_are_never_named():
    assert axes_of_groups(((0, 1, 2, 3),), {"replica": 1, "data": 4, "tensor": 1}) == ("data",)


def test_three_axes_at_a_thousand_devices():
    found = groups(", replica_groups=mesh['r'=4,'d'=32,'t'=8] {'r','d'}", 1024)
    assert found is not None
    assert axes_of_groups(found, {"replica": 4, "data": 32, "tensor": 8}) == ("replica", "data")


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,2},{2,4},{4,6},{6,0}}", ("data",)),
        ("{{0,1},{1,0}}", ("tensor",)),
        ("{{0,1},{1,2}}", ("data", "tensor")),
        ("{{0,0},{1,1}}", ()),
        ("{{0,9}}", ("unknown",)),
    ],
)
def test_a_permute_runs_over_the_axes_in_which_its_pairs_differ(text: str, axes: tuple[str, ...]):
    found = pairs(f", source_target_pairs={text}")
    assert found is not None
    assert axes_of_pairs(found, MESH) == axes
