"""What an algorithm of a collective takes, as text."""

from shardwright.cost.collectives.algorithms import Algorithm


def text_of(algorithm: Algorithm, size: str = "S") -> str:
    """The formula, such as `14·α(nvlink) + 7/4·S/B(nvlink)`, for a tensor of `size` bytes."""
    size = f"({size})" if any(sign in size for sign in "+-") else size
    hops = [f"{step.hops}·α({step.link.name})" for step in algorithm.steps if step.hops]
    sent = [f"{step.share}·{size}/B({step.link.name})" for step in algorithm.steps]
    volume = f"max({', '.join(sent)})" if algorithm.pipelined and len(sent) > 1 else " + ".join(sent)
    return " + ".join([*hops, volume])
