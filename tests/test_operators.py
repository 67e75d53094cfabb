"""A sample of the sweep in `docs/operators.md`, every kind of handler in it: results and gradients are torch's.

On one rank, on two with everything whole, and on two with everything split that can be. `make operators` runs it all.
"""

from __future__ import annotations

from bench.operators import judge, samples
from tests.each import some

KINDS = {
    "pointwise": "add clamp pow where div.floor_rounding nn.functional.gelu nn.functional.hardtanh xlogy",
    "reductions": "sum amax std logsumexp cumsum nn.functional.normalize",
    "structure": "cat roll as_strided unfold diagonal repeat nn.functional.pad.circular triu",
    "constants": "fill zero_",
    "contractions": "einsum addmm nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.bilinear",
    "lookups": "gather index_put scatter_add nn.functional.embedding nn.functional.embedding_bag",
    "losses": "nn.functional.cross_entropy nn.functional.nll_loss nn.functional.kl_div nn.functional.huber_loss",
    "networks": "nn.functional.batch_norm nn.functional.group_norm nn.functional.max_pool2d "
    "nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward",
    "modules": "nn.RReLU nn.LSTM nn.BatchNorm1d nn.TransformerEncoderLayer nn.Conv1d",
    "random": "nn.functional.rrelu nn.functional.dropout nn.functional.alpha_dropout bernoulli normal "
    "nn.functional.fractional_max_pool2d",
    "several results": "split unbind unbind_copy split_with_sizes_copy topk max.reduction_with_dim linalg.slogdet svd",
    "factorisations": "linalg.inv linalg.solve linalg.cholesky linalg.lu_factor linalg.tensorinv",
    "buffers that are read and written": "native_batch_norm _native_batch_norm_legit",
    "masks": "mask.triu mask.tril",
    "images": "nn.functional.interpolate.bicubic nn.functional.interpolate.trilinear nn.functional.pad.reflect "
    "nn.functional.avg_pool2d nn.functional.unfold nn.Fold nn.functional.pixel_shuffle",
    "recurrent": "nn.GRU",
}


def test_results_and_gradients_are_torchs() -> None:
    wanted = {name for names in KINDS.values() for name in some(names.split(), 2)}
    found = samples(1, f"^({'|'.join(name.replace('.', '[.]') for name in wanted)})$")
    assert {sample.operator for sample in found} == wanted
    twice = [sample for sample in found if sample.operator in ("nn.LSTM", "nn.GRU")]  # they assign attributes
    verdicts = [*judge([sample for sample in found if sample not in twice]), *judge(twice)]
    assert sorted(v.name for v in verdicts) == sorted(s.name for s in found)
    assert [v for v in verdicts if not v.good or v.refused] == []
    assert sum(v.num_split > 0 for v in verdicts) > 0.6 * len(verdicts)
    assert {"aten.linalg_inv.default", "aten.rrelu.default"} <= {target for v in verdicts for target in v.opaque}
