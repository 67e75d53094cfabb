"""The intermediate representation: the parallel computation graph.

Values:

    mesh, layout, types       named axes of devices; a tensor's layout along each; its shape, dtype and layouts
    node, graph               frozen nodes; graphs are tuples of them
    inference                 the only place that gives nodes their types
    text                      a graph printed and parsed, line by line; `cursor` reads one line
    builder, order            make a graph node by node; walk a deep one without recursion
    interpret                 a graph's meaning, in NumPy, on every device of its mesh
    analysis                  facts of a graph without a cluster: constant, stored or kept for backward

Operators:

    row, rows/, optable       one row per operator, by topic; the table of all rows
    attrs, factors            its attributes; einsum-like strings that say how it splits
    precision, dtypes         the dtypes it computes in under autocast; names of dtypes

Ways to carry operators out on devices:

    choice, dispatch, offers  ways to carry out an operator along one axis; rows sent to experts; the set of all ways
    ring                      attention whose keys travel around the devices that share a sequence
    slices                    the keys of one device that the queries of another can see
    bands                     how far before and after itself a query sees keys, read from how a mask is made
    shown                     what the values of masks in buffers show
    bounds                    bounds of values that are made of the positions of queries and keys
    parallel, moves           the four parallel operators; the changes of layout that run as one collective
    results                   what a model returns, as outputs of its graph
    encodings                 what moves may send in place of values, and how far it may be off
    pieces, stages            transfers between ranks of unlike stages; a graph cut into pipeline stages
    step/                     one training step as a list of actions
    collectives/              networks, collectives and their schedules as data

Other graphs of the same model:

    padding/                  factors and batches that no mesh divides, a little longer, so that it can be split evenly

Sources of graphs:

    capture/, aten/           a PyTorch model becomes a graph; one handler per ATen operator
    foreign                   calls of what capture cannot see through, as data

For everyone:

    errors, checks, schema    the one hierarchy of errors; checks of fields and of JSON
    arguments                 checks of what public functions are given
    files, units, versions    files written whole or not at all; seconds and bytes as text; tested versions of torch
    launcher, hostlist        which launcher started this process; host lists as Slurm writes them

Imports nothing else of ours; every other folder may import it.
"""
