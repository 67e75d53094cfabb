"""Operations: what a step runs, and in whose memory its values lie."""

from __future__ import annotations

from shardwright.pcg.graph import Graph
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.text import parse_graph
from tests.each import each

NUM_BYTES = 4 * 6 * 8 * 4 // 4
"""Of what one rank reads of `x` in one of two microbatches."""


def sliced(first: str, second: str, along: int = 0) -> Graph:
    """A mean over a batch that is cut into two microbatches and sliced over two ranks, by nodes of these names."""
    text = f"""
        mesh [mb=2, dp=2]
        %x = input() {{dtype='float32', grad=False, layouts=(), shape=(4, 6, 8), target='x'}} @x
        %{first} = partition(%x) {{axis='mb', blocks=1, dim={along}}} @x
        %{second} = partition(%{first}) {{axis='dp', blocks=1, dim={along}}} @x
        %y = relu(%{second}) split(mb=_{along}, dp=_{along}) {{}} @y
        %s = sum(%y) split(mb=d{along}, dp=d{along}) {{dims=(0, 1, 2), keepdim=False}} @s
        %s.reduce_dp = reduce(%s) {{axis='dp'}} @s
        %s.reduce_mb = reduce(%s.reduce_dp) {{axis='mb'}} @s
        outputs loss=%s.reduce_mb
    """
    return parse_graph("\n".join(line.strip() for line in text.splitlines() if line.strip()))


@each(("along", "num_bytes"), [(0, 0), (2, NUM_BYTES)])
def test_slices_of_the_batch_along_its_first_dimension_are_views(along: int, num_bytes: int) -> None:
    graph = sliced("half", "quarter", along)
    sizes = {o.name: o.num_bytes for o in Operations(graph).listed}
    assert (sizes["half"], sizes["quarter"]) == (2 * num_bytes, num_bytes)
    assert sizes["y"] == NUM_BYTES
