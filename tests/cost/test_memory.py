"""Memory by category."""

from dataclasses import fields

from shardwright.cost.memory import Memory, adam_bytes


def test_total_and_sum() -> None:
    one = Memory(parameters_bytes=1, activations_bytes=2)
    two = Memory(*range(1, len(fields(Memory)) + 1))
    assert (one.total_bytes, two.total_bytes) == (3, 45)
    assert (one + two).total_bytes == 48
    assert (one + two).activations_bytes == 6
    assert one + Memory() == one
    assert list(two.by_category()) == [
        "parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "communication", "temporary", "slack"
    ]  # fmt: skip


def test_adam_in_fp32_takes_16_bytes_per_element() -> None:
    assert adam_bytes(1000) == Memory(parameters_bytes=4000, gradients_bytes=4000, optimizer_bytes=8000)


def test_adam_with_sharded_storage() -> None:
    zero_1 = adam_bytes(1000, optimizer_shards=4)
    zero_3 = adam_bytes(1001, parameter_shards=4, gradient_shards=4, optimizer_shards=4)
    assert zero_1.total_bytes == 8000 + 2000
    assert zero_3.total_bytes == 251 * 16  # the last shard is padded
    assert adam_bytes(10, element_bytes=8).total_bytes == 320
