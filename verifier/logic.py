"""Z3 without its type stubs, which make every expression a union of everything.

`Formula` and `Number` say what an expression is meant to be. All modules of the verifier take z3 from here.
"""

from __future__ import annotations

from typing import Any

import z3 as _z3

z3: Any = _z3
Formula = Any
Number = Any
Solver = Any
Answer = Any
