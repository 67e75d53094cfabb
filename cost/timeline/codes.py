"""Costs of encoded gathers and sums beyond the transfer: encoding and decoding, and the memory of codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.encodings import ENCODED_TOGETHER, Encoding, padded
from shardwright.pcg.step.parameters import Parameter


class Codes(NamedTuple):
    """The cost of an encoded transfer beside the transfer.

    num_bytes     of the codes, as the transfer is timed
    encode_s      seconds before it; `decode_s`: behind it
    encode_bytes  memory while values become codes; `held_bytes`: of codes that are sent and that arrive, until it ends
    """

    num_bytes: float
    encode_s: float
    decode_s: float
    encode_bytes: float
    held_bytes: float


def gathered(steps: Steps, parameters: Sequence[Parameter], num_bytes: float, size: int) -> Codes | None:
    """Return the codes of a gather of so many bytes on `size` devices: each encodes its slice, and decodes all."""
    if (encoding := parameters[0].gathered_as) is None:
        return None
    part_bytes, sent = num_bytes / size, sum(p.gathered_sent(size) for p in parameters)
    encode_s, decode_s = steps.encode_s(part_bytes, encoding), steps.decode_s(num_bytes, encoding)
    return Codes(sent, encode_s, decode_s, quotient_bytes(part_bytes), sent * (1 + 1 / size))


def scattered(steps: Steps, parameters: Sequence[Parameter], encoding: Encoding | None, size: int) -> Codes | None:
    """Return the codes of a sum of which each device keeps its slice: it encodes all, and decodes the parts of one."""
    if encoding is None:
        return None
    whole, sent = sum(p.summed_bytes for p in parameters), sum(p.scattered_sent(size) for p in parameters)
    encode_s, decode_s = steps.encode_s(whole, encoding), steps.decode_s(whole, encoding)
    return Codes(sent, encode_s, decode_s, quotient_bytes(whole), 2 * sent)


def summed(steps: Steps, num_bytes: float, code_bytes: float, like: Parameter, size: int) -> Codes | None:
    """Return the codes of a sum that all devices get: those of a piece are decoded, and its sum is encoded once more.

    `num_bytes`: of the gradients; `code_bytes`: of their codes, before padding.
    """
    if (encoding := like.summed_as) is None:
        return None
    sent = padded(code_bytes, size, encoding, like.reduced_dtype)
    decode_s = steps.decode_s(num_bytes, encoding)
    encode_s = steps.encode_s(num_bytes, encoding) + decode_s + steps.encode_s(num_bytes / size, encoding)
    made_bytes = max(quotient_bytes(num_bytes), num_bytes * (1 + 1 / size))
    return Codes(sent, encode_s, decode_s, made_bytes, 2 * sent)


def quotient_bytes(num_bytes: float) -> float:
    """Return the bytes that encoding values of so many takes for quotients and codes, as in float32."""
    return 1.25 * min(num_bytes, 4.0 * ENCODED_TOGETHER)
