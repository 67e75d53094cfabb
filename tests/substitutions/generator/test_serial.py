from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.generator import floatlaws
from shardwright.substitutions.generator.canonical import canonical, named
from shardwright.substitutions.generator.context import SerialContext, cut, serial
from shardwright.substitutions.generator.contexts.serial import SERIAL_CONTEXTS
from shardwright.substitutions.generator.instances import instances
from shardwright.substitutions.generator.serialterms import SerialTerms
from shardwright.substitutions.generator.sources import candidates
from shardwright.substitutions.generator.symbolicdims import extent, minus, plus, size, times
from shardwright.substitutions.generator.vocabulary import VOCABULARY, Reach, SymbolicType
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.judge import judge
from tests.each import each

LINEAR = serial("t", "x: *b i, w: o i, v: o i, c", "linear add mul")
PIECES = serial("t", "x: *b n, y: *b n", "slice concat add", cuts=cut("n", "0:s", "s:n"), extents="s, n - s")
HEADS = serial("t", "x: m (h d)", "split merge neg", extents="h, d")
NOTHING = Reach({}, {}, frozenset())


def names(rules: list[Equation]) -> set[str]:
    return {rule.name for rule in rules}


def test_extents_are_sums_of_products() -> None:
    assert extent("h*d + o - o") == "d*h"
    assert plus("o", "p") == "o + p"
    assert minus("n", "s") == "n - s"
    assert plus(minus("n", "s"), "s") == "n"
    assert times("h", "2*d") == "2*d*h"
    assert size("n - s + d*h", {"n": 9, "s": 2, "h": 3, "d": 4}) == 19
    with pytest.raises(ValueError, match="not a sum of products"):
        extent("o // 2")


def test_attributes_are_written_in_the_rule_language() -> None:
    (use,) = VOCABULARY["softmax"].uses([SymbolicType(("*b", "i"))], NOTHING)
    assert str(dict(use.attrs)["dim"]) == "len(b)"
    (use,) = VOCABULARY["transpose"].uses([SymbolicType(("*b", "m", "k"))], NOTHING)
    assert str(dict(use.attrs)["dims"]) == "(*iota(len(b)), len(b) + 1, len(b))"
    assert use.result.dims == ("*b", "k", "m")
    assert not list(VOCABULARY["add"].uses([SymbolicType(("m", "i")), SymbolicType(("m",))], NOTHING))
    assert not list(VOCABULARY["add"].uses([SymbolicType(("m",), "v"), SymbolicType(("m",), "v")], NOTHING))


def test_every_operator_of_the_vocabulary_is_enumerated() -> None:
    assert {op for context in SERIAL_CONTEXTS for op in context.operators} == set(VOCABULARY)
    assert len({context.name for context in SERIAL_CONTEXTS}) == len(SERIAL_CONTEXTS)


@each("context", SERIAL_CONTEXTS, ids=lambda context: context.name)
def test_instances_differ_in_all_sizes_where_that_is_possible(context: SerialContext) -> None:
    first, second = instances(context, SerialTerms(context, 0).field, 0)
    dims = context.dimensions
    assert all(first.sizes[name] != 1 for name in dims)
    assert sum(first.sizes[name] == second.sizes[name] for name in dims) <= len(dims) // 4
    assert first.tensors.keys() == context.types.keys()


def test_instances_need_room_for_their_slices() -> None:
    context = replace(PIECES, cuts={"n": (("n", "s"),)})
    with pytest.raises(RuleError, match="context 't': no small sizes satisfy its slices"):
        list(instances(context, SerialTerms(LINEAR, 0).field, 0))


def test_rules_of_linear_are_found_and_true() -> None:
    assert "linear_by_scaled" in names(candidates(LINEAR, 2))
    rules = candidates(LINEAR, 3)
    assert {"linear_by_scaled", "linear_by_sum"} <= names(rules)
    for rule in rules[::4]:
        assert falsify_equation(rule) is None, rule.equation


def test_pieces_of_a_tensor_are_put_together() -> None:
    rules = candidates(PIECES, 3)
    assert "concat_of_slices" in names(rules)
    for rule in rules:
        assert falsify_equation(rule) is None, rule.equation


FUSED = serial("t", "x: *b i, v: o i, w: p i", "linear concat relu", extents="o + p", about="linear")


def test_terms_that_are_pieces_of_one_are_replaced_together() -> None:
    rules = candidates(FUSED, 3)
    assert "fuse_two_linears" in names(rules)
    for rule in rules:
        assert falsify_equation(rule) is None, rule.equation


def test_pieces_of_a_variable_make_no_rule() -> None:
    """x from 0 to s and from s to n are slices of x, and nothing else."""
    rules = candidates(replace(PIECES, operators=("slice", "concat")), 3)
    assert {len(rule.left) for rule in rules} == {1}


FUSIONS = {
    "outputs": "linear(x, v); linear(x, w)",
    "batch_of_linear": "linear(x, y); linear(z, y)",
    "concats_of_matmul": "matmul(x, y); matmul(x, z)",
    "softmax_of_pieces": "softmax(x, dim=len(b) + 1); softmax(y, dim=len(b) + 1)",
    "rms_norms_of_pieces": "rms_norm(x, eps=eps, normalized_dims=1); rms_norm(y, eps=eps, normalized_dims=1)",
    "embedding_pieces": "embedding(x, y, padding_idx=padding); embedding(x, z, padding_idx=padding)",
    "sdpa_concats": "sdpa(x, y, z, causal=False, scale=scale); sdpa(w, y, z, causal=False, scale=scale)",
}


@each("name", FUSIONS)
def test_operators_that_are_fused(name: str) -> None:
    (context,) = [context for context in SERIAL_CONTEXTS if context.name == name]
    rules = {"; ".join(map(str, rule.left)): rule for rule in candidates(context, 3) if len(rule.left) > 1}
    rule = rules[FUSIONS[name]]
    assert judge(rule).outcome == "certified"
    assert [str(guard) for guard in rule.guard] == (["len(b) > 0"] if name == "sdpa_concats" else [])


def test_a_reshape_and_its_inverse() -> None:
    texts = [rule.equation for rule in candidates(HEADS, 2)]
    assert "reshape(reshape(x, shape=(i, o, k)), shape=(i, k * o)) = x for x: i (o k)" in texts
    assert any(text.startswith(("neg(reshape(", "reshape(neg(")) for text in texts)


def test_equal_runs_give_equal_rules_and_counts() -> None:
    counts: list[Mapping[str, int]] = []
    first = candidates(LINEAR, 2, 5, counts.append)
    assert first == candidates(LINEAR, 2, 5)
    assert counts[-1]["candidates"] == len(first)
    assert counts[-1]["graphs"] > counts[-1]["fingerprints"] > 0


def test_shared_subterms_count_once() -> None:
    run = SerialTerms(serial("t", "x: *b", "neg relu mul"), 0)
    list(run.pairs(3))
    sizes = {len(run.pool.inside(node.number)) for node in run.pool.nodes}
    assert sizes == {0, 1, 2}
    blocks = run._level(3, last=False)  # mul(neg(x), relu(neg(x))) has three operators
    texts = [
        {run.pool.nodes[c].use.op for c in row if run.pool.nodes[c].use}
        for found in blocks.values() for block in found if block.use.op == "mul" for row in block.operands.tolist()
    ]  # fmt: skip
    assert {"neg", "relu"} in texts


def test_instances_of_smaller_rules_are_dropped() -> None:
    rules = candidates(serial("t", "x: *b, y: *b", "add relu"), 3)
    assert "add_commutes" in names(rules)
    for rule in rules:  # relu(x) + y = y + relu(x) says less than x + y = y + x
        assert "add(relu(x), y) = add(y, relu(x))" not in rule.equation
        assert "add(x, x), y) = add(add(x, y), x)" not in rule.equation


def test_rules_without_their_operator_are_left_to_other_contexts() -> None:
    rules = candidates(replace(LINEAR, about=("linear",)), 2)
    assert rules
    assert all("linear" in rule.equation for rule in rules)


def test_ranks_become_guards() -> None:
    context = serial("t", "x: *b i, w: o i", "linear matmul transpose")
    (rule,) = [r for r in candidates(context, 2) if r.name == "linear_as_matmul"]
    assert [str(g) for g in rule.guard] == ["len(b) > 0"]


def test_a_rule_that_holds_for_one_size_only_is_not_found() -> None:
    """sum_i c = 2 c where i is 2; the first sizes that were tried were all as small as possible."""
    context = serial("t", "x: *b i, c", "sum add sub")
    for rule in candidates(context, 3):
        assert falsify_equation(rule, trials=12) is None, rule.equation


