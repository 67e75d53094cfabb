"""Z3 without its type stubs, which make every expression a union of everything.

`Formula` and `Number` name the intended type of an expression. All modules of the verifier import z3 from here.
"""

from __future__ import annotations

from typing import Any

import z3 as _z3

z3: Any = _z3
Formula = Any
Number = Any
Solver = Any
Answer = Any
