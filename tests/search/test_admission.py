"""What plan files may say of operators: all that captured graphs say."""

from __future__ import annotations

from shardwright.pcg.node import Node, make_attrs
from shardwright.pcg.optable import ROWS
from shardwright.search.admission import ATTRIBUTE_KINDS, wrong_attribute
from tests.samples import SAMPLES


def test_every_sample_of_every_row_is_admitted_and_needs_its_attributes() -> None:
    for op, samples in SAMPLES.items():
        for sample in samples:
            attrs = make_attrs(**sample.attrs)
            node = Node("y", op, ("x",), attrs)
            assert wrong_attribute(node) == "", (op, attrs)
            for key, _ in attrs:
                rest = tuple((k, v) for k, v in attrs if k != key)
                if f"{{{key}" in ROWS[op].torch and key != "offset":
                    assert f"{key!r} is missing" in wrong_attribute(Node("y", op, ("x",), rest)), (op, key)
                odd = Node("y", op, ("x",), (*rest, (key, ("odd", None))))
                assert key not in ATTRIBUTE_KINDS or f"attribute {key!r}: expected " in wrong_attribute(odd), (op, key)


def test_values_at_the_edge_are_admitted() -> None:
    for value in (-(2**63), 2**64 - 1, float("-inf"), True, 0.5):
        attrs = make_attrs(shape=(4,), value=value, dtype="int64")
        assert wrong_attribute(Node("m", "full", (), attrs)) == ""
    twice = Node("m", "full", (), (*make_attrs(shape=(4,), value=1, dtype="int64"), ("value", 2)))
    assert wrong_attribute(twice) == "an attribute is given twice"
