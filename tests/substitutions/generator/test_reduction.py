from dataclasses import replace
from itertools import permutations

from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.generator.canonical import ROOTS
from shardwright.substitutions.generator.groundterms import GroundType, Terms
from shardwright.substitutions.generator.reduction import implications
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.terms import Dims, parse_term

X, XY = {"x": "*b"}, {"x": "*b", "y": "*b"}
NEG = equation("neg_of_neg", X, "neg(neg(x))", "x")
SUB = equation("sub_as_add", XY, "sub(x, y)", "add(x, neg(y))")
COMMUTES = equation("add_commutes", XY, "add(x, y)", "add(y, x)")


def test_rules_are_implied_by_smaller_ones() -> None:
    minus = equation("sub_of_neg", XY, "sub(x, neg(y))", "add(x, y)")
    turned = equation("turned", XY, "add(neg(y), x)", "sub(x, y)")
    found = implications([minus, turned, SUB, NEG, COMMUTES])
    assert found == {
        "neg_of_neg": (), "add_commutes": (), "sub_as_add": (),
        "sub_of_neg": ("neg_of_neg", "sub_as_add"), "turned": ("add_commutes", "sub_as_add"),
    }  # fmt: skip


def test_rules_about_more_tensors_imply_those_about_fewer() -> None:
    rows = equation("rows", {"x": "m i", "y": "m i"}, "add(x, y)", "add(y, x)")
    assert implications([rows, COMMUTES]) == {"add_commutes": (), "rows": ("add_commutes",)}
    assert implications([rows])["rows"] == ()
    numbers = equation("a_number", {"x": "", "y": ""}, "add(x, y)", "add(y, x)")
    assert implications([numbers, COMMUTES]) == {"add_commutes": (), "a_number": ("add_commutes",)}


def test_a_rule_is_not_implied_by_one_about_other_dims() -> None:
    bias = equation("bias", {"x": "*b i", "c": "i"}, "add(x, c)", "add(c, x)")
    assert implications([bias, COMMUTES]) == {"add_commutes": (), "bias": ()}


def test_sizes_that_happen_to_be_equal_imply_nothing() -> None:
    small = equation("small", {"x": "i j"}, "sum(x, dims=(0,), keepdim=False)", "sum(x, dims=(0,), keepdim=False)")
    pieces = equation("first", {"x": "i", "y": "j"}, "slice(concat(x, y, dim=0), dim=0, start=0, step=1, stop=i)", "x")
    longer = equation("longer", {"x": "i", "y": "j"},
                      "neg(slice(concat(x, y, dim=0), dim=0, start=0, step=1, stop=i))", "neg(x)")  # fmt: skip
    other = equation("other", {"x": "i", "y": "j"},
                     "neg(slice(concat(x, y, dim=0), dim=0, start=0, step=1, stop=j))", "neg(x)")  # fmt: skip
    found = implications([pieces, longer, other, small])
    assert found["longer"] == ("first",)
    assert found["other"] == ()


def placed(name: str, left: str, right: str, layout: str, *guard: str) -> Equation:
    return equation(name, {"x": "m i"}, left, right, guard=guard, axes=("a",), layouts={"x": [layout]})


def test_placement_rules_are_implied_where_types_agree() -> None:
    guard = "m % a == 0"
    relu = placed("relu", "relu(combine(x, axis=a))", "combine(relu(x), axis=a)", "S(0)", guard)
    twice = placed("twice", "relu(relu(combine(x, axis=a)))", "combine(relu(x), axis=a)", "S(0)", guard)
    idempotent = equation("idempotent", X, "relu(relu(x))", "relu(x)")
    found = implications([twice, relu, idempotent])
    assert found == {"idempotent": (), "relu": (), "twice": ("idempotent", "relu")}
    columns = placed("columns", "relu(relu(combine(x, axis=a)))", "combine(relu(x), axis=a)", "S(1)", "i % a == 0")
    assert implications([columns, relu, idempotent])["columns"] == ()  # `relu` is about rows


def test_a_rule_needs_the_guards_of_what_implies_it() -> None:
    detour = placed("detour", "combine(partition(x, axis=a, dim=0), axis=a)", "x", "R", "m % a == 0")
    granted = placed("granted", "relu(combine(partition(x, axis=a, dim=0), axis=a))", "relu(x)", "R", "m % a == 0")
    other = placed("other", "relu(combine(partition(x, axis=a, dim=0), axis=a))", "relu(x)", "R", "i % a == 0")
    found = implications([detour, granted, other])
    assert found["granted"] == ("detour",)
    assert found["other"] == ()


def test_rules_with_several_roots_are_implied_with_the_help_of_another_one() -> None:
    fused = CATALOGUE["fuse_two_linears"]
    narrow = replace(fused, name="narrow", variables=tuple(
        (name, Dims.parse(text)) for name, text in (("x", "m i"), ("v", "o i"), ("w", "p i"))
    ), right=tuple(parse_term(str(root).replace("len(b)", "1")) for root in fused.right))  # fmt: skip
    assert implications([narrow, fused]) == {"fuse_two_linears": (), "narrow": ("fuse_two_linears",)}
    negated = replace(fused, name="negated", left=(fused.left[0], parse_term("linear(x, neg(neg(w)))")))
    assert implications([fused, negated, NEG])["negated"] == ("fuse_two_linears", "neg_of_neg")
    assert implications([fused, negated])["negated"] == ()


def test_rules_of_one_root_alone_do_not_imply_what_replaces_several() -> None:
    """`linear; linear` holds no concatenation that they would rewrite."""
    both = equation("both", XY, "neg(neg(x)); sub(x, y)", "x; add(x, neg(y))")
    assert implications([both, NEG, SUB])["both"] == ()
    single = ("concat_of_linears", "slice_of_linear", "first_rows_of_concat", "last_rows_of_concat",
              "first_slice_of_concat", "last_slice_of_concat", "fuse_two_linears")  # fmt: skip
    assert implications([CATALOGUE[name] for name in single])["fuse_two_linears"] == ()


def test_the_types_of_several_roots_are_told_apart() -> None:
    terms = Terms()
    kinds = [GroundType(shape, ()) for shape in ((2, 3), (3, 2), (2,), (3, 3, 2))]
    numbers = [terms.variable(f"x{i}", kind) for i, kind in enumerate(kinds)]
    made = [terms.apply(ROOTS, (), pair) for pair in permutations(numbers, 2)]
    assert len({terms.types[number] for number in made if number is not None}) == len(made)


def test_rules_with_parameters_are_kept() -> None:
    rules = [rule for rule in CATALOGUE.values() if rule.parameters]
    assert rules
    assert implications([*rules, NEG]) == dict.fromkeys(["neg_of_neg", *(rule.name for rule in rules)], ())
