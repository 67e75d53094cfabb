"""The page's colours: those that stand beside each other are told apart by everyone, in the light and in the dark.

Colours as people see them who lack one kind of cone are by Machado, Oliveira and Fernandes, "A Physiologically-based
Model for Simulation of Color Vision Deficiency" (2009), full severity; distances are those of CIE 1976 L*a*b*, of which
2.3 are just noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain, combinations, pairwise

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
LEAST = 14.0
SEEN: Mapping[str, _Floats] = {
    name: np.array(matrix).reshape(3, 3)
    for name, matrix in {
        "all cones": (1, 0, 0, 0, 1, 0, 0, 0, 1),
        "no long": (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
        "no medium": (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881),
        "no short": (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900),
    }.items()
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def text(name: str) -> str:
    return files("shardwright.view").joinpath(name).read_text(encoding="utf-8")


def themes() -> list[dict[str, str]]:
    """The colours of the light and of the dark page, by name."""
    blocks = re.findall(r"{([^}]*--paper:[^}]*)}", text("page.css"))
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", block)) for block in blocks]


def stack() -> list[str]:
    """The colours of memory over time, from the bottom up."""
    (order,) = re.findall(r"const STACK = \[(.*?)\]", text("memory.js"), re.DOTALL)
    (colours,) = re.findall(r"const MEMORY_COLOURS = {(.*?)}", text("helpers.js"), re.DOTALL)
    by_category = dict(re.findall(r"(\w+): \"(\w+)\"", colours))
    return [by_category[name] for name in re.findall(r"\"(\w+)\"", order)]


def distance(one: str, other: str) -> float:
    """The least, as any of `SEEN` has it."""
    return min(float(np.linalg.norm(_lab(one, seen) - _lab(other, seen))) for seen in SEEN.values())


def _lab(colour: str, seen: _Floats) -> _Floats:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_beside_each_other_are_told_apart() -> None:
    anywhere = (
        ("batch", "sequence", "experts", "features", "whole", "communication"),
        ("forward", "backward", "weights", "end", "communication"),
        ("compute", "communication", "optimizer"),
        ("gathered", "sharded", "whole"),
    )
    light, dark = themes()
    assert len(stack()) == 9  # and slack on top
    for colours in (light, dark):
        beside = chain(chain.from_iterable(combinations(group, 2) for group in anywhere), pairwise(stack()))
        near = {(a, b): found for a, b in beside if (found := distance(colours[a], colours[b])) < LEAST}
        assert near == {}


def test_red_and_green_of_the_same_lightness_are_not_told_apart() -> None:
    """By who lacks a kind of cone; so the test above can fail."""
    assert (
        distance("#c06000", "#808000") < LEAST < np.linalg.norm(_lab("#c06000", np.eye(3)) - _lab("#808000", np.eye(3)))
    )
