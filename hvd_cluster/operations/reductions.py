"""The reductions under Horovod's names for them."""

from collectives.api import ReduceOp

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM
