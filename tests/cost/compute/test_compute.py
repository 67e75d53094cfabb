"""Times of work: the roofline, what shapes do to it, and measured kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.cost.clusters.device import Device
from shardwright.cost.compute.compute import Compute, attention_share, matmul_share
from shardwright.cost.compute.kernels import Kernel, measured
from shardwright.cost.compute.work import Passes, Work, WorkKind
from shardwright.pcg.errors import ClusterError
from tests.each import each

DEVICE = Device("gpu", 10**9, 1e12, {"fp32": 2e13, "bf16": 2e14}, 0.5, 1e-6, "cuda")
UNITS = replace(DEVICE, num_units=132)
MODEL = Compute(DEVICE)
sizes = st.integers(1, 3000)


def matmul(m: int, n: int, k: int, dtype: str = "float32", batch: int = 1) -> Work:
    num_bytes = 4.0 * batch * (m * n + m * k + n * k)
    return Work("matmul", (batch, m, n, k), 2.0 * batch * m * n * k, num_bytes, dtype)


def pointwise(num_elements: int, flops: float = 1.0) -> Work:
    return Work("pointwise", (num_elements,), flops * num_elements, 8.0 * num_elements, "float32")


def attention(heads: int, queries: int, dim: int = 64, *, causal: bool = False, backward: bool = False) -> Work:
    flops = 4.0 * heads * queries * queries * dim / (2 if causal else 1)
    return Work("attention", (heads, queries, queries, dim), flops, 1.0, "bfloat16", causal, backward)


def test_bound_by_compute_or_by_memory() -> None:
    size = 10_000
    assert MODEL.work_s(matmul(size, size, size)) == pytest.approx(0.2)
    assert MODEL.work_s(matmul(size, size, size, "bfloat16")) == pytest.approx(0.02)
    assert MODEL.work_s(pointwise(10**9)) == pytest.approx(8e-3)
    assert MODEL.work_s(pointwise(10**9, flops=1e3)) == pytest.approx(5e-2)


def test_work_on_nothing_takes_a_launch() -> None:
    table = replace(DEVICE, kernels=(measured(matmul(64, 64, 64), 1e-3), measured(matmul(128, 64, 64), 2e-3)))
    for device in (DEVICE, UNITS, table):
        for work in (matmul(4, 0, 4), matmul(0, 4, 4), attention(2, 0), attention(0, 4, causal=True), pointwise(0)):
            assert Compute(device).work_s(work) == pytest.approx(device.kernel_s, abs=1e-9)


def test_dispatch_hides_behind_a_gpu_and_adds_up_on_a_cpu() -> None:
    small, large = (pointwise(1),), (pointwise(10**9),)
    assert MODEL.passes_s("add", Passes(small)) == (1e-6, 0.0)
    assert MODEL.passes_s("add", Passes(large)) == (MODEL.work_s(large[0]), 0.0)
    host = Compute(replace(DEVICE, kind="cpu"))
    assert host.passes_s("add", Passes(large))[0] == pytest.approx(1e-6 + MODEL.work_s(large[0]))


def test_an_operators_kernels_have_a_pace_of_their_own() -> None:
    device = replace(DEVICE, kind="cpu", paces={"tanh": (4.0, 2.0)})
    works = (pointwise(10**6),), (pointwise(10**7),)
    plain, paced = (Compute(device).passes_s(op, Passes(*works)) for op in ("exp", "tanh"))
    assert [s - device.op_overhead_s for s in paced] == pytest.approx(
        [pace * (s - device.op_overhead_s) for pace, s in zip((4.0, 2.0), plain, strict=True)]
    )
    assert Compute(device).passes_s("tanh", Passes(*works), launched=False) == pytest.approx(
        [s - device.op_overhead_s for s in paced]
    )


def test_dispatch_as_measured_for_an_operator_else_by_its_kernels() -> None:
    device = Compute(replace(DEVICE, kind="cpu", operators={"conv2d": (3e-5, 2e-4)}))
    view = Work("view", (1,), 0.0, 0.0, "float32")
    assert device.passes_s("conv2d", Passes((view,), (view, view))) == (3e-5, 2e-4)
    assert device.passes_s("linear", Passes((view,), (view, view))) == (1e-6, 2e-6)
    assert device.passes_s("linear", Passes((view,))) == (1e-6, 0.0)


def test_dispatch_of_some_gradients_is_a_share_of_that_of_all() -> None:
    device = Compute(replace(DEVICE, kind="cpu", operators={"mul": (3e-5, 2e-4)}))
    view = Work("view", (1,), 0.0, 0.0, "float32")
    assert device.passes_s("mul", Passes((view,), (view,), gradients=0.5)) == (3e-5, 1e-4)
    assert device.passes_s("linear", Passes((view,), (view,), gradients=0.5)) == (1e-6, 1e-6)  # by its one kernel
    looped = device.passes_s("mul", Passes((view,), (view,), gradients=0.5, groups=3))
    assert looped == pytest.approx((9e-5, 3e-4))


@given(sizes, sizes, sizes, sizes, sizes, sizes)
@example(1, 1, 255, 1, 1, 1)  # to a sum that is split among two
def test_more_of_everything_takes_longer(m: int, n: int, k: int, dm: int, dn: int, dk: int) -> None:
    """Whole units of alignment, so that only work grows."""
    small, large = matmul(8 * m, 8 * n, 8 * k), matmul(8 * (m + dm), 8 * (n + dn), 8 * (k + dk))
    for device in (DEVICE, UNITS):
        assert Compute(device).work_s(small) <= Compute(device).work_s(large) * (1 + 1e-9)


@given(sizes, sizes, sizes)
def test_a_share_is_a_share_and_tiles_make_no_large_product_slow(m: int, n: int, k: int) -> None:
    assert 0 < matmul_share((1, m, n, k), "bfloat16", 132) <= 1
    assert matmul_share((1, m, n, k), "bfloat16", 0) == 1
    assert matmul_share((8, 1024 + 256 * m, 2048 + 256 * n, 32 * k), "bfloat16", 132) == 1


def test_what_shapes_do() -> None:
    whole = matmul_share((1, 8192, 8192, 8192), "bfloat16", 132)
    assert whole == 1
    assert matmul_share((1, 8192, 8192, 8191), "bfloat16", 132) == pytest.approx(0.5, rel=1e-3)
    assert matmul_share((1, 128, 256, 1024), "bfloat16", 132) < 0.05  # a few tiles leave most units idle
    assert matmul_share((1, 128, 256, 132 * 1024), "bfloat16", 132) == 1  # but for long sums, which are split
    assert matmul_share((1, 128, 256, 33 * 1024), "bfloat16", 132) == pytest.approx(0.5)  # 33 parts of four small tiles
    assert matmul_share((512, 128, 128, 64), "bfloat16", 132) == pytest.approx(0.75)  # a smaller tile reuses less


def test_attention_has_its_own_rates() -> None:
    long = attention(1000, 8192)
    assert MODEL.work_s(long) == pytest.approx(long.flops / (2e14 * DEVICE.attention_efficiency))
    back = replace(long, backward=True)
    assert MODEL.work_s(back) == pytest.approx(back.flops / (2e14 * DEVICE.attention_backward_efficiency))
    assert attention_share(attention(132, 128), 132) == 1
    assert attention_share(attention(66, 128), 132) == 0.5
    assert attention_share(attention(132, 128, causal=True), 132) == pytest.approx(129 / 256)  # its block is whole


def test_a_kernel_takes_its_least_time() -> None:
    assert Compute(replace(DEVICE, kernel_s=2e-6)).work_s(pointwise(1)) == pytest.approx(2e-6, rel=1e-3)
    assert Compute(replace(DEVICE, kernel_s=2e-6)).work_s(Work("view", (1,), 0.0, 0.0, "int64")) == 0


def test_fp8_without_a_rate_runs_as_bf16() -> None:
    assert DEVICE.peak_flops_per_s("fp8") == 2e14
    assert replace(DEVICE, flops_per_s={"fp32": 1.0, "fp8": 9.0}).peak_flops_per_s("fp8") == 9


def test_an_unknown_dtype() -> None:
    with pytest.raises(ClusterError, match=r"^device 'gpu': no peak rate for dtype 'float9'; choose one of"):
        MODEL.work_s(matmul(1, 1, 1, "float9"))


# ---- measured kernels ----


def with_kernels(*kernels: Kernel) -> Compute:
    return Compute(replace(DEVICE, kernels=kernels))


def test_measured_kernels_are_met_and_others_lie_between() -> None:
    small, large = measured(matmul(256, 256, 256), 1e-5), measured(matmul(1024, 1024, 1024), 4e-4)
    model = with_kernels(small, large)
    assert model.work_s(small) == pytest.approx(1e-5)
    assert model.work_s(large) == pytest.approx(4e-4)
    assert 1e-5 < model.work_s(matmul(512, 512, 512)) < 4e-4
    assert model.work_s(matmul(8, 8, 8)) == pytest.approx(1e-5)
    assert model.work_s(matmul(1024, 1024, 2048)) == pytest.approx(8e-4)
    assert model.work_s(matmul(64, 64, 64, "bfloat16")) == MODEL.work_s(matmul(64, 64, 64, "bfloat16"))
    assert model.work_s(pointwise(100)) == MODEL.work_s(pointwise(100))


@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_gradients_go_with_the_forward_pass_until_they_are_measured(kind: WorkKind) -> None:
    """As in files of a machine whose gradients nobody measured."""
    forward = replace(matmul(256, 256, 256), kind=kind)
    backward = replace(forward, backward=True)
    before = with_kernels(measured(forward, 1e-4))
    assert before.work_s(backward) == before.work_s(forward) == pytest.approx(1e-4)
    both = with_kernels(measured(forward, 1e-4), measured(backward, 3e-4))
    assert (both.work_s(forward), both.work_s(backward)) == (pytest.approx(1e-4), pytest.approx(3e-4))
    assert with_kernels(measured(backward, 3e-4)).work_s(forward) == MODEL.work_s(forward)


def test_where_the_host_works_itself_small_kernels_take_next_to_nothing_beside_their_dispatch() -> None:
    kernels = (measured(pointwise(2**12), 3e-6), measured(pointwise(2**14), 1e-5))
    host = Compute(replace(DEVICE, kind="cpu", kernels=kernels))
    assert host.work_s(pointwise(2**12)) == pytest.approx(3e-6)
    assert host.work_s(pointwise(2**6)) == pytest.approx(3e-6 / 2**6)
    assert with_kernels(*kernels).work_s(pointwise(2**6)) == pytest.approx(3e-6)  # a GPU has to launch it


def test_measured_kernels_bound_by_arithmetic_and_by_memory() -> None:
    """An exponential as slow as its arithmetic, a sum as fast as the cache: neither speaks for the other."""
    device = replace(DEVICE, vector_flops_per_s=1e10)
    curved = [measured(pointwise(n, flops=12), 2e-9 * n) for n in (10**3, 10**6)]
    plain = [measured(pointwise(n, flops=1e-3), 1e-12 * n) for n in (10**3, 10**6)]
    model = Compute(replace(device, kernels=(*curved, *plain)))
    for kernel in curved:
        assert model.work_s(kernel) == pytest.approx(kernel.seconds)
    assert model.work_s(plain[1]) == pytest.approx(1e-6)
    assert Compute(replace(device, kernels=tuple(plain))).work_s(plain[1]) == pytest.approx(1e-6)


def test_the_smallest_kernel_that_arithmetic_bounds_says_nothing_of_all_smaller_ones() -> None:
    """Found by a calibration: a small attention, bound by memory, was given the time of the next larger one."""
    small, smaller, large = (
        Work("attention", (32, length, length, dim), 4.0 * 32 * length**2 * dim, 16.0 * 32 * length * dim, "float32")
        for length, dim in ((16, 16), (12, 16), (1024, 64))
    )
    model = with_kernels(measured(small, 1e-4), measured(large, 1.0))
    bounds = map(model.bounds, (small, smaller, large))
    assert [compute_s < memory_s for compute_s, memory_s in bounds] == [True, True, False]
    assert model.work_s(small) == pytest.approx(1e-4)
    assert model.work_s(large) == pytest.approx(1.0)
    assert model.work_s(smaller) == pytest.approx(1e-4)  # no less than the fastest of its kind


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(1e-7, 1.0)), min_size=1, max_size=8), sizes, sizes)
def test_noise_never_makes_more_work_faster(points: list[tuple[int, float]], size: int, more: int) -> None:
    model = with_kernels(*(measured(pointwise(n), s) for n, s in points))
    assert model.work_s(pointwise(size)) <= model.work_s(pointwise(size + more)) * (1 + 1e-9)


def test_a_products_time_goes_with_those_of_like_shape() -> None:
    """Three products of as many FLOPs: deep ones run at half the rate of wide ones."""
    wide, between, rather_deep, deep = (
        replace(matmul(m, n, k), num_bytes=1.0)
        for m, n, k in ((1024, 1024, 64), (512, 512, 256), (128, 128, 4096), (64, 64, 16384))
    )
    model = with_kernels(measured(wide, 1e-4), measured(deep, 2e-4))
    assert model.work_s(wide) == pytest.approx(1e-4, rel=0.06)
    assert model.work_s(deep) == pytest.approx(2e-4, rel=0.06)
    assert model.work_s(wide) < model.work_s(between) < model.work_s(rather_deep) < model.work_s(deep)


shapes = st.tuples(*[st.integers(1, 4096)] * 3)


@given(st.lists(st.tuples(shapes, st.floats(1e-6, 1.0)), min_size=1, max_size=8), shapes)
def test_on_a_device_that_is_half_as_fast_every_product_takes_twice_as_long(
    points: list[tuple[tuple[int, int, int], float]], shape: tuple[int, int, int]
) -> None:
    fast, slow = (with_kernels(*(measured(matmul(*sizes), x * s) for sizes, s in points)) for x in (1, 2))
    assert slow.work_s(matmul(*shape)) == pytest.approx(2 * fast.work_s(matmul(*shape)))


@given(shapes, st.floats(1e-6, 1.0))
def test_shapes_unlike_all_that_were_measured_take_what_the_curve_says(
    shape: tuple[int, int, int], seconds: float
) -> None:
    """Two of as much work, one of them ten times as slow, say nothing of a third that is unlike both."""
    m, n, k = shape
    wide = replace(matmul(m * 2**10, n * 2**10, k), num_bytes=1.0)
    deep, unlike = (replace(wide, shape=sizes) for sizes in ((1, m, n, k * 2**20), (2**20, m, n, k)))
    model = with_kernels(measured(wide, seconds), measured(deep, 10 * seconds))
    assert model.work_s(unlike) == pytest.approx(10**0.5 * seconds, rel=1e-6)


GOOD: dict[str, Any] = {
    "kind": "matmul", "shape": [1, 2, 3, 4], "flops": 48, "num_bytes": 104, "dtype": "float32", "seconds": 1e-6,
}  # fmt: skip
WRONG = [
    (5, r"^Device\.kernels: expected a list of measured kernels, got 5; leave it out or run `shardwright calibrate`$"),
    ([{}], r"^Device\.kernels\[0\]: expected an object with kind, shape, .*, got {}; calibrate again$"),
    ([GOOD, {**GOOD, "kind": "gemm"}], r"^Device\.kernels\[1\]\.kind: expected one of .*'matmul'.*got 'gemm'"),
    ([{**GOOD, "shape": [0]}], r"^Device\.kernels\[0\]\.shape: expected a positive integer, got 0"),
    ([{**GOOD, "shape": 3}], r"^Device\.kernels\[0\]\.shape: expected the sizes of the work, got 3; a matmul has"),
    ([{**GOOD, "shape": [1, 2]}], r"^Device\.kernels\[0\]\.shape: expected 4 sizes, as matmul has, got \[1, 2\]; see"),
    (
        [{**GOOD, "seconds": 0}],
        r"^Device\.kernels\[0\]\.seconds: expected a positive number, got 0; give it in seconds",
    ),
    ([{**GOOD, "flops": -1}], r"^Device\.kernels\[0\]\.flops: expected a number of at least 0, got -1"),
    ([{**GOOD, "dtype": ""}], r"^Device\.kernels\[0\]\.dtype: "),
    ([{**GOOD, "causal": 1}], r"^Device\.kernels\[0\]\.causal: expected true or false, got 1; give one of them$"),
]


@each(("kernels", "message"), WRONG)
def test_bad_kernels(kernels: Any, message: str) -> None:
    assert replace(DEVICE, kernels=[GOOD]).kernels[0].shape == (1, 2, 3, 4)
    with pytest.raises(ClusterError, match=message):
        replace(DEVICE, kernels=kernels)


@each(
    ("field", "value", "message"),
    [
        ("operators", 3, r"^Device\.operators: expected a mapping of operator to \(forward, backward\) seconds, got 3"),
        ("operators", {"add": 1}, r"^Device\.operators\.add: expected two numbers, the seconds of forward and of"),
        ("operators", {"add": (1, -1)}, r"^Device\.operators\.add: expected a number of at least 0, got -1"),
        ("paces", 3, r"^Device\.paces: expected a mapping of operator to \(forward, backward\) times, got 3; leave it"),
        (
            "paces",
            {"add": 1},
            r"^Device\.paces\.add: expected two numbers, the times of forward and of backward, got 1",
        ),
        ("first_uses", {"add": (1, "x")}, r"^Device\.first_uses\.add: expected a number of at least 0, got 'x'"),
        ("num_units", -1, r"^Device\.num_units: expected a positive integer, got -1"),
        ("kernel_s", -1, r"^Device\.kernel_s: expected a number of at least 0, got -1; give it in seconds"),
        ("vector_flops_per_s", -1, r"^Device\.vector_flops_per_s: expected a number of at least 0, got -1"),
        ("attention_efficiency", 2, r"^Device\.attention_efficiency: expected a number above 0 and at most 1, got 2"),
    ],
)
def test_bad_fields(field: str, value: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        replace(DEVICE, **{field: value})
