"""Padding: a serial graph in which factors that no mesh divides are a little longer, so that it can be split evenly.

    w [50257, h]          ──▶  w, then zeros: [50258, h]
    embedding(w, ids)     ──▶  the same: rows of zeros, which no index names
    linear(x, w)          ──▶  [..., 50258], of which the end is garbage
    cross_entropy_sum     ──▶  of logits that are -inf there

A *stretch* says where the padding of a dimension lies. Stretches begin at parameters (`Padding`), which end in zeros,
or at inputs, which end in copies of their rows, and follow the factors of operators, as splits do. Where no law lets
one go on, the value is trimmed to what it was.

    stretches   where padding lies, and how it follows the factors of an operator
    laws        when an operator may have padding
    longer      the graph with padding; a plan's is made again when the plan is checked
    rows        the graph of a batch with more rows
    origins     which dimensions of parameters are padded
"""
