"""The rows of the op table, one file per topic. Each file exports `ROWS`.

    pointwise      each element by itself
    contractions   sums of products
    reductions     reductions, scans, sorts
    structural     what only moves elements
    indexing       lookups by integer tensors
    neural         normalization, attention, pooling, dropout, cross-entropy
    images         resampling, patches
    recurrent      LSTM, GRU, RNN
    spectra        Fourier transforms
    declared       what holds because a user says so; `ROWS` finds these rows and does not list them
    experts        mixtures of experts, token by token

`pcg.optable` gathers them.
"""
