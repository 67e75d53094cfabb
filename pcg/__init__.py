"""The intermediate representation: the parallel computation graph.

Here belong typed layouts, the mesh, the op table, the four parallel operators, graph values, inference,
validation, the text form, the reference interpreter, the import from torch and the error hierarchy.

Imports nothing else of ours; every other folder may import it.
"""
