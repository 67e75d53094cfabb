"""Host lists and counts of tasks, as Slurm writes them."""

import pytest

from shardwright.pcg.errors import ClusterError
from shardwright.pcg.hostlist import hosts_of, tasks_per_node
from tests.each import each


@each(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("n[1,3-4],gpu7.example", ["n1", "n3", "n4", "gpu7.example"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("c[1]-ib", ["c1-ib"]),
        ("a\nb\n", ["a", "b"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert list(hosts_of(text)) == hosts


@each(
    ("text", "problem"),
    [
        ("", "it names no host"),
        ("node[1-", r"'node\[1-' is no name and no range"),
        ("node[a-b]", "'a-b' is no range of numbers"),
        ("node[3-1]", "'3-1' is no range of numbers"),
        ("node[]", "'' is no range of numbers"),
        ("n[0-999999999]", "it names over a million hosts"),
        ("n[0-999]m[0-999]k[0-9]", "it names over a million hosts"),
        ("n[0-999999]m[0-999999]k[0-999999]", "it names over a million hosts"),
        ("two words", "'two words' is no name and no range"),
    ],
)
def test_what_is_no_host_list(text: str, problem: str) -> None:
    with pytest.raises(
        ClusterError, match=rf"^host list .*: {problem}; expected names and ranges such as node\[01-08\]"
    ):
        hosts_of(text)


def test_tasks_per_node() -> None:
    assert tasks_per_node("8") == (8,)
    assert tasks_per_node("4(x2),3") == (4, 4, 3)
    for text in ("4(x0)", "4x2", "", "4(x9999999999)"):
        with pytest.raises(ClusterError, match=r"is no count; expected entries such as 4 or 4\(x2\)"):
            tasks_per_node(text)
