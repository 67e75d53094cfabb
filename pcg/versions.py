"""The versions of torch that Shardwright is tested with, and the message for a newer one."""

from __future__ import annotations

TESTED = ("2.13", "2.14")
"""The releases of torch that everything (the first) and the core (the last) are tested with."""


def release(installed: str) -> tuple[int, ...]:
    """Return a version's release: (2, 14) for "2.14.1+cpu"."""
    return tuple(int(part) for part in installed.split("+")[0].split(".")[:2])


def newer_than_tested() -> str:
    """Return the words for an error if torch is newer than tested; "" if it is not."""
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
