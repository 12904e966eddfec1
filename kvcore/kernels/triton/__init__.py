"""Triton kernels, one operator per file. Importing this package imports Triton; nothing is compiled or tuned here.

Names inside kernels tell the role: `i_` program or loop index, `o_` offsets along one dimension, `p_` pointer, `s_`
stride, `b_` block in registers. Offsets are 64-bit. A `row` is one query head of a KV head's group and one query token:
row = g * Q + q, so that the rows of a KV head read its keys once.
"""