# ---- canonical form ----


def test_names_and_direction_do_not_matter() -> None:
    one = equation(
        "r", {"p": "*q k", "w": "j k", "v": "j k"}, "add(linear(p, w), linear(p, v))", "linear(p, add(v, w))"
    )
    other = CATALOGUE["linear_by_sum"]
    assert canonical(one).claim == canonical(other).claim == canonical(other.converse("c")).claim
    assert named(canonical(one)).name == "linear_by_sum"


def test_rules_of_several_roots_keep_their_direction() -> None:
    fused = CATALOGUE["fuse_two_linears"]
    assert named(canonical(fused)).name == "fuse_two_linears"
    assert "concat" in str(canonical(fused.converse("c")).left[0])
    renamed = equation("r", {"y": "*c k", "r": "m k", "s": "n k"}, "linear(y, r); linear(y, s)", "; ".join(
        f"slice(linear(y, concat(r, s, dim=0)), dim=len(c), start={start}, stop={stop}, step=1)"
        for start, stop in (("0", "m"), ("m", "n + m"))
    ))  # fmt: skip
    assert named(canonical(renamed)).name == "fuse_two_linears"
    both, fused = "linear(add(x, y), v); linear(add(x, y), w)", "linear(add(x, y), concat(v, w, dim=0))"
    slices = "; ".join(f"slice({fused}, dim=1, start={a}, stop={b}, step=1)" for a, b in (("0", "o"), ("o", "o + p")))
    shared = equation("r", {"x": "m i", "y": "m i", "v": "o i", "w": "p i"}, both, slices)
    (first, second) = canonical(shared).left
    assert first.operands[0] == second.operands[0], "the sum stays one term"  # type: ignore[union-attr]
    halves = equation("r", {"x": "m n"}, "relu(neg(x)); exp(x)", "relu(neg(x)); exp(x)")
    assert named(canonical(halves)).name.startswith("relu_of_neg_and_exp_")


def test_sums_in_attributes_are_written_in_one_way() -> None:
    text = "slice(concat(x, y, dim=0), dim=0, start=i, step=1, stop={})"
    first, second = (
        equation("r", {"x": "i", "y": "j"}, text.format(stop), "y", moves=True) for stop in ("i + j", "j + i")
    )
    assert canonical(first).claim == canonical(second).claim


def test_a_rule_that_neither_side_binds_has_no_form() -> None:
    rule = equation("r", {"x": "*b n"}, "slice(x, dim=len(b), start=s, stop=t, step=1)",
                    "slice(x, dim=len(b), start=s, stop=t, step=1)")  # fmt: skip
    broken = replace(rule, variables=rule.variables)
    object.__setattr__(broken, "left", (broken.left[0].operands[0],))  # type: ignore[union-attr]
    object.__setattr__(broken, "right", (broken.left[0],))
    with pytest.raises(RuleError, match="neither side binds"):
        canonical(broken)


def test_bit_exact_rules_are_told_from_reassociations() -> None:
    context = serial("t", "x: *b, y: *b, z: *b", "add sub neg mul")
    moves = {rule.name: rule.moves for rule in candidates(context, 2)}
    exact = {rule.equation.split(" for ")[0]: rule.moves for rule in candidates(context, 2)}
    assert exact["neg(sub(x, y)) = sub(y, x)"]
    assert not moves["add_associates"]
    assert not moves["mul_of_sum"] if "mul_of_sum" in moves else True


def test_a_scalar_has_both_signs_where_exactness_is_decided() -> None:
    """(relu(c) c) y = (relu(c) y) relu(c) is exact for a negative c alone."""
    context = serial("s", "x: *b i, c", "mul relu", samples=4)
    found = {str(rule.left[0]): rule.moves for rule in candidates(context, 3)}
    assert found["mul(mul(relu(x), x), y)"] is False


def test_floating_point_has_few_laws() -> None:
    rng = np.random.default_rng(0)
    x, y, z = (floatlaws.random(rng, (3,)) for _ in range(3))

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = floatlaws.evaluate("add", [a, b], {})
        assert total is not None
        return total

    assert np.array_equal(add(x, y), add(y, x))
    assert np.array_equal(add(-x, -y), -add(x, y))
    assert not np.array_equal(add(add(x, y), z), add(x, add(y, z)))
    assert floatlaws.evaluate("linear", [x, y], {}) is None
