"""The timeline of a plan: who computes, sends and waits when, and what lies in memory meanwhile.

graph ─▶ steps ─▶ sections ─▶ lines ─▶ forward, backward (tasks of a segment, with pool) ─▶ program ─▶ timeline ─▶ trace
                                                │ clock: streams            schedules ──┘
"""
