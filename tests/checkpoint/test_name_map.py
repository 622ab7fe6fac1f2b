"""Rules that say what somebody else calls a model's leaves, read both ways."""

import json

import numpy as np
import pytest
from weights import RULES, numbers

from jzero.checkpoint.counterparts import counterparts, left_out
from jzero.checkpoint.name_map import load
from jzero.errors import JzeroError

LEAVES = {"embed": (6, 4), "layers/w": (3, 4, 8), "layers/norm": (3, 4), "heads/0/w": (4, 2, 2)}


def test_leaves_are_cut_and_turned_and_put_together_again():
    found = {tensor.names[0]: tensor for tensor in counterparts(RULES, LEAVES)}
    assert {name: tensor.their_shape for name, tensor in found.items()} == {
        "tokens.weight": (6, 4),
        **{f"layers.{n}.w": (8, 4) for n in range(3)},
        **{f"layers.{n}.norm": (4,) for n in range(3)},
        "head0": (4, 4),
    }
    assert found["tokens.weight"].names == ("tokens.weight", "head.weight")
    ours = numbers((4, 8), "float32")
    theirs = found["layers.1.w"].to_theirs(ours)
    np.testing.assert_array_equal(theirs, ours.T)
    np.testing.assert_array_equal(found["layers.1.w"].to_ours(theirs), ours)
    assert (found["layers.1.w"].leaf, found["layers.1.w"].index) == ("layers/w", (1,))
    ours = numbers((4, 2, 2), "float32")
    theirs = found["head0"].to_theirs(ours)
    np.testing.assert_array_equal(theirs, ours.reshape(4, 4).T)
    np.testing.assert_array_equal(found["head0"].to_ours(theirs), ours)


def test_an_order_of_three_dimensions_turns_back():
    rule = {"ours": "k", "theirs": "k", "transpose": [2, 0, 1]}
    [tensor] = counterparts([rule], {"k": (2, 3, 4)})
    ours = numbers((2, 3, 4), "float32")
    assert tensor.to_theirs(ours).shape == tensor.their_shape == (4, 2, 3)
    np.testing.assert_array_equal(tensor.to_ours(tensor.to_theirs(ours)), ours)


def test_without_a_map_names_and_shapes_are_jzeros_own():
    assert [(x.names, x.their_shape) for x in counterparts(None, LEAVES)] == [
        ((leaf,), shape) for leaf, shape in LEAVES.items()
    ]


def test_experts_of_layers_are_counted_by_two_words():
    rule = {"ours": "w", "theirs": "layers.{layer}.experts.{expert}.w", "transpose": True}
    found = counterparts([rule], {"w": (2, 3, 4, 5)})
    assert [p.names[0] for p in found][::5] == ["layers.0.experts.0.w", "layers.1.experts.2.w"]
    assert {p.their_shape for p in found} == {(5, 4)}


def test_leaves_and_tensors_can_be_left_out():
    without = [*RULES[1:], {"ours": "embed", "theirs": None}]
    assert "embed" not in {tensor.leaf for tensor in counterparts(without, LEAVES)}
    names = ["layers.2.inv_freq", "layers.x.inv_freq", "layers.2.w"]
    assert left_out(RULES, LEAVES, names) == {"layers.2.inv_freq"}


@pytest.mark.parametrize(
    "rules, message",
    [
        (RULES[1:], "no rule for embed; to leave a leaf out give it null as `theirs`"),
        (
            [*RULES, {"ours": "bias", "theirs": "bias"}],
            "'bias' is not a leaf; there are embed, layers/w, layers/norm, heads/0/w",
        ),
        ([*RULES, {"ours": "embed", "theirs": "e"}], "two rules are for the leaf 'embed'"),
        (
            [{"ours": "embed", "theirs": "layers.1.norm"}, *RULES[1:]],
            "'layers.1.norm' is given twice, for 'embed' and 'layers/norm'",
        ),
        (
            [{**RULES[0], "reshape": [5, 5]}, *RULES[1:]],
            r"embed: \[6, 4\] cannot be reshaped to \[5, 5\]",
        ),
        (
            [{**RULES[0], "transpose": [0, 2]}, *RULES[1:]],
            r"embed: transpose \[0, 2\] is no order of the dimensions of \[6, 4\]",
        ),
        (
            [*RULES[:2], {**RULES[2], "transpose": True}, *RULES[3:]],
            r"layers/norm: \[4\] has no two dimensions to swap",
        ),
        (
            [{"ours": "embed", "theirs": "a.{b}.{c}.{d}"}, *RULES[1:]],
            r"embed has shape \[6, 4\]: no leading dimension for each of b, c, d",
        ),
        ([{"ours": "embed"}], "rule 1 is .*; give ours and theirs"),
        ([{**RULES[0], "permute": True}], "rule 1 is .*; give ours and theirs"),
        ([{"ours": 1, "theirs": "x"}], "rule 1: ours is a name or null"),
        *(
            ([{"ours": "embed", "theirs": theirs}], "rule 1: ours is a name or null, theirs a name")
            for theirs in (5, 0, True, False, {"a": 1}, ["a", 5], [], ["a", None])
        ),
        ([{"ours": None, "theirs": None}], "rule 1: neither ours nor theirs is named"),
        ([{**RULES[0], "transpose": "yes"}], "rule 1: transpose is true, or the order"),
        ([{**RULES[0], "reshape": [-1, 4]}], "rule 1: reshape is a shape"),
        ([{"ours": "layers/{n}/w", "theirs": "w"}], "rule 1: 'layers/{n}/w' has words in braces"),
        ([{"ours": "e", "theirs": ["a.{n}", "b"]}], "rule 1: names that are tied have the same"),
        ({"embed": "tokens"}, "name map: dict; give a list of rules"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(rules, message):
    with pytest.raises(JzeroError, match=message):
        counterparts(rules, LEAVES)


def test_a_map_from_a_file(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(RULES))
    assert counterparts(load(str(tmp_path / "map.json")), LEAVES) == counterparts(RULES, LEAVES)
    (tmp_path / "names.py").write_text(
        "def rules(leaves):\n"
        "    return [{'ours': leaf, 'theirs': leaf.upper()} for leaf in leaves]\n"
        "def broken(leaves):\n"
        "    raise KeyError('embed')\n"
    )
    found = counterparts(load(f"{tmp_path}/names.py:rules"), LEAVES)
    assert [tensor.names for tensor in found] == [(leaf.upper(),) for leaf in LEAVES]
    with pytest.raises(JzeroError, match="names.py:broken raised KeyError: 'embed'"):
        counterparts(load(f"{tmp_path}/names.py:broken"), LEAVES)
    with pytest.raises(JzeroError, match="names.py has no function 'other'"):
        load(f"{tmp_path}/names.py:other")
    with pytest.raises(JzeroError, match="no such file: .*none.json"):
        load(f"{tmp_path}/none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(JzeroError, match="folder.json: Is a directory; give a file"):
        load(f"{tmp_path}/folder.json")
    (tmp_path / "null.json").write_text("null")  # which is no map, and not none
    with pytest.raises(JzeroError, match="NoneType; give a list of rules"):
        load(f"{tmp_path}/null.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(JzeroError, match="bad.json: is not JSON"):
        load(f"{tmp_path}/bad.json")
