"""What people read: the facts of a plan, told as text, as plain data and by the page.

Imports every folder but `lowering`; imported by `shardwright.api`, `shardwright.cli` and `shardwright.view`. The search
knows nothing of it.
"""
