"""The readable Python program of one rank.

parallel graph ─▶ outside ─▶ statements ─▶ lines ─▶ emit ─▶ program

    outside      the work of the runtime around the program: batch, parameters, sums that make the loss
    statements   the actions of forward in order, divided into functions
    lines        each statement as code, after the reads that it needs and before the `del` of dead tensors
    functions    the functions that `forward` calls: one for equal blocks or regions that backward recomputes
    expressions  one node as torch code
    fusions      a few nodes as one torch call
    pieces       identifiers, comments, numbers: nothing from a plan file becomes code
    emit         the whole text
    program      the text compiled, so that tracebacks show its lines

Imports no other folder of lowering.
"""
