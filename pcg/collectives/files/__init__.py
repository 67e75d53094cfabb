"""Files of other systems, read into our data and written from it.

    documents    XML and JSON with bounds: size, depth, numbers; errors name the place
    own          our own JSON of topologies and schedules
    msccl        MSCCL's XML: programs of blocks
    mscclpp      MSCCL++'s JSON: plans of one-sided operations
    sccl         SCCL's JSON: topologies, and algorithms in steps and rounds
    taccl        TACCL's JSON: a machine, and a sketch of a schedule
    forestcoll   ForestColl's XML: spanning trees
    anyfile      which of these a file is

Nothing that is read is executed. A reader says that a file has its form, and not that it is right.
"""
