"""Capture: a PyTorch model becomes a serial graph.

    capture       the whole way: model, batch ─▶ exported program ─▶ graph, and the facts that bind it to the model
    exporting     calls `torch.export`, and says what to do where that fails
    importing     turns each ATen node of the exported program into rows of the op table, by `pcg.aten`
    fake          models of any size without memory
    record, replay
                  how their tensors were made, and the same on real memory, one tensor at a time
    draws         where the draws among that find their generators

Deep models are exported from a few of their layers:

    depth         finds long lists of layers, and shortens the model to some of them
    alike         notes what each layer does, and compares the shortened model with the whole one
    results       results of operators without data, known once for all operands of the same types
    kinds         chooses the layers that are exported: one of each kind
    deepening     copies them in the graph, to all layers again

The program is the one that trains:

    eagerly       branches that ask whether they are compiled are answered as in eager mode
    distributions `torch.distributions` make no checks of values
    masks         attention masks of `transformers` as they are in training
    showing       what the values of masks in buffers show
    modules       each module's own precision
    casting       16-bit parameters over masters in float32
    regions       the region of `torch.autocast` in which each operator ran
    autograd      gradients are those of the forward that ran
    unread        draws that nothing reads stay in the program

What a forward leaves behind is carried over, or refused by name:

    places        the places where a model holds Python state
    writing       buffers that a forward assigns are outputs of the graph
    state         other state that a forward leaves in the model
    returned      the form of what a model returns
    with_loss     a model and a loss function as one module
    settling      checks that every later step is like the first
    hooks, backwards, unseen
                  things that no program would repeat: hooks, custom backwards, seeds and foreign generators

What cannot be captured at all:

    foreign       parts that are run once for their types, and then are one call in the graph
    functions     functions of torch as such parts
    late_draws    where a forward draws by a function that was imported by its name
    finding       which parts have to be: the smallest around the place where capture fails

Operators that a graph cannot have as they are:

    strided       `as_strided` by positions
    routing       mixtures of experts per token
    networks      the layers of an expert as one row

Imports the rest of `pcg`, which imports nothing from here.
"""
