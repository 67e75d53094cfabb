"""Serial rules, second proof: elements as real numbers with sums, decided by Z3. Shares no code with normal forms.

    realproof                 the proof
    reals                     elements of terms as real numbers; by kind of row:
    reals_moves, reals_sums
    numbers, numbersums       functions of real numbers; sums over indices

Used by `verifier.certificates`.
"""
