"""Serial rules, second proof: elements as real numbers with sums, decided by Z3. Shares no code with normal forms."""
