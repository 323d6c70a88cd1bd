"""Every op of the project, by name. A new op is one folder beside the others and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.plugins.all_reduce import torch_op as all_reduce
from twostroke.plugins.compressor import torch_op as compressor
from twostroke.plugins.hyper_connection import torch_op as hyper_connection
from twostroke.plugins.markov_head import torch_op as markov_head
from twostroke.plugins.moe import torch_op as moe
from twostroke.plugins.nsa import torch_op as nsa
from twostroke.plugins.op import Op
from twostroke.plugins.quantised import torch_op as quantised

CATALOGUE: Mapping[str, Op] = {
    op.name: op
    for folder in (all_reduce, compressor, hyper_connection, markov_head, moe, nsa, quantised)
    for op in folder.OPS
}
