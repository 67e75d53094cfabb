"""Maximum flows: against networkx, on random networks."""

import random

import networkx as nx

from shardwright.pcg.collectives.flows import Network


def test_flows_are_those_of_networkx() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        edges = {(draw.randrange(7), draw.randrange(7)): draw.randrange(1, 9) for _ in range(18)}
        edges = {(a, b): room for (a, b), room in edges.items() if a != b}
        network, graph = Network(7, edges), nx.DiGraph()
        graph.add_nodes_from(range(7))
        graph.add_edges_from((a, b, {"capacity": room}) for (a, b), room in edges.items())
        value = nx.maximum_flow_value(graph, 0, 6)
        rooms = list(edges.values())
        assert network.max_flow(0, 6, rooms) == value, seed
        side = network.source_side(0)
        assert sum(room for (a, b), room in edges.items() if a in side and b not in side) == value
        sent = dict(zip(edges, network.flows(), strict=True))
        assert all(0 <= sent[edge] <= room for edge, room in edges.items())
        for node in range(1, 6):
            into = sum(flow for (_, b), flow in sent.items() if b == node)
            assert into == sum(flow for (a, _), flow in sent.items() if a == node)
        assert network.max_flow(0, 6, rooms, enough=1) == min(1, value)
