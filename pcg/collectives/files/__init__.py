"""Files of other systems, read into our data and written from it. Nothing that is read is executed.

documents    XML and JSON with bounds: size, depth, numbers; errors name the place
msccl        MSCCL's XML: programs of blocks
"""
