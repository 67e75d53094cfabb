"""The intermediate representation: the parallel computation graph.

What a value is:

    mesh, layout, types       named axes of devices; how a tensor lies along each; its shape, dtype and layouts
    node, graph               frozen nodes; graphs are tuples of them
    inference                 gives every node its type, the only place that does
    text                      a graph printed and parsed, line by line; `cursor` reads one line
    builder, order            make a graph node by node; walk a deep one without recursion
    interpret                 what a graph means, in NumPy, on every device of its mesh
    analysis                  what a graph says without a cluster: what is constant, stored or kept for backward

What an operator is:

    row, rows/, optable       one row per operator, by topic; the table of all rows
    attrs, factors            its attributes; einsum-like strings that say how it splits
    precision, dtypes         what it computes in under autocast; names of dtypes

How it is carried out on devices:

    choice, dispatch, offers  ways to carry out an operator along one axis; sent to experts; which ways there are
    parallel, moves           the four parallel operators; the changes of layout that run as one collective
    pieces, stages            what ranks of unlike stages send each other; a graph cut into pipeline stages
    step/                     one training step as a list of actions

Where it comes from:

    capture/, aten/           a PyTorch model becomes a graph; one handler per ATen operator

For everyone:

    errors, checks, schema    the one hierarchy of errors; checks of fields and of JSON
    files, units, versions    files written whole or not at all; seconds and bytes as text; tested versions of torch
    launcher, hostlist        which launcher started this process; host lists as Slurm writes them

Imports nothing else of ours; every other folder may import it.
"""
