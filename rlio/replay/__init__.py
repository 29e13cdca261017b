"""The replay engine: the orders in which stored rows are served."""

from rlio.query.order import ORDER_VERSION, Permutation, WindowOrder, WindowRef

__all__ = ["ORDER_VERSION", "Permutation", "WindowOrder", "WindowRef"]
