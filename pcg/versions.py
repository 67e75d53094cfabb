"""The versions of torch that Shardwright is tested with, and what to say of a newer one."""

from __future__ import annotations

TESTED = ("2.13", "2.14")
"""The releases of torch that everything (the first) and the core (the last) are tested with."""


def release(installed: str) -> tuple[int, ...]:
    """(2, 14) of "2.14.1+cpu"."""
    return tuple(int(part) for part in installed.split("+")[0].split(".")[:2])


def newer_than_tested() -> str:
    """What to say in an error where torch is newer than tested; "" where it is not."""
    from importlib.metadata import PackageNotFoundError, version  # slower to load than the command line

    try:
        installed = version("torch")
    except PackageNotFoundError:
        return ""
    if release(installed) <= release(TESTED[-1]):
        return ""
    return (
        f"torch {installed} is newer than Shardwright is tested with ({' and '.join(TESTED)}), which may be the cause: "
        f"pip install 'torch<{_after(TESTED[-1])}'"
    )


def _after(tested: str) -> str:
    major, minor = release(tested)
    return f"{major}.{minor + 1}"
